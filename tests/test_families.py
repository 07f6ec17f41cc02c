"""The family matrix: each MoE family of this transformers replays exactly, or is refused by name when it is attached.

What the experts get is read at the experts, by hooks of this file; what the model would choose itself is read at its own
top-k; gate weights are compared with formulas written out in gates.py. Nothing is compared with r3's own code.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import families
import numpy as np
import pytest
import torch
import transformers
from gates import GATES
from helpers import random_sample
from torch import nn
from torch.overrides import TorchFunctionMode

from r3 import RolloutSample, Routes, RoutingSpec
from r3.errors import ReplayError, SpecError
from r3.routers import find_routers
from r3.testing import random_rows
from r3.trainers.transformers import attach, detach, observe, right_padded

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
# Families with routers that cannot be replayed, and the words by which they are refused.
REFUSED = {
    "doge": "doge.*cannot find this model's routers",
    "ernie4_5_vl_moe_text": "ernie4_5_vl_moe_text.*layer [01]: a decoder layer does not route as the spec says",
    "phimoe": "phimoe.*layer 0: this router does not choose its experts by one top-k",
    "zaya": "zaya.*layer 0: the experts of this block are not those",
}
if VERSION < (5, 11):
    REFUSED["aria_text"] = "aria_text.*layer 0: this router does not choose its experts by one top-k"
SUPPORTED = [family for family in families.available() if family not in REFUSED]
if VERSION < (5, 0):  # routing inline in the block and a list of experts; others do not build from these tiny configs
    SUPPORTED = ["deepseek_v3", "glm4_moe", "gpt_oss", "granitemoe", "llama4_text", "longcat_flash", "mixtral"]
    SUPPORTED += ["olmoe", "qwen2_moe", "qwen3_moe", "qwen3_next"]
    REFUSED = {"phimoe": REFUSED["phimoe"]}
CASES = [(family, pattern) for family in SUPPORTED for pattern in families.PATTERNS.get(family, [{}])]
NAMES = [f"{family}-{number}" for number, (family, _) in enumerate(CASES)]
every_case = pytest.mark.parametrize(("family", "pattern"), CASES, ids=NAMES)


pytestmark = pytest.mark.usefixtures("one_thread")


class Case:
    """A tiny model of a family, and a micro-batch of two samples for it: 9 and 6 tokens, every row recorded."""

    def __init__(self, family: str, pattern: dict[str, Any]) -> None:
        self.config = families.config(family, pattern)
        self.model = families.build(family, self.config)
        self.spec = RoutingSpec.from_config(self.config)
        rng = np.random.default_rng(0)
        self.samples = [random_sample(rng, self.spec, n, sample_id=f"s{n}", vocabulary=60) for n in (9, 6)]
        self.samples = [self.with_routes(s, random_rows(rng, self.spec, s.num_tokens)) for s in self.samples]
        self.layout, self.input_ids, self.mask = right_padded(self.samples)
        self.blocks = find_routers(self.model, self.spec)

    @staticmethod
    def with_routes(sample: RolloutSample, rows: np.ndarray) -> RolloutSample:
        """rows [tokens, layers, K]."""
        ids = np.ascontiguousarray(rows.transpose(1, 0, 2))
        object.__setattr__(sample, "routes", Routes(ids, np.ones(ids.shape[1], np.bool_)))
        return sample

    def forward(self) -> torch.Tensor:
        return self.model(self.input_ids, attention_mask=self.mask, use_cache=False)[0]

    def gradients(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        self.model.zero_grad()
        (output.float() ** 2).mean().backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def recorded(self, position: int) -> torch.Tensor:
        """[n, K] of the layer at a position of the spec; -1 in padding."""
        ids = np.concatenate([sample.routes.ids[position] for sample in self.samples]).astype(np.int64)
        return torch.from_numpy(self.layout.gather(ids, fill=-1))

    def router_weight(self, layer: int) -> torch.Tensor:
        named = self.blocks[layer].gate.named_parameters()
        return next(p for _, p in named if p.dim() == 2 and p.shape[1] == self.config.hidden_size)


class OwnChoice(TorchFunctionMode):
    """The last top-k over all experts in each layer, which is a router's choice; earlier ones are over groups."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.layer, self.ids = case, -1, dict[int, torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        spec = self.case.spec
        if func in (torch.topk, torch.Tensor.topk) and args[0].shape[-1] == spec.num_experts:
            self.ids[self.layer] = result.indices.reshape(-1, spec.top_k)
        return result

    def at(self, layer: int) -> Any:
        return self.case.blocks[layer].block.register_forward_pre_hook(lambda *_: setattr(self, "layer", layer))


def own_choice(case: Case) -> dict[int, torch.Tensor]:
    mode = OwnChoice(case)
    handles = [mode.at(layer) for layer in case.spec.moe_layers]
    with torch.no_grad(), mode:
        case.forward()
    for handle in handles:
        handle.remove()
    return mode.ids


class Received:
    """What the experts of one layer got in a forward: ids and gate weights [n, K], and the block's input [n, H]."""

    def __init__(self, case: Case, layer: int) -> None:
        self.ids: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        self.hidden = torch.empty(0)
        self.spec, self.found = case.spec, case.blocks[layer]
        bare = self.found.block if not self.found.bare else self.found.gate
        self.handles = [bare.register_forward_pre_hook(self._input)]
        if isinstance(self.found.experts, nn.ModuleList):
            self.mode = _ByExpert(self)
            self.handles += [
                expert.register_forward_hook(lambda _m, _a, out, e=number: setattr(self.mode, "ran", (e, out)))
                for number, expert in enumerate(self.found.experts)
            ]
            self.handles.append(self.found.block.register_forward_pre_hook(lambda *_: self.mode.start()))
            self.handles.append(self.found.block.register_forward_hook(lambda *_: self.mode.stop()))
        else:
            self.handles.append(self.found.experts.register_forward_pre_hook(self._arguments, with_kwargs=True))
            self.handles.append(self.found.gate.register_forward_hook(self._grouped))

    def _input(self, _module: nn.Module, args: Any) -> None:
        self.hidden = args[0].detach().reshape(-1, args[0].shape[-1])

    def _arguments(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [value.detach() for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        k = self.spec.top_k
        for value in tensors:
            if value.shape == (len(self.hidden), k):
                setattr(self, "weights" if value.is_floating_point() else "ids", value)
        if self.ids is None and len(tensors) == 1 and tensors[0].shape[0] == self.spec.num_experts * len(self.hidden):
            gates = (tensors[0].reshape(self.spec.num_experts, *self.hidden.shape) / self.hidden).mean(-1).T  # [n, E]
            self.ids = gates.nonzero()[:, 1].reshape(-1, k)
            self.weights = gates.gather(1, self.ids)
        if self.weights is None and self.ids is not None:  # [n, E], scattered: transformers 4's gpt_oss
            wide = [
                v for v in tensors if v.is_floating_point() and v.shape == (len(self.hidden), self.spec.num_experts)
            ]
            self.weights = wide[0].gather(1, self.ids) if wide else None

    def _grouped(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Granite: (order, token of each row, its gate, rows of each expert, logits), rows sorted by expert."""
        if isinstance(output, tuple) and len(output) == 5 and isinstance(output[3], list):
            order, tokens, gates, sizes, _ = output
            experts = torch.arange(self.spec.num_experts).repeat_interleave(torch.tensor(sizes))
            assert torch.equal(tokens, order // self.spec.top_k)
            back = order.argsort()
            self.ids = experts[back].reshape(-1, self.spec.top_k)
            self.weights = gates.detach()[back].reshape(-1, self.spec.top_k)


class _ByExpert(TorchFunctionMode):
    """transformers 4: what is added to the result is an expert's output times its gate weight."""

    def __init__(self, received: Received) -> None:
        super().__init__()
        self.received, self.ran, self.rows = received, (0, torch.empty(0)), list[tuple[int, int, float]]()

    def start(self) -> None:
        self.rows.clear()
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)
        k = self.received.spec.top_k
        ordered = torch.tensor(sorted(self.rows)).reshape(-1, k, 3)
        self.received.ids, self.received.weights = ordered[..., 1].long(), ordered[..., 2]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.index_add_:
            expert, output = self.ran
            gates = ((args[3] * output).sum(-1) / (output * output).sum(-1)).tolist()
            self.rows += [(token, expert, gate) for token, gate in zip(args[2].tolist(), gates, strict=True)]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def received_by_experts(case: Case) -> Iterator[dict[int, Received]]:
    received = {layer: Received(case, layer) for layer in case.spec.moe_layers}
    yield received
    for each in received.values():
        for handle in each.handles:
            handle.remove()


def hooks(model: nn.Module) -> dict[str, int]:
    return {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules() if name}


@every_case
def test_own_choice_replayed_is_bit_identical_and_binds_the_layers_of_the_spec(family: str, pattern: dict) -> None:
    case = Case(family, pattern)
    before = hooks(case.model)
    own = own_choice(case)
    live = case.forward()
    live_gradients = case.gradients(live)
    ids = torch.stack([own[layer] for layer in case.spec.moe_layers], dim=1).numpy().astype(case.spec.dtype)
    lengths = [sample.num_tokens for sample in case.samples]
    rows = ids.reshape(len(lengths), -1, *ids.shape[1:])
    for sample, mine in zip(case.samples, rows, strict=True):
        case.with_routes(sample, mine[: sample.num_tokens])

    replay = attach(case.model)
    bound = [name for name, count in hooks(case.model).items() if count > before[name]]
    assert sorted({int(re.findall(r"\.(\d+)\.", f"{name}.")[0]) for name in bound}) == list(case.spec.moe_layers)
    assert len(bound) == case.spec.num_moe_layers
    assert torch.equal(case.forward(), live)  # attached, idle
    with replay.micro_batch(case.samples, case.layout, case.input_ids):
        replayed = case.forward()
    assert torch.equal(replayed, live)
    gradients = case.gradients(replayed)
    assert gradients.keys() == live_gradients.keys()
    assert [name for name in gradients if not torch.equal(gradients[name], live_gradients[name])] == []

    detach(case.model)
    assert hooks(case.model) == before
    assert torch.equal(case.forward(), live)


@every_case
def test_experts_receive_other_ids_with_the_gate_weights_of_the_family(family: str, pattern: dict) -> None:
    case = Case(family, pattern)
    own = own_choice(case)
    replay = attach(case.model, min_agreement=0)  # random ids
    with (
        received_by_experts(case) as received,
        observe(case.model, case.spec) as seen,
        replay.micro_batch(case.samples, case.layout, case.input_ids),
    ):
        gradients = case.gradients(case.forward())
    held = torch.from_numpy(case.layout.rows >= 0)
    names = {id(parameter): name for name, parameter in case.model.named_parameters()}
    for position, layer in enumerate(case.spec.moe_layers):
        got = received[layer]
        assert got.ids is not None
        assert got.weights is not None
        expected = case.recorded(position)
        assert torch.equal(got.ids[held].sort(-1).values, expected[held].sort(-1).values)
        assert not torch.equal(got.ids[held].sort(-1).values, own[layer][held].sort(-1).values)  # it is another choice
        assert torch.equal(got.ids[~held].sort(-1).values, live_padding(case, layer, got, held))
        assert torch.equal(seen[layer].sort(-1).values, got.ids.sort(-1).values)  # observe sees what this file sees
        weights = reference_weights(case, family, layer, got)
        assert torch.allclose(got.weights[held], weights[held], rtol=1e-4, atol=1e-6)
        assert gradients[names[id(case.router_weight(layer))]].abs().sum() > 0


def live_padding(case: Case, layer: int, got: Received, held: torch.Tensor) -> torch.Tensor:
    """What the block chooses by itself for the rows of padding that it was given."""
    mode = OwnChoice(case)
    mode.layer = layer
    found = case.blocks[layer]
    hidden = got.hidden.clone()
    with torch.no_grad(), mode:  # no micro-batch is current
        found.gate(hidden) if found.bare else found.block(hidden[None])
    return mode.ids[layer][~held].sort(-1).values


def reference_weights(case: Case, family: str, layer: int, got: Received) -> torch.Tensor:
    gate = case.blocks[layer].gate
    hidden = got.hidden.float()
    if family == "gemma4_text":  # normalised and scaled before the projection
        rms = hidden.pow(2).mean(-1, keepdim=True).add(case.config.rms_norm_eps).rsqrt()
        hidden = hidden * rms * gate.scale * hidden.shape[-1] ** -0.5
    bias = gate.bias if family == "gpt_oss" else 0.0
    with torch.no_grad():
        logits = hidden @ case.router_weight(layer).float().T + bias
        assert got.ids is not None
        return GATES[family](logits, got.ids, case.config, gate)


@pytest.mark.parametrize("family", [family for family in families.available() if family in REFUSED])
def test_what_cannot_be_replayed_is_refused_by_name_at_attach(family: str) -> None:
    config = families.config(family, families.PATTERNS.get(family, [{}])[-1])
    model = families.build(family, config)
    before = hooks(model)
    with pytest.raises(ReplayError, match=REFUSED[family]) as refusal:
        attach(model)
    assert refusal.value.remedy is not None
    assert "docs/families.md" in refusal.value.remedy
    assert hooks(model) == before


def test_a_family_with_two_routers_in_a_layer_has_no_spec() -> None:
    if "jetmoe" not in transformers.CONFIG_MAPPING:
        pytest.skip("no jetmoe here")
    with pytest.raises(SpecError, match="'jetmoe' is not known: every layer has two routers"):
        RoutingSpec.from_config(transformers.CONFIG_MAPPING["jetmoe"]())


@pytest.mark.skipif(VERSION < (5, 10), reason="the families of transformers 5.10")
def test_at_least_thirty_families_are_replayed_and_no_family_is_forgotten() -> None:
    """A causal language model of transformers that has experts is in the table, or has no spec with a reason."""
    assert len(SUPPORTED) >= 30
    known = {*families.available(), "jetmoe", "gemma4_assistant"}  # the last is a draft model
    for family, kind in transformers.CONFIG_MAPPING.items():
        if family in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and has_experts(kind):
            text = kind().get_text_config(decoder=True).model_type
            assert text in known, text


def has_experts(kind: Any) -> bool:
    names = " ".join([*getattr(kind, "__annotations__", ()), *getattr(kind, "attribute_map", ())])
    text = getattr(kind, "sub_configs", {}).get("text_config")
    return "experts" in names or (text is not None and has_experts(text))


def test_the_tables_in_docs_and_readme_are_current() -> None:
    documented = families.section(families.DOCS.read_text())
    if documented is None:
        pytest.skip(f"docs/families.md has no section for transformers {families.MINOR}")
    rows = families.verdicts()
    assert documented.group() == families.table(rows), "run: python tests/families.py"
    if families.MINOR == "5.10":  # the README shows the version of the lock
        shown = families.readme_part(families.README.read_text())
        assert shown is not None
        assert shown.group() == families.summary(rows), "run: python tests/families.py"
