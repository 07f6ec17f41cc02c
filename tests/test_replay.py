"""Replay in a live transformers model: the experts receive the recorded ids, gradients survive, off means off."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import qwen
import torch
import transformers
from helpers import random_sample
from torch import nn

from r3 import Layout, RolloutSample, Routes, RoutingSpec
from r3.errors import ReplayError, SpecError
from r3.trainers.transformers import attach, detach, observe, right_padded, token_logprobs

CONFIG = qwen.config(norm_topk_prob=True)
SPEC = RoutingSpec.from_config(CONFIG)
RNG = np.random.default_rng(5)
SAMPLES = [random_sample(RNG, SPEC, n, sample_id=f"s{i}") for i, n in enumerate((9, 12, 5))]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(CONFIG).eval()


def logits_of(model: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return model(input_ids, attention_mask=mask, use_cache=False).logits


def own_choice(model: nn.Module, samples: list[RolloutSample]) -> list[RolloutSample]:
    """The same samples with the routes that this model chooses itself, every row recorded."""
    layout, input_ids, mask = right_padded(samples)
    with observe(model, SPEC) as seen, torch.no_grad():
        logits_of(model, input_ids, mask)
    ids = torch.stack([seen[layer] for layer in SPEC.moe_layers]).numpy().astype(SPEC.dtype)
    out = []
    for i, sample in enumerate(samples):
        positions = [p for p in range(layout.num_positions) if layout.rows[p] >= 0]
        mine = [p for p in positions if layout.locate_row(int(layout.rows[p]))[0] == i]
        routes = Routes(np.ascontiguousarray(ids[:, mine]), np.ones(len(mine), np.bool_))
        out.append(random_sample(RNG, SPEC, sample.num_tokens, sample_id=sample.sample_id, routes=routes))
        object.__setattr__(out[-1], "tokens", sample.tokens)
    return out


def gradients(model: nn.Module, *losses: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    for loss in losses:
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_replaying_the_own_choice_changes_no_bit(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    own = own_choice(model, SAMPLES)
    live = logits_of(model, input_ids, mask)
    live_gradients = gradients(model, live.logsumexp(-1).mean())
    replay = attach(model)
    with replay.micro_batch(own, layout, input_ids):
        replayed = logits_of(model, input_ids, mask)
    assert torch.equal(replayed, live)
    assert torch.equal(gradients(model, replayed.logsumexp(-1).mean()), live_gradients)
    assert replay.coverage.unrecorded == 0


def test_the_experts_receive_the_recorded_ids_and_the_family_formula_for_their_weights(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    received: dict[int, tuple[torch.Tensor, ...]] = {}
    for index in SPEC.moe_layers:
        block = model.model.layers[index].mlp
        block.experts.register_forward_pre_hook(lambda _m, args, i=index: received.__setitem__(i, args))
    with attach(model).micro_batch(SAMPLES, layout, input_ids), torch.no_grad():
        logits_of(model, input_ids, mask)
    for position, index in enumerate(SPEC.moe_layers):
        hidden, ids, weights = received[index]
        scores = (hidden @ model.model.layers[index].mlp.gate.weight.T).softmax(-1)
        for row, source in enumerate(layout.rows):
            if source < 0:
                continue
            sample, token = layout.locate_row(int(source))
            if SAMPLES[sample].routes.recorded[token]:
                expected = SAMPLES[sample].routes.ids[position, token].tolist()
                assert ids[row].tolist() == expected
                chosen = scores[row, expected]
                assert torch.allclose(weights[row], chosen / chosen.sum(), atol=1e-6)


def test_rows_without_a_record_and_padding_route_live(model) -> None:
    """A micro-batch of samples without any record is bit-identical to no replay at all."""
    layout, input_ids, mask = right_padded(SAMPLES)
    live = logits_of(model, input_ids, mask)
    blank = [
        random_sample(RNG, SPEC, s.num_tokens, routes=Routes(s.routes.ids, np.zeros(s.num_tokens, np.bool_)))
        for s in SAMPLES
    ]
    for sample, source in zip(blank, SAMPLES, strict=True):
        object.__setattr__(sample, "tokens", source.tokens)
    replay = attach(model)
    with replay.micro_batch(blank, layout, input_ids):
        assert torch.equal(logits_of(model, input_ids, mask), live)
    assert (replay.coverage.replayed, replay.coverage.unrecorded, replay.coverage.padding) == (0, 26, 10)


def test_coverage_is_counted_by_reason(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    replay = attach(model)
    for _ in range(2):
        with replay.micro_batch(SAMPLES, layout, input_ids):
            logits_of(model, input_ids, mask)
    assert replay.coverage.to_dict() == {
        "forwards": 2,
        "replayed": 2 * 23,  # 26 tokens, the last of each of 3 samples without a row
        "unrecorded": 2 * 3,
        "padding": 2 * 10,
        "share": 23 / 26,
    }


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), "one backward"])
def test_recompute_finds_its_own_micro_batch(model, use_reentrant, order) -> None:
    """Three micro-batches in flight, backward in any order: gradients equal those without checkpointing."""
    replay = attach(model)

    def losses() -> list[torch.Tensor]:
        out = []
        for sample in SAMPLES:
            layout, input_ids, mask = right_padded([sample])
            with replay.micro_batch([sample], layout, input_ids):
                out.append(logits_of(model, input_ids, mask).logsumexp(-1).mean())
        return out

    reference = gradients(model, *losses())
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    forward = losses()
    in_order = [sum(forward)] if order == "one backward" else [forward[i] for i in order]
    got = gradients(model, *in_order)
    assert torch.allclose(got, reference, atol=1e-7)
    live = gradients(model, *(logits_of(model, *right_padded([s])[1:]).logsumexp(-1).mean() for s in SAMPLES))
    assert not torch.allclose(live, reference, atol=1e-4)  # the test would see live routes


def test_a_live_forward_is_recomputed_live(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    reference = gradients(model, logits_of(model, input_ids, mask).logsumexp(-1).mean())
    replay = attach(model)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = logits_of(model, input_ids, mask).logsumexp(-1).mean()
    with replay.micro_batch(SAMPLES, layout, input_ids):
        logits_of(model, input_ids, mask)
        got = gradients(model, loss)  # its backward runs while another micro-batch is current
    assert torch.allclose(got, reference, atol=1e-7)


def test_routers_keep_their_gradient(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    with attach(model).micro_batch(SAMPLES, layout, input_ids):
        logits_of(model, input_ids, mask).logsumexp(-1).mean().backward()
    for index in SPEC.moe_layers:
        assert model.model.layers[index].mlp.gate.weight.grad.abs().sum() > 0


def test_routes_live_exactly_as_long_as_the_graph(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    replay = attach(model)
    with replay.micro_batch(SAMPLES, layout, input_ids) as batch:
        logits = logits_of(model, input_ids, mask)
    alive = weakref.ref(batch)
    del batch
    gc.collect()
    assert alive() is not None
    logits.sum().backward()
    del logits
    gc.collect()
    assert alive() is None
    with torch.no_grad(), replay.micro_batch(SAMPLES, layout, input_ids) as batch:
        held = logits_of(model, input_ids, mask)
    alive = weakref.ref(batch)
    del batch
    gc.collect()
    assert alive() is None  # a forward without a graph keeps nothing, even while its output lives
    assert held.shape[:2] == input_ids.shape


def test_detached_and_idle_are_bit_identical_to_never_attached(model) -> None:
    _, input_ids, mask = right_padded(SAMPLES)
    before = logits_of(model, input_ids, mask)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    attach(model)
    assert torch.equal(logits_of(model, input_ids, mask), before)
    detach(model)
    assert torch.equal(logits_of(model, input_ids, mask), before)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    attach(model)  # and again


def swapped(input_ids: torch.Tensor) -> torch.Tensor:
    out = input_ids.clone()
    out[1, 3] = (out[1, 3] + 1) % 100
    return out


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (
            lambda ids: (SAMPLES, swapped(ids)),
            r"sample 's1', token 3 \(local position 15\): the trainer's tokens are not",
        ),
        (lambda ids: (SAMPLES, ids.roll(1, 1)), "the trainer's tokens are not the rollout's"),
        (lambda ids: (SAMPLES[::-1], ids), "the layout is not of these samples"),
        (lambda ids: (SAMPLES, ids[:, :-1]), "the layout is not of these token ids"),
        (lambda ids: ([SAMPLES[0], SAMPLES[1], SAMPLES[2].truncate(4)], ids), "the layout is not of these samples"),
    ],
)
def test_misaligned_rows_are_refused_before_the_forward(model, arrange, message) -> None:
    layout, input_ids, _ = right_padded(SAMPLES)
    samples, ids = arrange(input_ids)
    with pytest.raises(ReplayError, match=message), attach(model).micro_batch(samples, layout, ids):
        pytest.fail("the block was entered")


def test_a_micro_batch_that_no_forward_used_is_an_error(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    replay = attach(model)
    with (
        pytest.raises(ReplayError, match="no forward of the attached model happened"),
        replay.micro_batch(SAMPLES, layout, input_ids),
    ):
        pass
    with (
        pytest.raises(ReplayError, match="another number of rows than the layout has"),
        replay.micro_batch(SAMPLES, layout, input_ids),
    ):
        logits_of(model, input_ids[:, :-1], mask[:, :-1])
    with replay.micro_batch(SAMPLES, layout, input_ids):  # and the handle is usable after both
        logits_of(model, input_ids, mask)


def test_a_router_that_does_not_fire_is_named(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    replay = attach(model)
    model.model.layers[2].mlp = nn.Identity()
    with (
        pytest.raises(ReplayError, match=r"layers \[2\]: not every router replayed exactly once"),
        replay.micro_batch(SAMPLES, layout, input_ids),
    ):
        logits_of(model, input_ids, mask)


def test_a_router_without_a_top_k_is_named(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)

    def by_argmax(hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = (hidden @ model.model.layers[3].mlp.gate.weight.T).softmax(-1)
        ids = scores.argsort(-1)[:, -2:]
        return scores, scores.gather(-1, ids), ids

    model.model.layers[3].mlp.gate.forward = by_argmax
    with (
        pytest.raises(ReplayError, match="layer 3: this router does not choose its experts by one top-k"),
        attach(model).micro_batch(SAMPLES, layout, input_ids),
    ):
        logits_of(model, input_ids, mask)


def test_a_backward_that_no_hook_announced_is_an_error(model) -> None:
    """The user calls a submodule of what was attached: its output carries no hook, so its recompute must not guess."""
    layout, input_ids, mask = right_padded(SAMPLES)
    replay = attach(model)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with (
        pytest.raises(ReplayError, match="no forward of the attached model"),
        replay.micro_batch(SAMPLES, layout, input_ids),
    ):
        hidden = model.model(input_ids, attention_mask=mask).last_hidden_state
    with pytest.raises(ReplayError, match="a backward whose micro-batch is not known"):
        hidden.sum().backward()


def test_an_exception_in_the_middle_leaves_the_model_usable(model) -> None:
    layout, input_ids, mask = right_padded(SAMPLES)
    replay = attach(model)
    gate = model.model.layers[2].mlp.gate
    original, gate.forward = gate.forward, lambda _hidden: (_ for _ in ()).throw(RuntimeError("boom"))
    with pytest.raises(RuntimeError, match="boom"), replay.micro_batch(SAMPLES, layout, input_ids):
        logits_of(model, input_ids, mask)
    gate.forward = original
    assert torch.topk(torch.tensor([[1.0, 5, 2, 3, 0, 0, 0, 0]]), 2).indices.tolist() == [[1, 3]]  # no mode left behind
    with replay.micro_batch(SAMPLES, layout, input_ids):
        logits_of(model, input_ids, mask)


def test_on_missing_raise_names_the_first_missing_row(model) -> None:
    recorded = SAMPLES[1].routes.recorded.copy()
    recorded[6] = False
    holed = random_sample(RNG, SPEC, 12, sample_id="holed", routes=Routes(SAMPLES[1].routes.ids, recorded))
    replay = attach(model, on_missing="raise")
    layout, input_ids, mask = right_padded([holed])
    with (
        pytest.raises(ReplayError, match="sample 'holed', token 6: 1 of 12 rows have no record"),
        replay.micro_batch([holed], layout, input_ids),
    ):
        pytest.fail("the block was entered")
    layout, input_ids, mask = right_padded(SAMPLES)
    with replay.micro_batch(SAMPLES, layout, input_ids):  # a missing last row is not a hole
        logits_of(model, input_ids, mask)


def test_on_missing_raise_asks_for_the_rows_that_this_ranks_routers_see(model) -> None:
    """A record made under sequence parallelism (R2) holds a rank's part of the sequence; its tokens are all there."""
    whole = SAMPLES[1]
    for first_held, refused in ((6, False), (7, True)):
        recorded = np.arange(12) >= first_held
        half = random_sample(RNG, SPEC, 12, sample_id="half", routes=Routes(whole.routes.ids, recorded))
        layout, input_ids, _ = right_padded([half])
        replay = attach(model, on_missing="raise")
        with (
            pytest.raises(
                ReplayError, match="token 6: 1 of 12 rows" if refused else "no forward of the attached model"
            ),
            replay.micro_batch([half], layout, input_ids, rows=layout.chunk(1, 2)),
        ):
            pass  # entered
        detach(model)


def test_attach_refuses_what_it_cannot_replay(model) -> None:
    attach(model)
    with pytest.raises(ReplayError, match="attached already"):
        attach(model)
    detach(model)
    with pytest.raises(SpecError, match="the routing differs"):
        attach(model, RoutingSpec(4, (1, 2, 3), 16, 2))
    with pytest.raises(SpecError, match="'llama' is not known"):
        attach(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=8))
        )
    model.model.layers[1].mlp.experts = None
    with pytest.raises(ReplayError, match="layer 1: a decoder layer does not route as the spec says"):
        attach(model)


def test_more_than_256_experts_travel_unsigned() -> None:
    config = transformers.Qwen3MoeConfig(**{**CONFIG.to_dict(), "num_experts": 300, "num_local_experts": 300})
    spec = RoutingSpec.from_config(config)
    ids = RNG.integers(0, 300, (3, 6, 1)).astype(np.uint16)
    ids = np.concatenate([ids, (ids + 150) % 300], axis=-1).astype(np.uint16)
    ids[0, 0] = (299, 256)
    sample = random_sample(RNG, spec, 6, routes=Routes(ids, np.ones(6, np.bool_)))
    model = transformers.Qwen3MoeForCausalLM(config)
    layout, input_ids, mask = right_padded([sample])
    with observe(model, spec) as seen, attach(model).micro_batch([sample], layout, input_ids), torch.no_grad():
        logits_of(model, input_ids, mask)
    assert np.array_equal(torch.stack([seen[i] for i in spec.moe_layers]).numpy(), ids)


def test_left_padding_and_packing_give_each_token_its_own_row(model) -> None:
    """The same samples in three layouts: what each token's experts receive does not depend on the layout."""
    replay = attach(model)
    tokens = np.concatenate([s.tokens for s in SAMPLES]).astype(np.int64)
    lengths = [s.num_tokens for s in SAMPLES]
    for layout, shape in ((Layout.padded(lengths, 14, side="left"), (3, 14)), (Layout.packed(lengths, 30), (1, 30))):
        input_ids = torch.from_numpy(layout.gather(tokens, fill=0)).reshape(shape)
        with observe(model, SPEC) as seen, replay.micro_batch(SAMPLES, layout, input_ids), torch.no_grad():
            model(input_ids, use_cache=False)
        for position, row in enumerate(layout.rows):
            if row >= 0:
                sample, token = layout.locate_row(int(row))
                if SAMPLES[sample].routes.recorded[token]:
                    received = [seen[index][position].tolist() for index in SPEC.moe_layers]
                    assert received == SAMPLES[sample].routes.ids[:, token].tolist()


def test_token_logprobs_are_aligned_with_their_tokens() -> None:
    logits = torch.randn(2, 5, 7)
    input_ids = torch.randint(0, 7, (2, 5))
    got = token_logprobs(logits, input_ids, chunk=3)
    for line in range(2):
        assert np.isnan(got[line, 0])
        for t in range(1, 5):
            expected = logits[line, t - 1].log_softmax(-1)[input_ids[line, t]]
            assert got[line, t] == pytest.approx(float(expected), abs=1e-6)
