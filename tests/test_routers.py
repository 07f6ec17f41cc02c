"""Which module is bound, which call is answered, and what is refused: routers of every shape, small enough to read."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, SimpleNamespace

import families
import numpy as np
import pytest
import torch
import transformers
from helpers import random_sample
from torch import nn

from r3 import RolloutSample, Routes, RoutingSpec
from r3.errors import ReplayError, SpecError
from r3.routers import find_routers, probe
from r3.testing import random_rows
from r3.trainers.transformers import attach, observe, right_padded

HIDDEN, EXPERTS, TOP_K = 16, 8, 2
has_deepseek_v4 = pytest.mark.skipif("deepseek_v4" not in families.available(), reason="an older transformers")
SPEC = RoutingSpec(2, (0, 1), EXPERTS, TOP_K, "handmade")


class Experts(nn.Module):
    """Every expert multiplies by its number plus one."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden * (weights * (ids + 1)).sum(-1, keepdim=True)


class Block(nn.Module):
    """A block whose routing is a function (logits [1, n, E] -> ids, weights), so that each test can write its own."""

    def __init__(self, route: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()
        self.route = route

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(self.gate(hidden))
        out = self.experts(hidden.reshape(-1, HIDDEN), ids.reshape(-1, TOP_K), weights.reshape(-1, TOP_K))
        return out.reshape(hidden.shape)


class Model(nn.Module):
    """Two layers of such blocks, of a family that r3 does not know."""

    def __init__(self, route: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(hidden_size=HIDDEN, model_type="handmade")
        self.embed = nn.Embedding(50, HIDDEN)
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": Block(route)}) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer["mlp"](hidden)
        return hidden


pytestmark = pytest.mark.usefixtures("one_thread")


def sample_of(spec: RoutingSpec, num_tokens: int = 7) -> RolloutSample:
    rng = np.random.default_rng(1)
    rows = random_rows(rng, spec, num_tokens).transpose(1, 0, 2)
    routes = Routes(np.ascontiguousarray(rows), np.ones(num_tokens, np.bool_))
    return random_sample(rng, spec, num_tokens, vocabulary=50, routes=routes)


def in_three_dimensions(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return ids, weights


def by_keyword(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = torch.topk(input=logits.sigmoid().reshape(-1, EXPERTS), k=TOP_K, dim=1, largest=True, sorted=False)
    return ids, weights


def after_groups(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V2's group-limited router: the values of a top-k over masked scores are the gate weights."""
    scores = logits.softmax(-1).reshape(-1, EXPERTS)
    best = torch.topk(scores.view(-1, 4, 2).max(-1).values, 2).indices
    closed = torch.ones_like(scores.view(-1, 4, 2), dtype=torch.bool).scatter(
        1, best[..., None].expand(-1, -1, 2), False
    )
    weights, ids = scores.masked_fill(closed.reshape(scores.shape), 0.0).topk(TOP_K)
    return ids, weights


def one_group(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """GLM-4.5 with top-2: the two best of each of one group are taken from [rows, 1, E] with the same k."""
    scores = logits.sigmoid().reshape(-1, EXPERTS)
    scores.view(-1, 1, EXPERTS).topk(2, dim=-1)
    ids = scores.topk(TOP_K, sorted=False)[1]
    return ids, scores.gather(-1, ids)


@pytest.mark.parametrize("route", [in_three_dimensions, by_keyword, after_groups, one_group])
def test_every_way_to_call_the_selection_is_answered(route) -> None:
    """Gate weights are the scores at the recorded ids, whatever group they lie in; the gradient reaches the router."""
    model, sample = Model(route), sample_of(SPEC)
    layout, input_ids, _ = right_padded([sample])
    got: dict[int, tuple[torch.Tensor, ...]] = {}
    for layer in range(2):
        experts = model.layers[layer]["mlp"].experts
        experts.register_forward_pre_hook(lambda _m, args, i=layer: got.__setitem__(i, args))
    replay = attach(model, SPEC, min_agreement=0)
    with replay.micro_batch([sample], layout, input_ids), observe(model, SPEC) as seen:
        model(input_ids).sum().backward()
    for layer in range(2):
        hidden, ids, weights = got[layer]
        block = model.layers[layer]["mlp"]
        expected = torch.from_numpy(sample.routes.ids[layer].astype(np.int64))
        assert torch.equal(ids, expected)
        assert torch.equal(seen[layer], expected)
        logits = block.gate(hidden)
        scores = logits.softmax(-1) if route in (in_three_dimensions, after_groups) else logits.sigmoid()
        assert torch.allclose(weights, scores.gather(-1, expected))
        assert block.gate.weight.grad.abs().sum() > 0


def by_argsort(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.softmax(-1).reshape(-1, EXPERTS)
    ids = scores.argsort(-1, descending=True)[:, :TOP_K]
    return ids, scores.gather(-1, ids)


def twice(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.softmax(-1).reshape(-1, EXPERTS)
    scores.topk(TOP_K)
    weights, ids = scores.topk(TOP_K)
    return ids, weights


def changed_afterwards(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return ids.clamp(max=EXPERTS - 2), weights


def masked_in_its_own_way(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.softmax(-1).reshape(-1, EXPERTS)
    open_ = scores >= scores.median(-1, keepdim=True).values
    weights, ids = (scores * open_).topk(TOP_K)
    return ids, weights


def broken(_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise TypeError("wants a GPU")


@pytest.mark.parametrize(
    ("route", "message"),
    [
        (by_argsort, "handmade: Block, layer 0: this router does not choose its experts by one top-k.*\n.*got 0 calls"),
        (twice, "handmade: Block, layer 0: this router does not choose its experts by one top-k.*\n.*got 2 calls"),
        (changed_afterwards, "handmade: Block, layer 0: the experts of this block are not those"),
        (masked_in_its_own_way, "handmade: Block, layer 0: this router masks scores before its top-k"),
        (broken, r"handmade: Block, layer 0: .* could not be tried on dummy rows \(TypeError: wants a GPU\)"),
    ],
)
def test_what_would_be_replayed_wrongly_is_refused_at_attach(route, message) -> None:
    model = Model(route)
    with pytest.raises(ReplayError, match=message):
        attach(model, SPEC)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_of_an_unknown_family_needs_a_spec_by_hand() -> None:
    with pytest.raises(SpecError, match="family 'handmade' is not known"):
        attach(Model(in_three_dimensions))
    with pytest.raises(ReplayError, match=r"expected 1 call of topk over .*8. with k=3, got 0 calls"):
        attach(Model(in_three_dimensions), RoutingSpec(2, (0, 1), EXPERTS, 3))
    with pytest.raises(ReplayError, match="layer 1: a decoder layer does not route as the spec says"):
        attach(Model(in_three_dimensions), RoutingSpec(2, (0,), EXPERTS, TOP_K))
    with pytest.raises(ReplayError, match="cannot find this model's routers"):
        attach(Model(in_three_dimensions), RoutingSpec(3, (0, 1), EXPERTS, TOP_K))


@has_deepseek_v4
def test_the_smallest_module_around_the_selection_is_bound() -> None:
    model = Model(in_three_dimensions)
    found = find_routers(model, SPEC)[0]
    assert probe(found, SPEC, 0, HIDDEN).module is found.block is model.layers[0]["mlp"]

    config = families.config("deepseek_v4", {"mlp_layer_types": ["moe"] * 4})
    spec = RoutingSpec.from_config(config)
    found = find_routers(families.build("deepseek_v4", config), spec)[1]
    assert probe(found, spec, 1, config.hidden_size).module is found.gate


def test_probing_reads_shapes_only() -> None:
    """Parameters without storage are enough, no random number is drawn, and a training block is not made noisy."""
    config = families.config("mixtral", {})
    config.router_jitter_noise = 0.1
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).train()
    state = torch.get_rng_state()
    replay = attach(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert replay.device.type == "meta"
    assert all(module.training for module in model.modules())


def test_a_kernel_in_place_of_a_block_is_refused_at_attach() -> None:
    """What `kernels` does: another forward on the instance, which routes by itself."""
    config = families.config("mixtral", {})
    model = families.build("mixtral", config)
    block = find_routers(model, RoutingSpec.from_config(config))[2].block
    block.forward = MethodType(lambda self, hidden: hidden * self.gate.weight.sum(), block)
    with pytest.raises(ReplayError, match=r"mixtral: MixtralSparseMoeBlock, layer 2: .*\n.*got 0 calls"):
        attach(model)


def test_a_patched_forward_is_tried_on_dummy_weights_like_any_other() -> None:
    """Fused-kernel libraries patch a block's forward on the instance; the original's weights must not be used."""
    model = Model(in_three_dimensions).to("meta")
    for layer in model.layers:
        layer["mlp"].forward = MethodType(Block.forward, layer["mlp"])
    assert attach(model, SPEC).device.type == "meta"


def test_a_block_that_computes_its_experts_itself_is_refused() -> None:
    model = Model(in_three_dimensions)
    block = model.layers[0]["mlp"]
    block.forward = MethodType(lambda self, hidden: hidden * self.route(self.gate(hidden))[1].sum(), block)
    with pytest.raises(ReplayError, match="layer 0: the experts of this block cannot be watched"):
        attach(model, SPEC)


def test_layers_on_several_devices_are_refused() -> None:
    model = Model(in_three_dimensions)
    model.layers[1].to("meta")
    with pytest.raises(ReplayError, match="the routers of this model are on several devices"):
        attach(model, SPEC)


def test_zero_experts_replay_by_their_own_ids_and_are_refused_when_folded_into_expert_0() -> None:
    config = families.config("longcat_flash", {})
    model, spec = families.build("longcat_flash", config), RoutingSpec.from_config(config)
    sample = sample_of(spec)
    assert sample.routes.ids.max() >= spec.num_experts - spec.zero_experts
    layout, input_ids, mask = right_padded([sample])
    replay = attach(model, min_agreement=0)
    with replay.micro_batch([sample], layout, input_ids), observe(model, spec) as seen, torch.no_grad():
        model(input_ids, attention_mask=mask, use_cache=False)
    used = torch.stack([seen[i] for i in spec.moe_layers]).numpy()
    assert np.array_equal(np.sort(used), np.sort(sample.routes.ids))

    folded = np.where(sample.routes.ids >= spec.num_experts - spec.zero_experts, 0, sample.routes.ids)
    object.__setattr__(sample, "routes", Routes(folded.astype(spec.dtype), sample.routes.recorded))
    with (
        pytest.raises(ReplayError, match="zero-computation experts of this model were recorded as expert 0"),
        replay.micro_batch([sample], layout, input_ids),
    ):
        pytest.fail("the block was entered")


@has_deepseek_v4
def test_hash_routed_layers_are_left_alone() -> None:
    config = families.config("deepseek_v4", families.PATTERNS["deepseek_v4"][1])
    model, spec = families.build("deepseek_v4", config), RoutingSpec.from_config(config)
    assert (spec.hash_layers, spec.moe_layers) == ((0, 1), (2, 3))
    attach(model)
    gates = [layer.mlp.gate for layer in model.model.layers]
    assert [bool(gate._forward_pre_hooks) for gate in gates] == [False, False, True, True]


class ListBlock(Block):
    """Experts in a list, called one by one, as in transformers 4; `add` puts an expert's rows into the result."""

    def __init__(self, add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> None:
        super().__init__(in_three_dimensions)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))
        self.add = add

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        ids, weights = self.route(self.gate(hidden))
        ids, weights, flat = ids.reshape(-1, TOP_K), weights.reshape(-1, TOP_K), hidden.reshape(-1, HIDDEN)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            tokens, slots = torch.where(ids == number)
            if len(tokens):
                self.add(out, tokens, expert(flat[tokens]) * weights[tokens, slots, None])
        return out.reshape(hidden.shape)


def with_lists(add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]) -> Model:
    model = Model(in_three_dimensions)
    for layer in model.layers:
        layer["mlp"] = ListBlock(add)
    return model


def test_experts_in_a_list_show_their_ids_by_the_rows_that_are_added() -> None:
    model, sample = with_lists(lambda out, tokens, rows: out.index_add_(0, tokens, rows)), sample_of(SPEC)
    layout, input_ids, _ = right_padded([sample])
    replay = attach(model, SPEC, min_agreement=0)
    with torch.no_grad(), observe(model, SPEC) as seen, replay.micro_batch([sample], layout, input_ids):
        model(input_ids)
    assert np.array_equal(torch.stack([seen[0], seen[1]]).numpy(), np.sort(sample.routes.ids, axis=-1))


def test_rows_that_are_added_in_another_way_are_refused_by_observe() -> None:
    model = with_lists(lambda out, tokens, rows: out.scatter_add_(0, tokens[:, None].expand_as(rows), rows))
    with (
        pytest.raises(ReplayError, match=r"handmade, layer 0.*cannot see which experts are used"),
        observe(model, SPEC),
    ):
        model(torch.arange(5)[None])


def test_experts_that_do_not_show_their_ids_are_refused_by_observe() -> None:
    model = Model(in_three_dimensions)
    for layer in model.layers:
        layer["mlp"].experts.forward = lambda hidden, *_: hidden
        layer["mlp"].forward = MethodType(lambda self, hidden: self.experts(hidden, hidden), layer["mlp"])
    with (
        pytest.raises(ReplayError, match=r"handmade, layer 0.*cannot see which experts are used"),
        observe(model, SPEC),
    ):
        model(torch.arange(5)[None])
