"""Replay and autograd: whatever recomputes, in whatever order, gradients are those of a run without checkpointing.

A router that ran with other routes in its recompute would change them: `test_the_matrix_can_see_wrong_routes` shows that
it would be seen. And the rows of a micro-batch live as long as the graph that may need them, no longer.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from qwen import CONFIG, SPEC, build, forward, gradients, loss, samples_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from r3.errors import ReplayError
from r3.microbatch import MicroBatch
from r3.trainers.transformers import attach, right_padded

PARTS = [[sample] for sample in samples_of(9, 12, 5)]  # three micro-batches
aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> nn.Module:
    return build()


def enable(model: nn.Module, **settings: Any) -> None:
    """Checkpoint every decoder layer, as transformers does it."""
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def save(*ops: Any) -> Callable[[], Any]:
    """Selective checkpointing that saves the outputs of some operators, by the order of their calls."""

    def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def checkpoint_blocks(model: nn.Module, *, use_reentrant: bool) -> None:
    """As FSDP's users do it: a module around the block."""
    kind = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
    for layer in model.model.layers:
        layer.mlp = checkpoint_wrapper(layer.mlp, checkpoint_impl=kind)


def nested(model: nn.Module, *, use_reentrant: bool) -> None:
    enable(model, use_reentrant=use_reentrant)
    checkpoint_blocks(model, use_reentrant=use_reentrant)


SELECTION = (
    aten.topk.default,
    aten.gather.default,
    aten._to_copy.default,
    aten.index_select.default,
    aten.index_copy.default,
    aten.eq.Tensor,
    aten.any.dim,
    aten.sum.dim_IntList,
)
KINDS: dict[str, Callable[[nn.Module], None]] = {
    "reentrant": lambda model: enable(model, use_reentrant=True),
    "not reentrant": lambda model: enable(model, use_reentrant=False),
    "without early stop": lambda model: enable(model, use_reentrant=False, early_stop=False),
    "selective, matrix products saved": lambda model: enable(
        model, use_reentrant=False, context_fn=save(aten.mm.default)
    ),
    "selective, selection saved": lambda model: enable(model, use_reentrant=False, context_fn=save(*SELECTION)),
    "only the block, reentrant": lambda model: checkpoint_blocks(model, use_reentrant=True),
    "only the block, not reentrant": lambda model: checkpoint_blocks(model, use_reentrant=False),
    "nested, reentrant": lambda model: nested(model, use_reentrant=True),
    "nested, not reentrant": lambda model: nested(model, use_reentrant=False),
}


@functools.cache
def expected() -> torch.Tensor:
    """Without checkpointing."""
    model = build()
    replay = attach(model)
    for part in PARTS:
        loss(model, part, replay).backward()
    return gradients(model)


def test_the_matrix_can_see_wrong_routes(model) -> None:
    replay = attach(model)
    for part in PARTS[:2]:
        loss(model, part, replay).backward()
    loss(model, PARTS[2]).backward()  # one of three live
    assert (gradients(model) - expected()).abs().max() > 1e-3 * expected().abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_without_checkpointing(kind: str) -> None:
    for order in itertools.permutations(range(3)):
        model = build()
        KINDS[kind](model)
        replay = attach(model)
        losses = [loss(model, part, replay) for part in PARTS]  # all in flight
        for index in order:
            losses[index].backward()
        torch.testing.assert_close(gradients(model), expected(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_one_backward_through_several_micro_batches(kind: str, model) -> None:
    KINDS[kind](model)
    replay = attach(model)
    sum(loss(model, part, replay) for part in PARTS).backward()
    torch.testing.assert_close(gradients(model), expected(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "nested, not reentrant"])
def test_live_and_replayed_forwards_in_flight_together(kind: str, model) -> None:
    """The live one is recomputed live although a replayed one is current, and the other way round."""
    replay = attach(model)
    loss(model, PARTS[0], replay).backward()
    loss(model, PARTS[1]).backward()
    reference = gradients(model)
    KINDS[kind](model)
    replayed, live = loss(model, PARTS[0], replay), loss(model, PARTS[1])
    layout, input_ids, mask = right_padded(PARTS[2])
    with replay.micro_batch(PARTS[2], layout, input_ids):
        model(input_ids, attention_mask=mask, use_cache=False)
        live.backward()
        replayed.backward()
    torch.testing.assert_close(gradients(model), reference, rtol=1e-5, atol=1e-8)


def test_a_checkpoint_around_the_whole_model(model) -> None:
    replay = attach(model)
    losses = []
    for part in PARTS:
        layout, input_ids, mask = right_padded(part)
        with replay.micro_batch(part, layout, input_ids):
            run = functools.partial(model, attention_mask=mask, use_cache=False)
            logits = checkpoint(lambda ids, run=run: run(ids).logits, input_ids, use_reentrant=False)
        losses.append(logits.logsumexp(-1).square().mean())
    for one in losses[::-1]:
        one.backward()
    torch.testing.assert_close(gradients(model), expected(), rtol=1e-5, atol=1e-8)


def test_a_reentrant_checkpoint_around_the_whole_model_is_refused(model) -> None:
    """Its output has no graph of the model, so nothing says in backward which micro-batch it was."""
    replay = attach(model)
    layout, input_ids, mask = right_padded(PARTS[0])
    start = torch.zeros((), requires_grad=True)
    with replay.micro_batch(PARTS[0], layout, input_ids):
        logits = checkpoint(
            lambda _start: model(input_ids, attention_mask=mask, use_cache=False).logits, start, use_reentrant=True
        )
    with pytest.raises(ReplayError, match="a backward whose micro-batch is not known"):
        logits.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_in_the_place_of_a_forward(model, use_reentrant: bool) -> None:
    """Put there before attach, it would run the block again without its hooks: refused. Put there afterwards, it works."""
    blocks = [model.model.layers[index].mlp for index in SPEC.moe_layers]
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    with pytest.raises(
        ReplayError, match="layer 1: the experts of this block cannot be watched: its forward does not call them"
    ):
        attach(model)
    for block in blocks:
        del block.forward
    replay = attach(model)
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=use_reentrant)
    for one in [loss(model, part, replay) for part in PARTS][::-1]:
        one.backward()
    torch.testing.assert_close(gradients(model), expected(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "nested, not reentrant"])
def test_backward_twice_through_one_graph(kind: str, model) -> None:
    replay = attach(model)
    KINDS[kind](model)
    first, second = loss(model, PARTS[0], replay), loss(model, PARTS[1], replay)
    first.backward(retain_graph=True)
    once = gradients(model)
    second.backward()
    gradients(model)
    first.backward()
    torch.testing.assert_close(gradients(model), once, rtol=1e-5, atol=1e-8)


def test_autograd_grad(model) -> None:
    replay = attach(model)
    enable(model, use_reentrant=False)
    losses = [loss(model, part, replay) for part in PARTS]
    total = torch.autograd.grad(losses[1], model.parameters(), materialize_grads=True)
    for other in (losses[2], losses[0]):
        more = torch.autograd.grad(other, model.parameters(), materialize_grads=True)
        total = tuple(a + b for a, b in zip(total, more, strict=True))
    torch.testing.assert_close(torch.cat([g.flatten() for g in total]), expected(), rtol=1e-5, atol=1e-8)


def second_order(model: nn.Module, replay: Any) -> torch.Tensor:
    one = loss(model, PARTS[0], replay)
    first = torch.autograd.grad(one, model.model.embed_tokens.weight, create_graph=True)[0]
    first.square().sum().backward()
    return gradients(model)


def test_the_gradient_of_a_gradient() -> None:
    model = build(attn_implementation="eager")  # the fused ones have no second derivative
    replay = attach(model)
    reference = second_order(model, replay)
    assert (second_order(model, None) - reference).abs().max() > 1e-3 * reference.abs().max()
    enable(model, use_reentrant=False)
    torch.testing.assert_close(second_order(model, replay), reference, rtol=1e-5, atol=1e-8)


class Boom(Exception):
    pass


def fail_once_in_backward(module: nn.Module) -> None:
    """Before the forward whose first backward shall fail in this module."""
    failures = ["once"]

    def boom(*_: Any) -> None:
        if failures:
            failures.pop()
            raise Boom

    module.register_full_backward_hook(boom)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_after_an_exception_in_the_middle_of_a_backward(model, use_reentrant: bool) -> None:
    replay = attach(model)
    fail_once_in_backward(model.model.layers[2].self_attn)
    enable(model, use_reentrant=use_reentrant)
    losses = [loss(model, part, replay) for part in PARTS]
    with pytest.raises(Boom):
        losses[0].backward()
    model.zero_grad()
    losses[2].backward()  # those that were in flight keep their own rows
    losses[1].backward()
    loss(model, PARTS[0], replay).backward()
    torch.testing.assert_close(gradients(model), expected(), rtol=1e-5, atol=1e-8)


def test_after_an_exception_in_the_middle_of_a_recompute(model) -> None:
    replay = attach(model)
    enable(model, use_reentrant=False)
    losses = [loss(model, part, replay) for part in PARTS]
    gate = model.model.layers[2].mlp.gate

    def boom(_hidden: torch.Tensor) -> Any:
        raise Boom

    original, gate.forward = gate.forward, boom
    with pytest.raises(Boom):
        losses[1].backward()
    gate.forward = original
    model.zero_grad()
    assert torch.topk(torch.tensor([[1.0, 5, 2, 3, 0, 0, 0, 0]]), 2).indices.tolist() == [[1, 3]]  # no mode left behind
    losses[2].backward()
    losses[0].backward()
    loss(model, PARTS[1], replay).backward()
    torch.testing.assert_close(gradients(model), expected(), rtol=1e-5, atol=1e-8)


def test_a_failed_backward_lends_its_rows_to_no_other(model) -> None:
    """The rows die with its graph, and a backward that no hook announced is refused although an announced one never ended."""
    replay = attach(model)
    fail_once_in_backward(model.model.layers[2].self_attn)
    enable(model, use_reentrant=False)
    layout, input_ids, mask = right_padded(PARTS[0])
    with replay.micro_batch(PARTS[0], layout, input_ids) as batch:
        logits = model(input_ids, attention_mask=mask, use_cache=False).logits
        hidden = model.model(input_ids, attention_mask=mask, use_cache=False).last_hidden_state
    alive = weakref.ref(batch)
    del batch
    with pytest.raises(Boom):
        logits.sum().backward()
    del logits
    gc.collect()
    assert alive() is None
    with pytest.raises(ReplayError, match="a backward whose micro-batch is not known"):
        hidden.sum().backward()


def test_a_backward_that_failed_has_ended_when_the_next_forward_begins(model) -> None:
    """Its graph is kept, so its rows still live; they are nobody else's all the same."""
    replay = attach(model)
    fail_once_in_backward(model.model.layers[2].self_attn)
    enable(model, use_reentrant=False)
    layout, input_ids, mask = right_padded(PARTS[0])
    with replay.micro_batch(PARTS[0], layout, input_ids):
        logits = model(input_ids, attention_mask=mask, use_cache=False).logits
        hidden = model.model(input_ids, attention_mask=mask, use_cache=False).last_hidden_state
    with pytest.raises(Boom):
        logits.sum().backward()
    forward(model, PARTS[0])
    with pytest.raises(ReplayError, match="a backward whose micro-batch is not known"):
        hidden.sum().backward()


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many micro-batches there are."""
    batches: weakref.WeakSet[MicroBatch] = weakref.WeakSet()
    original = MicroBatch.__init__

    def remember(self: MicroBatch, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        batches.add(self)

    monkeypatch.setattr(MicroBatch, "__init__", remember)

    def count() -> int:
        gc.collect()
        return len(batches)

    return count


@pytest.mark.parametrize(
    "kind", [None, "reentrant", "not reentrant", "nested, not reentrant", "selective, selection saved"]
)
def test_rows_die_with_their_graphs(kind: str | None, model, alive) -> None:
    replay = attach(model)
    if kind:
        KINDS[kind](model)
    losses = [loss(model, part, replay) for part in PARTS]
    assert alive() == 3
    for number in (2, 1, 0):
        losses.pop().backward()
        assert alive() == number
    losses = [loss(model, part, replay) for part in PARTS]
    del losses  # never used
    assert alive() == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_a_graph_keeps_nothing(model, mode, alive) -> None:
    replay = attach(model)
    with mode():
        logits = [forward(model, part, replay) for part in PARTS]
        assert alive() == 0
    enable(model, use_reentrant=False)
    for part, without_graph in zip(PARTS, logits, strict=True):
        assert torch.equal(forward(model, part, replay), without_graph)


def test_a_frozen_model_under_a_head_that_trains(model) -> None:
    """Only the head has a gradient: the graph ends above the routers, and the rows with it."""
    replay = attach(model)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    loss(model, PARTS[0], replay).backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


class HostReads(TorchDispatchMode):
    """Operators that make the host wait for a device, seen while `inside`."""

    WAITING = (
        aten._local_scalar_dense.default,
        aten.nonzero.default,
        aten.masked_select.default,
        aten.unique_dim.default,
        aten._unique2.default,
        aten.equal.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.seen, self.calls = False, list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.inside:
            self.calls += 1
            by_mask = func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default) and any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
            if func in self.WAITING or by_mask:
                self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    def watch(self, module: nn.Module, *, before: bool) -> None:
        """Call before and after attach, so that what replay does is between the two."""
        if before:
            module.register_forward_pre_hook(lambda *_: setattr(self, "inside", True))
        else:
            module.register_forward_hook(lambda *_: setattr(self, "inside", False))


def test_a_replayed_router_reads_nothing_back(model) -> None:
    """Rows that are live and rows that are compared are known on the host; in the recompute as well."""
    reads = HostReads()
    gates = [model.model.layers[index].mlp.gate for index in SPEC.moe_layers]
    for gate in gates:
        reads.watch(gate, before=True)
    replay = attach(model)
    for gate in gates:
        reads.watch(gate, before=False)
    enable(model, use_reentrant=False, early_stop=False)
    with reads:
        loss(model, [s for part in PARTS for s in part], replay).backward()
    assert reads.seen == []
    assert reads.calls > 2 * len(gates) * 6  # it has seen forward and recompute
    with reads:  # and what it looks for, it finds
        reads.inside = True
        ids = torch.arange(4)
        ids[ids > 2].sum().item()
    assert reads.seen == ["aten.index.Tensor", "aten._local_scalar_dense.default"]
    assert CONFIG.num_experts_per_tok == 2
