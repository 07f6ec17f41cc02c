"""torch.compile leaves the routers out while a replay is attached, and the rest of the model is compiled.

Traced, the rows of one micro-batch would be compiled in. `backend="eager"` runs traced torch functions as they are, so it shows
everything that tracing gets wrong, without a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from qwen import build, forward, gradients, loss, samples_of
from torch import nn
from torch._dynamo.utils import counters

from r3 import RoutingSpec
from r3.replay import Replay
from r3.trainers.transformers import attach, detach, right_padded

pytestmark = pytest.mark.engine  # tracing takes ten seconds

CONFIG = {"num_hidden_layers": 2}  # one dense, one routed
SPEC = RoutingSpec(2, (1,), 8, 2, model_type="qwen3_moe")
# Of one shape, with other tokens and other rows that route live.
PARTS = [samples_of(*lengths, seed=len(lengths), spec=SPEC) for lengths in ((9, 12), (12, 7))]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(before)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def attach_then_compile(model: nn.Module) -> tuple[Replay, nn.Module]:
    return attach(model), compiled(model)


def compile_then_attach(model: nn.Module) -> tuple[Replay, nn.Module]:
    result = compiled(model)
    forward(result, PARTS[0])  # compiled already when the routers are bound
    return attach(model), result


def compile_layers(model: nn.Module) -> tuple[Replay, nn.Module]:
    replay = attach(model)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return replay, model


WAYS = [compile_then_attach, compile_layers]


@pytest.mark.parametrize("way", WAYS)
def test_each_micro_batch_gets_its_own_rows(way: Callable[[nn.Module], tuple[Replay, nn.Module]]) -> None:
    plain = build(**CONFIG)
    reference = attach(plain)
    model = build(**CONFIG)
    replay, run = way(model)
    assert counters["stats"]["unique_graphs"] > 0 or way is not compile_then_attach
    for part in PARTS:
        loss(plain, part, reference).backward()
        loss(run, part, replay).backward()
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-5, atol=1e-8)
    assert counters["stats"]["unique_graphs"] > 0
    assert replay.coverage == reference.coverage


def test_several_in_flight_under_checkpointing() -> None:
    plain, model = build(**CONFIG), build(**CONFIG)
    reference = attach(plain)
    for part in PARTS:
        loss(plain, part, reference).backward()
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    replay, run = attach_then_compile(model)
    for one in [loss(run, part, replay) for part in PARTS][::-1]:
        one.backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-5, atol=1e-8)


def test_detached_the_routers_are_compiled_again() -> None:
    model = build(**CONFIG)
    live = forward(model, PARTS[0])
    gates = [model.model.layers[layer].mlp.gate for layer in SPEC.moe_layers]
    attach(model)
    assert all("forward" in vars(gate) for gate in gates)
    detach(model)
    assert not any("forward" in vars(gate) for gate in gates)
    run = compiled(model)
    _, input_ids, mask = right_padded(PARTS[0])
    torch.testing.assert_close(run(input_ids, attention_mask=mask, use_cache=False).logits, live)
