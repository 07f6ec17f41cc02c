"""Binding: which layers report, under which ids, what is refused by name, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import numpy as np
import pytest
import torch
from torch import nn

from r3 import RoutingSpec
from r3.errors import CaptureError, SpecError
from r3.rollout.capture import BatchLayout, CaptureSource, RoutingCapturer, bind, transformers_sources
from r3.rollout.capture.sources import _ways_of
from r3.trainers.transformers import observe

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = RoutingSpec(3, (1, 2), num_experts=8, top_k=2, model_type="handmade")
HIDDEN = 16


class Layer(nn.Module):
    """An engine's own MoE layer with the one line that a capture source needs, and a map to physical experts behind it."""

    capture_fn: Callable[[torch.Tensor], None] | None = None

    def __init__(self, layer_id: int, physical: torch.Tensor | None = None) -> None:
        super().__init__()
        self.layer_id, self.physical = layer_id, physical
        self.gate = nn.Linear(HIDDEN, 8, bias=False)
        self.used: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, ids = self.gate(hidden).softmax(-1).topk(2)
        if self.capture_fn is not None:
            self.capture_fn(ids)
        if self.physical is not None:
            ids = self.physical[ids]
        self.used = ids
        return hidden + weights.sum(-1, keepdim=True)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def dense() -> nn.Module:
    return nn.Linear(HIDDEN, HIDDEN)


def capturer_of(spec: RoutingSpec = SPEC) -> RoutingCapturer:
    return RoutingCapturer(spec, max_tokens=64, device="cpu")


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that a binding could leave behind, of every module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    return {
        name: (sorted(vars(module)), [list(getattr(module, h)) for h in hooks], vars(module).get("forward"))
        for name, module in model.named_modules()
    }


@torch.no_grad()
def test_structural_sources() -> None:
    model, capturer = Model(dense(), Layer(1), Layer(2)), capturer_of()
    assert isinstance(model.layers[1], CaptureSource)
    hidden = torch.randn(6, HIDDEN)
    before, plain = state(model), model(hidden)
    with bind(model, capturer, spec=SPEC) as binding:
        assert binding.layers == (1, 2)
        capturer.begin_step(6)
        assert torch.equal(model(hidden), plain)
        rows = capturer.snapshot().to_host().result().rows
        for position, layer in enumerate((1, 2)):
            assert np.array_equal(rows[:, position], model.layers[layer].used.numpy())
        binding.pause()  # off: one None check in each layer
        assert all(model.layers[layer].capture_fn is None for layer in (1, 2))
        capturer.begin_step(6)
        assert torch.equal(model(hidden), plain)
        with pytest.raises(CaptureError, match="2 of 2 layers did not capture"):
            capturer.snapshot()
        binding.resume()
        capturer.begin_step(6)
        model(hidden)
        assert capturer.snapshot() is not None
    assert state(model) == before
    binding.unbind()
    assert state(model) == before


@torch.no_grad()
def test_captured_ids_are_logical_before_an_eplb_map() -> None:
    """Two replicas of each expert, placed at random: the layers run physical experts, and report logical ones."""
    physical = torch.randperm(16, generator=torch.Generator().manual_seed(3))[:8]
    model, capturer = Model(dense(), Layer(1, physical), Layer(2, physical)), capturer_of()
    with bind(model, capturer):
        capturer.begin_step(9)
        model(torch.randn(9, HIDDEN))
        rows = torch.from_numpy(capturer.snapshot().to_host().result().rows).long()
    for position, layer in enumerate((1, 2)):
        used = model.layers[layer].used
        assert torch.equal(physical[rows[:, position]], used)
        assert not torch.equal(rows[:, position], used)

    class Late(Layer):
        """The mistake: it reports what the map gave."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            ids = 8 + self.gate(hidden).topk(2).indices
            if self.capture_fn is not None:
                self.capture_fn(ids)
            return hidden

    model = Model(dense(), Layer(1), Late(2))
    with bind(model, capturer):
        capturer.begin_step(4)
        model(torch.randn(4, HIDDEN))
        with pytest.raises(CaptureError, match=r"layer 2: 1 layers selected experts that do not exist"):
            capturer.snapshot().to_host().result()


def named(name: str, module: nn.Module, *layers: nn.Module) -> Model:
    model = Model(*layers)
    model.add_module(name, module)
    return model


@torch.no_grad()
@pytest.mark.parametrize("name", ["mtp", "mtp_layers", "draft_model", "eagle3", "nextn", "medusa"])
def test_draft_and_mtp_modules_are_not_bound(name: str) -> None:
    """They may even say that they are a layer of the model: a draft model counts its own."""
    model = named(name, nn.ModuleList([Layer(1), Layer(61)]), dense(), Layer(1), Layer(2))
    with bind(model, capturer_of()) as binding:
        assert binding.layers == (1, 2)
        assert binding.skipped == (name,)
        assert [layer.capture_fn for layer in getattr(model, name)] == [None, None]


class Kernel:
    """A monolithic kernel that says what it can, as vLLM's do."""

    def __init__(self, can: bool) -> None:
        self.can, self.capture_fn = can, None

    def supports_routing_replay_capture(self) -> bool:
        return self.can

    def set_capture_fn(self, capture_fn: Any) -> None:
        self.capture_fn = capture_fn


class Monolithic(nn.Module):
    """Selection and experts in one kernel; its router is never asked."""

    is_monolithic = True

    def __init__(self, layer_id: int, kernel: Any) -> None:
        super().__init__()
        self.layer_id, self.fused_experts, self.router = layer_id, kernel, SimpleNamespace(capture_fn=None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ids = hidden[:, :8].topk(2).indices
        if self.fused_experts.capture_fn is not None:
            self.fused_experts.capture_fn(ids.to(torch.int16))  # a replay output is int16 in FlashInfer
        return hidden


@torch.no_grad()
def test_a_monolithic_kernel_is_bound_in_its_replay_output_or_refused() -> None:
    hidden, capturer = torch.randn(5, HIDDEN), capturer_of()
    model = Model(dense(), Monolithic(1, Kernel(True)), Layer(2))
    with bind(model, capturer):
        assert model.layers[1].router.capture_fn is None
        capturer.begin_step(5)
        model(hidden)
        assert capturer.snapshot().to_host().result().rows.shape == (5, 2, 2)
    assert model.layers[1].fused_experts.capture_fn is None
    for kernel, name in ((Kernel(False), "Kernel"), (SimpleNamespace(capture_fn=None), "SimpleNamespace")):
        model = Model(dense(), Layer(1), Monolithic(2, kernel))
        with pytest.raises(
            CaptureError, match=rf"layers.2 \(Monolithic\), layer 2: the kernel {name} selects experts inside"
        ):
            bind(model, capturer)
        assert model.layers[1].capture_fn is None  # all or none


class Opaque(nn.Module):
    """A MoE layer whose router has no callback."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_id, self.router = layer_id, nn.Linear(HIDDEN, 8)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((dense(), Layer(1), Opaque(2)), r"layers.2: the router Linear cannot be captured"),
        ((dense(), Layer(1), dense()), r"Model, layers \[2\]: 1 of 2 MoE layers have no capture source"),
        ((Layer(1), Layer(1), Layer(2)), r"Model, layer 1: two modules .*\n  got layers.0 and layers.1"),
        ((Layer(0), Layer(1), Layer(2)), r"Model, layers.0: a module captures for a layer that does not route"),
        ((Layer(1), Layer(2), Layer(3)), r"Model, layers.2: .*\n  expected one of \[1, 2\], got layer 3"),
        ((dense(), dense(), dense()), r"Model: this model has no capture source, and is no transformers model"),
    ],
)
def test_what_cannot_be_bound_is_refused_by_name_and_nothing_is_bound(layers, message: str) -> None:
    model = Model(*layers)
    before = state(model)
    with pytest.raises(CaptureError, match=message):
        bind(model, capturer_of())
    assert state(model) == before


def test_two_bindings_of_one_model_are_refused() -> None:
    model = Model(dense(), Layer(1), Layer(2))
    binding = bind(model, capturer_of())
    with pytest.raises(CaptureError, match="this model is bound already"):
        bind(model, capturer_of())
    with pytest.raises(CaptureError, match=r"0.layers.1 \(Layer\): this layer has a callback already"):
        bind(nn.ModuleList([model]), capturer_of())
    binding.unbind()
    bind(model, capturer_of()).unbind()
    with pytest.raises(SpecError, match="the capturer: the routing differs"):
        bind(model, capturer_of(), spec=RoutingSpec(3, (1, 2), 8, 3))


def tiny(family: str) -> tuple[nn.Module, RoutingSpec, torch.Tensor]:
    pattern = families.PATTERNS.get(family, [{}])[-1]
    config = families.config(family, pattern)
    tokens = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    return families.build(family, config), RoutingSpec.from_config(config), tokens


def check_family(family: str, model: nn.Module, spec: RoutingSpec, tokens: torch.Tensor) -> set[str]:
    """In every way that it has: the rows are what its experts receive, its outputs are the same bits, nothing stays behind."""
    before, plain = state(model), model(tokens, use_cache=False)[0]
    places = [source.place for source in transformers_sources(model, spec)]
    ways = set(_ways_of(places[0]))
    capturer = capturer_of(spec)
    for way in (None, *sorted(ways)):
        with bind(model, capturer, spec=spec, way=way) as binding, observe(model, spec) as seen:
            assert binding.layers == spec.moe_layers
            capturer.begin_step(tokens.numel())
            assert torch.equal(model(tokens, use_cache=False)[0], plain), (family, way)
            rows = capturer.snapshot().to_host().result().rows.astype(np.int64)
        for position, layer in enumerate(spec.moe_layers):
            used = seen[layer].numpy()
            assert np.array_equal(np.sort(rows[:, position]), np.sort(used)), (family, way, layer)
        assert state(model) == before, (family, way)
    return ways


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("qwen3_moe", {"output", "argument", "selection"}),
        ("mixtral", {"output", "argument", "selection"}),
        ("glm4_moe", {"argument", "selection"}),
        ("deepseek_v3", {"argument", "selection"}),
        ("granitemoe", {"selection"}),
    ],
)
def test_model_families_are_bound(family: str, ways: set[str]) -> None:
    assert check_family(family, *tiny(family)) == ways


@pytest.mark.engine
@torch.no_grad()
def test_every_family_that_can_be_replayed_can_be_captured() -> None:
    checked = {}
    for family in families.available():
        model, spec, tokens = tiny(family)
        try:
            checked[family] = transformers_sources(model, spec)[0].way
        except CaptureError:
            continue
        check_family(family, model, spec, tokens)
    documented = families.section(families.DOCS.read_text())
    assert documented is not None
    assert set(checked) == set(re.findall(r"^\| `(\w+)` \| yes", documented.group(), re.MULTILINE))
    if families.MINOR == "5.10":  # what docs/capture.md says
        assert Counter(checked.values()) == {"output": 21, "argument": 15, "selection": 4}


@torch.no_grad()
def test_experts_that_are_placed_by_hooks_are_captured_before() -> None:
    """Expert parallelism in transformers maps ids to a rank's own by hooks on the router; then the top-k itself is watched."""
    model, spec, tokens = tiny("qwen3_moe")
    assert {source.way for source in transformers_sources(model, spec)} == {"output"}
    model.config.distributed_config = SimpleNamespace(enable_expert_parallel=True)
    assert {source.way for source in transformers_sources(model, spec)} == {"selection"}
    del model.config.distributed_config
    capturer = capturer_of(spec)
    capturer.begin_step(tokens.numel())
    with bind(model, capturer):
        model(tokens, use_cache=False)
    logical = capturer.snapshot().to_host().result().rows

    def map_to_local(_module, _args, output):
        return (*output[:2], output[2] % 4)  # what runs are this rank's four experts

    for place in {source.place.module for source in transformers_sources(model, spec)}:
        place.register_forward_hook(map_to_local)
    for way in ("output", "selection"):
        capturer.begin_step(tokens.numel())
        with bind(model, capturer, way=way):
            model(tokens, use_cache=False)
        first = capturer.snapshot().to_host().result().rows[:, 0]  # later layers see another hidden state
        assert np.array_equal(first, logical[:, 0]), way
        assert logical.max() >= 4


def test_a_family_that_chooses_otherwise_is_refused_by_name() -> None:
    model, spec, _ = tiny("phimoe")
    with pytest.raises(CaptureError, match=r"phimoe: PhimoeSparseMoeBlock, layer 0: this router does not choose"):
        bind(model, capturer_of(spec))
    model, spec, _ = tiny("granitemoe")
    for way in ("output", "argument", "by guess"):
        with pytest.raises(
            CaptureError, match=rf"GraniteMoeTopKGating, layer 0: .*\n  expected one of selection, got {way}"
        ):
            bind(model, capturer_of(spec), way=way)


@torch.no_grad()
def test_a_padded_batch_of_a_real_model() -> None:
    model, spec, tokens = tiny("qwen3_moe")
    capturer = capturer_of(spec)
    with bind(model, capturer):
        capturer.begin_step(18)
        model(tokens, use_cache=False)
        rows = capturer.snapshot().to_host().result().rows
        capturer.begin_step(11, BatchLayout.padded(11, 18))
        model(tokens, use_cache=False)
        assert np.array_equal(capturer.snapshot().to_host().result().rows, rows[:11])


@pytest.mark.engine
def test_vllms_own_moe_classes_are_bound(tiny_model: Path) -> None:
    """A real vLLM engine: our binding in its routers returns what its own capture returns, row by row; the kernels' guard too."""
    script = Path(__file__).parent / "capture_vllm.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, tiny_model], capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["layers"] == list(RoutingSpec.from_config(tiny_model).moe_layers)
    assert found["rows"] > 60
    assert found["equal"] == found["rows"]
    assert "has a callback already" in found["refused_twice"]
    assert found["kernel_bound"] is True
    assert "selects experts inside" in found["kernel_refused"]
