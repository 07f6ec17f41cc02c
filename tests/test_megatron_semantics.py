"""What a replayed forward of Megatron-core's own TopKRouter computes: its experts, its gate weights, its losses, its counts.

Gate weights are held against formulas written out here, of the logits of all experts at the chosen ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_cases import SPEC, samples_of
from torch.utils._python_dispatch import TorchDispatchMode

from r3 import RoutingSpec
from r3.errors import ReplayError
from r3.trainers.megatron import attach, detach

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

LENGTHS = (9, 12, 5)


# The formulas: weights [n, K] of logits [n, E] and ids [n, K]; choice [n, E], what the router's own top-k is of.


def softmax(logits: torch.Tensor, ids: torch.Tensor, _bias: Any) -> torch.Tensor:
    return logits.gather(1, ids).float().softmax(-1)


def pre_softmax(logits: torch.Tensor, ids: torch.Tensor, _bias: Any) -> torch.Tensor:
    return logits.float().softmax(-1).gather(1, ids)


def sigmoid(logits: torch.Tensor, ids: torch.Tensor, _bias: Any) -> torch.Tensor:
    chosen = logits.float().sigmoid().gather(1, ids)
    return chosen / chosen.sum(-1, keepdim=True)


def with_bias(logits: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return logits if bias is None else logits.sigmoid() + bias


def best_groups(scores: torch.Tensor, groups: int, kept: int, top_k: int) -> torch.Tensor:
    """DeepSeek-V3: groups are ranked by the sum of their best top_k / kept scores."""
    split = scores.reshape(len(scores), groups, -1)
    best = split.topk(top_k // kept, -1).values.sum(-1).topk(kept, -1).indices
    mask = torch.zeros(len(scores), groups, dtype=torch.bool).scatter(1, best, True)
    return split.masked_fill(~mask[:, :, None], float("-inf")).flatten(1)


GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 1}  # both experts of a token from one pair
SIGMOID = {"moe_router_score_function": "sigmoid"}
BIASED = {**SIGMOID, "moe_router_enable_expert_bias": True}
Formula = Callable[..., torch.Tensor]
ROUTERS: dict[str, tuple[dict[str, Any], Formula]] = {
    "softmax": ({}, softmax),
    "softmax before the choice": ({"moe_router_pre_softmax": True}, pre_softmax),
    "scaled": (
        {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
        lambda *args: 2.5 * pre_softmax(*args),
    ),
    "sigmoid": (SIGMOID, sigmoid),
    "sigmoid with an expert bias": (BIASED, sigmoid),
    "groups": (GROUPS, softmax),
    "groups, sigmoid with an expert bias (DeepSeek-V3)": ({**GROUPS, **BIASED}, sigmoid),
    "router in fp32": ({"moe_router_dtype": "fp32"}, softmax),
    "router in fp64": ({"moe_router_dtype": "fp64"}, softmax),
    "aux losses and z-loss": (
        {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [1e-2, 1e-2, 1e-2],
            "moe_z_loss_coeff": 1e-3,
        },
        softmax,
    ),
    "shared experts": ({"moe_shared_expert_intermediate_size": 16}, softmax),
    "all-gather dispatcher": ({"moe_token_dispatcher_type": "allgather"}, softmax),
}


def set_biases(models: Any, model: Any) -> None:
    for layer, router in models.routers_of(model).items():
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.linspace(-0.3, 0.3, SPEC.num_experts).roll(layer))


@pytest.mark.parametrize("seam", [True, False], ids=["by the seam", "by the top-k"])
@pytest.mark.parametrize("kind", ROUTERS)
def test_experts_are_the_recorded_ones_and_gate_weights_the_formulas(kind: str, seam: bool, models) -> None:
    settings, weights = ROUTERS[kind]
    model = models.build(models.config(**settings))
    set_biases(models, model)
    if not seam:
        for router in models.routers_of(model).values():
            older(router)
    replay = attach(model, min_agreement=0)
    micro = models.Micro(*LENGTHS)
    with models.watch(model) as seen:
        micro.forward(model, replay).square().mean().backward()
    for layer, router in models.routers_of(model).items():
        [(hidden, probs, chosen)] = seen[layer]
        dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(settings.get("moe_router_dtype"), hidden.dtype)
        logits = hidden.flatten(0, 1).to(dtype) @ router.weight.detach().to(dtype).T
        scores = with_bias(logits, router.expert_bias)
        if "moe_router_num_groups" in settings:
            scores = best_groups(scores, 4, 1, SPEC.top_k)
        ids, recorded = micro.recorded(layer)
        wanted = torch.where(recorded[:, None], ids, scores.topk(SPEC.top_k, 1).indices)
        assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, wanted, True))
        torch.testing.assert_close(
            probs.gather(1, wanted).float(), weights(logits, wanted, router.expert_bias).float(), rtol=1e-5, atol=1e-7
        )
        assert probs.dtype == dtype
        assert router.weight.grad.norm() > 0
        if (
            "moe_router_num_groups" in settings
        ):  # some recorded experts are outside the groups that the router would keep
            assert scores.gather(1, ids)[recorded].isinf().any()
    detach(model)


def older(router: Any) -> None:
    """Make a live router one of megatron-core 0.15: the same routing, without the seam."""
    base = type(router)

    def routing(self: Any, logits: torch.Tensor, padding_mask: Any = None) -> Any:
        self.__dict__["router_replay"] = None
        try:
            return base.routing(self, logits, padding_mask)
        finally:
            del self.__dict__["router_replay"]

    router.__class__ = type("TopKRouter", (base,), {"routing": routing})
    del router.router_replay


def test_a_router_without_the_seam_keeps_none(models) -> None:
    """The stand-in is honest: no attribute before, while attached, and after."""
    model = models.build(models.config())
    routers = models.routers_of(model).values()
    for router in routers:
        older(router)
    attach(model)
    assert not any(hasattr(router, "router_replay") for router in routers)
    assert all(router._forward_hooks for router in routers)
    detach(model)
    assert not any(router._forward_hooks or router._forward_pre_hooks for router in routers)


@pytest.mark.parametrize("seam", [True, False], ids=["by the seam", "by the top-k"])
@pytest.mark.parametrize(
    "name", ["load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss", "z_loss"]
)
def test_losses_are_of_the_routers_own_scores_and_choice(name: str, seam: bool, models) -> None:
    """In the first MoE layer, whose input is the same, they are what a live forward computes."""
    from megatron.core.transformer.moe import moe_utils

    def losses(replayed: bool) -> torch.Tensor:
        model = models.build(models.config(**ROUTERS["aux losses and z-loss"][0]))
        if not seam:
            for router in models.routers_of(model).values():
                older(router)
        replay = attach(model, min_agreement=0) if replayed else None
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        tracker.clear()
        models.Micro(*LENGTHS).forward(model, replay)
        values: torch.Tensor = tracker[name]["values"].clone()
        return values

    live, replayed = losses(False), losses(True)
    assert live[1] > 0
    torch.testing.assert_close(replayed[1], live[1], rtol=0, atol=0)
    assert replayed[2] != live[2]  # the layers behind have other inputs under replay


@pytest.mark.parametrize("freeze", [False, True])
def test_the_expert_bias_counts_the_replayed_routing_unless_it_is_frozen(freeze: bool, models) -> None:
    from megatron.core.distributed.finalize_model_grads import _update_router_expert_bias

    model = models.build(models.config(**BIASED))
    set_biases(models, model)
    routers = models.routers_of(model)
    before = {layer: router.expert_bias.clone() for layer, router in routers.items()}
    replay = attach(model, min_agreement=0, freeze_expert_bias=freeze)
    micro = models.Micro(*LENGTHS)
    with models.watch(model) as seen:
        micro.forward(model, replay)
    for layer, router in routers.items():
        counts = seen[layer][0][2].sum(0).float()
        assert torch.equal(router.local_tokens_per_expert, torch.zeros_like(counts) if freeze else counts)
    _update_router_expert_bias([model], model.config)
    for layer, router in routers.items():
        assert torch.equal(router.expert_bias, before[layer]) == freeze
    detach(model)
    for router in routers.values():
        router.local_tokens_per_expert.zero_()
    micro.forward(model)
    assert all(router.local_tokens_per_expert.sum() > 0 for router in routers.values())


def test_recording_and_replaying_changes_no_bit(models) -> None:
    model = models.build(models.config(**GROUPS))
    replay = attach(model)
    micro = models.Micro(*LENGTHS)
    live = micro.forward(model)
    with torch.no_grad(), replay.record(model, micro.layout) as recording:
        micro.forward(model)
    micro.samples = recording.partial(micro.samples)
    assert all(sample.routes.recorded.all() for sample in micro.samples)
    assert torch.equal(micro.forward(model, replay), live)
    assert replay.agreement.share == 1
    assert replay.coverage.share == 1
    whole = [replace(s, routes=r) for s, r in zip(samples_of(*LENGTHS), recording.routes(), strict=True)]
    for one, other in zip(micro.samples, whole, strict=True):
        assert one.routes.equal(other.routes)


def test_a_token_with_the_same_expert_twice_is_refused(models) -> None:
    model = models.build(models.config())
    micro = models.Micro(*LENGTHS, missing=0)
    micro.samples[1].routes.ids[2, 4] = 7
    replay = attach(model, min_agreement=0)
    with pytest.raises(ReplayError, match="the same expert twice") as error:
        micro.forward(model, replay)
    assert error.value.where == "sample 's5.1', token 4, layer 3"
    micro.samples[1].routes.recorded[4] = False  # nobody reads it then
    micro.forward(model, replay)


def test_token_dropping_is_refused_unless_it_is_wanted(models) -> None:
    """A capacity takes recorded experts from tokens: with a factor of 1 some rows have fewer than K."""
    model = models.build(models.config(moe_expert_capacity_factor=1.0))
    with pytest.raises(ReplayError, match="drop tokens after the choice"):
        attach(model)
    replay = attach(model, min_agreement=0, allow_token_dropping=True)
    micro = models.Micro(*LENGTHS)
    with models.watch(model) as seen:
        micro.forward(model, replay)
    for layer in SPEC.moe_layers:
        _, _, chosen = seen[layer][0]
        ids, recorded = micro.recorded(layer)
        of_record = torch.zeros_like(chosen).scatter(1, ids, True)
        assert not (chosen & ~of_record)[recorded].any()
        assert (chosen.sum(1) < SPEC.top_k).any()


def test_a_fused_router_is_refused_or_switched_off_while_attached(models) -> None:
    model = models.build(models.config())
    model.config.moe_router_fusion = True
    with pytest.raises(ReplayError, match="inside its kernel") as error:
        attach(model)
    assert "disable_fused_router=True" in str(error.value.remedy)
    assert model.config.moe_router_fusion
    replay = attach(model, min_agreement=0, disable_fused_router=True)
    models.Micro(*LENGTHS).forward(model, replay)
    assert replay.coverage.replayed
    detach(model)
    assert model.config.moe_router_fusion


def test_padding_and_unrecorded_rows_are_counted(models) -> None:
    model = models.build(models.config())
    replay = attach(model, min_agreement=0)
    micro = models.Micro(*LENGTHS)
    micro.forward(model, replay)
    recorded = sum(int(np.count_nonzero(s.routes.recorded)) for s in micro.samples)
    assert replay.coverage.replayed == recorded
    assert replay.coverage.unrecorded == sum(LENGTHS) - recorded
    assert replay.coverage.padding == micro.tokens.numel() - sum(LENGTHS)
    detach(model)
    strict = attach(model, min_agreement=0, on_missing="raise")
    with pytest.raises(ReplayError, match="rows have no record"):
        micro.forward(model, strict)
    models.Micro(*LENGTHS, missing=0).forward(model, strict)


def test_routes_that_are_not_this_models_are_refused(models) -> None:
    model = models.build(models.config())
    replay = attach(model)
    with pytest.raises(ReplayError, match="not those of this model's routers"):
        models.Micro(40, 40).forward(model, replay)


def test_many_experts_travel_in_two_bytes(models) -> None:
    spec = RoutingSpec(num_layers=2, moe_layers=(0, 1), num_experts=300, top_k=2, model_type="megatron")
    model = models.build(models.config(num_layers=2, moe_layer_freq=1, num_moe_experts=300, moe_ffn_hidden_size=4))
    micro = models.Micro(*LENGTHS, spec=spec)
    replay = attach(model, min_agreement=0)
    assert replay.spec == spec
    with models.watch(model) as seen:
        micro.forward(model, replay)
    for layer in spec.moe_layers:
        ids, recorded = micro.recorded(layer, spec)
        chosen = seen[layer][0][2][recorded]
        assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, ids[recorded], True))
        assert ids.max() > 255


class HostReads(TorchDispatchMode):
    """Operators whose result a GPU would have to hand to the host before the next line runs."""

    WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.index.Tensor", "aten.masked_select", "aten.is_nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def waiting(self) -> list[str]:
        return [call for call in self.calls if call.startswith(self.WAITING)]


@pytest.mark.parametrize("settings", [{}, GROUPS, BIASED], ids=["softmax", "groups", "bias"])
def test_the_seam_reads_nothing_back(settings: dict[str, Any], models) -> None:
    """Live rows and rows that are compared are known on the host before the forward; in the recompute as well."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model = models.build(models.config(**settings, **full))
    replay = attach(model, min_agreement=0.01)
    reads, entered = HostReads(), []
    for router in models.routers_of(model).values():
        ask = router.router_replay.get_replay_topk

        def watching(*args: Any, ask: Any = ask) -> Any:
            entered.append(1)
            with reads:
                return ask(*args)

        router.router_replay.get_replay_topk = watching
    models.Micro(*LENGTHS).forward(model, replay).square().mean().backward()
    assert len(entered) == 2 * SPEC.num_moe_layers
    assert len(reads.calls) > 5 * len(entered)
    assert reads.waiting == []
    with reads:  # and what it looks for, it finds
        ids = torch.arange(4)
        ids[ids > 2].sum().item()
    assert "aten._local_scalar_dense.default" in reads.waiting
