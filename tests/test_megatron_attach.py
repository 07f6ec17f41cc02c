"""Attaching to Megatron-core: which routers are bound under which number, what is refused, and who else may be there."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import SPEC
from torch import nn

from r3 import Layout, RoutingSpec
from r3.errors import LayoutError, R3Error, ReplayError, SpecError
from r3.partial import PartialSample
from r3.trainers.megatron import attach, detach
from r3.trainers.megatron.routers import captured_by_cuda_graphs, refuse, spec_of
from r3.trainers.megatron.seam import version

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

LENGTHS = (9, 12, 5)


@pytest.fixture
def models(models: types.ModuleType) -> types.ModuleType:
    models.one_process()  # a test before may have left other groups
    return models


def exact(models: Any, model: Any, replay: Any, micro: Any = None, chunk: Any = None) -> bool:
    """Whether a replayed forward routes every recorded row as recorded."""
    micro = micro or models.Micro(*LENGTHS)
    with models.watch(model) as seen:
        micro.forward(chunk or model, replay)
    right = []
    for layer in replay.layers:
        ids, recorded = micro.recorded(layer)
        chosen = seen[layer][-1][2]
        right.append(torch.equal(chosen[recorded], torch.zeros_like(chosen).scatter(1, ids, True)[recorded]))
    return all(right) and bool(right)


# Finding ------------------------------------------------------------------------------------------------------------------


def test_attach_and_detach_leave_nothing(models) -> None:
    model = models.build(models.config())
    before = {layer: dict(vars(router)) for layer, router in models.routers_of(model).items()}
    attributes = set(vars(model))
    replay = attach(model, min_agreement=0)
    assert replay.layers == SPEC.moe_layers
    assert replay.layers_of(model) == SPEC.moe_layers
    assert replay.spec == SPEC
    assert exact(models, model, replay)
    with pytest.raises(ReplayError, match="attached already"):
        attach(model)
    detach(model)
    assert {layer: dict(vars(router)) for layer, router in models.routers_of(model).items()} == before
    assert set(vars(model)) == attributes
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    detach(model)  # twice does nothing
    assert exact(models, model, attach(model, min_agreement=0))


def test_a_refused_attach_leaves_nothing(models) -> None:
    model = models.build(models.config(moe_expert_capacity_factor=1.0))
    model.config.moe_router_fusion = True
    with pytest.raises(ReplayError, match="capacity"):
        attach(model, disable_fused_router=True, freeze_expert_bias=True)
    assert model.config.moe_router_fusion
    assert all(router.router_replay is None for router in models.routers_of(model).values())
    assert not model._forward_hooks


def test_wrapped_chunks(models) -> None:
    """DDP(Float16Module(model)): attached wrapped, or bare and wrapped later; called by any of the three."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    def wrap(bare: Any) -> tuple[Any, Any]:
        half = Float16Module(bare.config, bare)
        return half, DistributedDataParallel(bare.config, DistributedDataParallelConfig(), half)

    for attached_first in (False, True):
        settings = models.config(bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
        bare = models.build(settings)
        replay = attach(bare, min_agreement=0) if attached_first else None
        half, wrapped = wrap(bare)
        replay = replay or attach([wrapped], min_agreement=0)
        micro = models.Micro(*LENGTHS)
        for chunk in (wrapped, half, bare):
            with models.watch(bare) as seen:
                logits = micro.forward(chunk, replay)
            assert logits.dtype == (torch.bfloat16 if chunk is bare else torch.float32)
            ids, recorded = micro.recorded(2)
            chosen = seen[2][0][2][recorded]
            assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, ids[recorded], True))
            logits.float().square().mean().backward()
        detach(half)
        assert not bare._forward_hooks


def test_multi_token_prediction_layers_are_not_bound(models) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from r3.trainers.megatron.attention import RMSNorm, local_block_spec

    settings = models.config(mtp_num_layers=1)
    block = local_block_spec(settings)
    mtp = get_gpt_mtp_block_spec(settings, block, use_transformer_engine=False)
    for layer in mtp.layer_specs:
        layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = RMSNorm
    arguments = {"vocab_size": 64, "max_sequence_length": 64, "position_embedding_type": "rope"}
    model = GPTModel(settings, block, mtp_block_spec=mtp, **arguments).train()
    [extra] = [m for m in model.mtp.modules() if type(m).__name__ == "TopKRouter"]
    replay = attach(model, min_agreement=0)
    assert replay.layers == SPEC.moe_layers
    assert extra.router_replay is None
    micro = models.Micro(*LENGTHS)
    called = []
    handle = extra.register_forward_hook(lambda *_: called.append(1))
    with models.watch(model) as seen, replay.micro_batch(model, micro.samples, micro.layout, micro.tokens):
        model(micro.tokens, micro.positions, None, labels=micro.tokens).sum().backward()
    handle.remove()
    assert called
    assert set(seen) == set(SPEC.moe_layers)
    ids, recorded = micro.recorded(3)
    chosen = seen[3][0][2][recorded]
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, ids[recorded], True))


def test_a_decoder_that_was_thrown_away_is_not_bound(models) -> None:
    """verl issue 4562: Megatron's registry holds the routers of both, in the order of construction."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    before = len(RouterReplay.global_router_replay_instances)
    settings = models.config(moe_enable_routing_replay=True)
    first, second = models.build(settings), models.build(settings)
    assert len(RouterReplay.global_router_replay_instances) == before + 6
    second.decoder = first.decoder
    assert exact(models, second, attach(second, min_agreement=0))
    del RouterReplay.global_router_replay_instances[before:]


def test_a_language_model_inside_another(models) -> None:
    class VisionLanguage(nn.Module):
        def __init__(self, language_model: Any) -> None:
            super().__init__()
            self.vision_model = nn.Module()
            self.vision_model.decoder = nn.Module()
            self.vision_model.decoder.layers = nn.ModuleList([nn.Linear(2, 2)])
            self.language_model = language_model

        def forward(self, *args: Any) -> torch.Tensor:
            return self.language_model(*args)

    inner = models.build(models.config())
    outer = VisionLanguage(inner)
    replay = attach(outer, min_agreement=0)
    assert replay.layers == SPEC.moe_layers
    micro = models.Micro(*LENGTHS)
    with models.watch(inner) as seen:
        micro.forward(outer, replay)
    ids, recorded = micro.recorded(1)
    assert torch.equal(seen[1][0][2][recorded].sum(1), torch.full((int(recorded.sum()),), 2))
    assert bool(seen[1][0][2][recorded].gather(1, ids[recorded]).all())


PIPELINES: dict[str, tuple[dict[str, Any], list[list[tuple[int, ...]]]]] = {
    # settings; decoder layers of each chunk of each rank
    "even": ({"pipeline_model_parallel_size": 2}, [[(0, 1, 2, 3)], [(4, 5, 6, 7)]]),
    "four": ({"pipeline_model_parallel_size": 4}, [[(0, 1)], [(2, 3)], [(4, 5)], [(6, 7)]]),
    "short first stage": (
        {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 3},
        [[(0, 1, 2)], [(3, 4, 5, 6, 7)]],
    ),
    "short last stage": (
        {"pipeline_model_parallel_size": 3, "num_layers_in_last_pipeline_stage": 2},
        [[(0, 1, 2)], [(3, 4, 5)], [(6, 7)]],
    ),
    "embedding counts as a layer": (
        {"num_layers": 7, "pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True},
        [[(0, 1, 2)], [(3, 4, 5, 6)]],
    ),
    "embedding and loss count": (
        {
            "num_layers": 6,
            "pipeline_model_parallel_size": 4,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
        [[(0,)], [(1, 2)], [(3, 4)], [(5,)]],
    ),
    "interleaved": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        [[(0, 1), (4, 5)], [(2, 3), (6, 7)]],
    ),
    "interleaved by ones": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
        [[(0,), (2,), (4,), (6,)], [(1,), (3,), (5,), (7,)]],
    ),
    "layout with stages of the embedding and of the loss alone": (
        {
            "pipeline_model_parallel_size": 4,
            "pipeline_model_parallel_layout": [["embedding"], ["decoder"] * 3, ["decoder"] * 5, ["loss"]],
        },
        [[()], [(0, 1, 2)], [(3, 4, 5, 6, 7)], [()]],
    ),
}


@pytest.mark.parametrize("freq", [1, 2, [0, 1, 1, 0, 1, 0, 0, 1]], ids=["all", "one in two", "a pattern"])
@pytest.mark.parametrize("kind", PIPELINES)
def test_routers_are_bound_by_global_layer_number(kind: str, freq: Any, models) -> None:
    """Every chunk of every rank of a pipeline, built in one process under process groups that do nothing."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    settings, stages = PIPELINES[kind]
    num_layers = settings.get("num_layers", 8)
    freq = freq[:num_layers] if isinstance(freq, list) else freq
    routed = [i for i in range(num_layers) if (freq[i] if isinstance(freq, list) else i % freq == 0)]
    size, virtual = len(stages), settings.get("virtual_pipeline_model_parallel_size")
    for rank, chunks in enumerate(stages):
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        parallel_state.initialize_model_parallel(1, size, virtual, create_gloo_process_groups=False)
        config = models.config(**{"num_layers": num_layers, "moe_layer_freq": freq, **settings})
        built = [models.build(config, stage) for stage in (range(virtual) if virtual else [None])]
        replay = attach(built, min_agreement=0)
        assert replay.spec.moe_layers == tuple(routed)
        assert [replay.layers_of(chunk) for chunk in built] == [
            tuple(layer for layer in layers if layer in routed) for layers in chunks
        ]
        for chunk, layers in zip(built, chunks, strict=True):
            assert len(getattr(chunk.decoder, "layers", ())) == len(layers)
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (RoutingSpec(4, (0, 1, 2, 3), 8, 2), "does not route as the spec says"),
        (RoutingSpec(4, (1, 2), 8, 2), "does not route as the spec says"),
        (RoutingSpec(4, (1, 2, 3), 16, 2), "a router does not route as the spec says"),
        (RoutingSpec(4, (1, 2, 3), 8, 4), "a router does not route as the spec says"),
        (RoutingSpec(6, (1, 2, 3), 8, 2), "another number of decoder layers"),
    ],
)
def test_another_models_spec_is_refused(spec: RoutingSpec, message: str, models) -> None:
    with pytest.raises((ReplayError, SpecError), match=message):
        attach(models.build(models.config()), spec)


def test_a_router_with_another_number_is_refused(models) -> None:
    model = models.build(models.config())
    model.decoder.layers[2].mlp.router.layer_number = 2
    with pytest.raises(ReplayError, match="another number than its decoder layer") as error:
        attach(model)
    assert (error.value.where, error.value.expected, error.value.got) == ("layer 2", 3, 2)


def test_chunks_that_do_not_fit_together(models) -> None:
    one, other = models.build(models.config()), models.build(models.config())
    with pytest.raises(ReplayError, match="stand in two model chunks"):
        attach([one, other])
    other.decoder.layers = other.decoder.layers[:2]
    with pytest.raises(ReplayError, match="no pipeline whose other stages") as error:
        attach(other)
    assert error.value.where == "layers [2, 3]"
    with pytest.raises(ReplayError, match="none has a config"):
        attach(nn.Linear(2, 2))


def test_hash_routed_layers_are_skipped_and_counted(models) -> None:
    """As on Megatron's dev branch (DeepSeek-V4): the first layers look their experts up by token id."""
    model = models.build(models.config())
    model.config.moe_n_hash_layers = 2
    router = model.decoder.layers[1].mlp.router
    router.is_hash_layer = True
    spec = spec_of(model.config)
    assert (spec.moe_layers, spec.hash_layers) == ((2, 3), (1,))
    replay = attach(model, min_agreement=0)
    assert (replay.layers, replay.hash_layers) == ((2, 3), (1,))
    assert router.router_replay is None
    micro = models.Micro(*LENGTHS, spec=spec)
    micro.forward(model, replay)
    assert replay.coverage.forwards == 1
    detach(model)
    router.is_hash_layer = False
    with pytest.raises(ReplayError, match="does not route as the spec says"):
        attach(model)


# Refusing -----------------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sinkhorn": ({"moe_router_load_balancing_type": "sinkhorn"}, "chooses experts by itself"),
    "quantile balancing (0.19)": (
        {"moe_router_load_balancing_type": "quantile_balancing"},
        "chooses experts by itself",
    ),
    "one of a list": ({"moe_router_load_balancing_type": ["aux_loss", "expert_choice"]}, "'expert_choice'"),
    "forced load balancing": ({"moe_router_force_load_balancing": True}, "forced for a benchmark"),
    "forced bias (0.17)": ({"moe_router_force_biased": 0.5}, "forced for a benchmark"),
    "fused router": ({"moe_router_fusion": True}, "inside its kernel"),
    "capacity": ({"moe_expert_capacity_factor": 1.25}, "drop tokens after the choice"),
    "rank capacity (0.20)": ({"moe_expert_rank_capacity_factor": 2.0}, "drop tokens after the choice"),
    "combined 1F1B": ({"overlap_moe_expert_parallel_comm": True}, "never calls the model"),
    "old dispatcher": ({"moe_token_dispatcher_type": "alltoall_seq"}, "all tensor-parallel ranks"),
    "CUDA graph": ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, "inside a CUDA graph"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_under_which_replay_would_not_happen(kind: str, models) -> None:
    settings, message = REFUSED[kind]
    config = models.config()
    refuse(config)
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(ReplayError, match=message) as error:
        refuse(config)
    assert "megatron-core 0." in str(error.value.where)
    assert error.value.remedy


@pytest.mark.parametrize(
    ("settings", "captured"),
    [
        ({"cuda_graph_impl": "none", "cuda_graph_scope": ["moe"]}, False),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}, False),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,mlp"}, False),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": []}, True),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]}, True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, True),
        ({"cuda_graph_impl": "full_iteration", "cuda_graph_modules": ["attn"]}, True),  # 0.20
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"], "cuda_graph_scope": None}, False),
        ({"enable_cuda_graph": True}, True),  # until 0.15
        ({"external_cuda_graph": True, "cuda_graph_scope": "full"}, True),
        ({"external_cuda_graph": True, "cuda_graph_scope": "attn"}, False),
        ({}, False),
    ],
)
def test_which_cuda_graphs_hold_a_router(settings: dict[str, Any], captured: bool) -> None:
    assert bool(captured_by_cuda_graphs(types.SimpleNamespace(**settings))) == captured


def test_scopes_are_read_from_megatrons_own_enum() -> None:
    from megatron.core.transformer.enums import CudaGraphScope

    for scope, captured in ((CudaGraphScope.attn, False), (CudaGraphScope.moe_router, True)):
        settings = types.SimpleNamespace(cuda_graph_impl="transformer_engine", cuda_graph_scope=[scope])
        assert bool(captured_by_cuda_graphs(settings)) == captured


# Signatures: routers that ask in the ways of other versions, and in ways that nobody knows ----------------------------------

Ask = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def asking(router: Any, ask: Ask) -> None:
    """Give a live router another `routing`: softmax of the chosen, whose top-k is got by `ask(seam, logits, k, topk)`."""
    base = type(router)

    def routing(self: Any, logits: torch.Tensor, padding_mask: Any = None, input_ids: Any = None) -> Any:  # noqa: ARG001
        logits = logits.view(-1, self.config.num_moe_experts)

        def default(scores: torch.Tensor, topk: int, num_groups: Any = None, group_topk: Any = None) -> Any:  # noqa: ARG001
            return torch.topk(scores, k=topk, dim=1)

        values, ids = ask(self.router_replay, logits, self.topk, default)
        probs = torch.zeros_like(logits).scatter(1, ids, values.softmax(-1))
        return probs, torch.zeros_like(logits).int().scatter(1, ids, 1).bool()

    router.__class__ = type("TopKRouter", (base,), {"routing": routing})


def by_position(seam: Any, logits: torch.Tensor, k: int, default: Any) -> Any:
    """0.16 to 0.19 and main."""
    return default(logits, k) if seam is None else seam.get_replay_topk(logits, k, None, None, default)


def by_keyword(seam: Any, logits: torch.Tensor, k: int, default: Any) -> Any:
    """veRL's patch of older versions."""
    if seam is None:
        return default(logits, k)
    return seam.get_replay_topk(logits, k, num_groups=None, group_topk=None, default_compute_topk=default)


def with_more(seam: Any, logits: torch.Tensor, k: int, default: Any) -> Any:
    return seam.get_replay_topk(logits, k, None, None, default, layer_number=3)


def renamed(seam: Any, logits: torch.Tensor, k: int, default: Any) -> Any:
    return seam.replay_topk(logits, k, default)


def never(_seam: Any, logits: torch.Tensor, k: int, default: Any) -> Any:
    return default(logits, k)


def twice(seam: Any, logits: torch.Tensor, k: int, default: Any) -> Any:
    by_position(seam, logits, k, default)
    return by_position(seam, logits, k, default)


def moved_afterwards(seam: Any, logits: torch.Tensor, k: int, default: Any) -> Any:
    values, ids = by_position(seam, logits, k, default)
    return values, (ids + 1) % logits.shape[1]


def masked(seam: Any, logits: torch.Tensor, k: int, default: Any) -> Any:
    own = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(k, 1).indices, True)
    return by_position(seam, logits.masked_fill(~own, float("-inf")), k, default)


@pytest.mark.parametrize("ask", [by_position, by_keyword])
def test_known_ways_of_asking(ask: Ask, models) -> None:
    model = models.build(models.config())
    for router in models.routers_of(model).values():
        asking(router, ask)
    replay = attach(model, min_agreement=0)
    assert exact(models, model, replay)


@pytest.mark.parametrize(
    ("ask", "message", "got"),
    [
        (with_more, "in a way that r3 does not know", "a call with 5 arguments and layer_number"),
        (renamed, "in a way that r3 does not know", "no call of it"),
        (never, "does not ask for its experts once", "0 calls"),
        (twice, "does not ask for its experts once", "2 calls"),
        (moved_afterwards, "does not send tokens to the experts", None),
        (masked, "does not send tokens to the experts", None),
    ],
)
def test_unknown_ways_of_asking_are_refused_by_version(ask: Ask, message: str, got: str | None, models) -> None:
    model = models.build(models.config())
    asking(model.decoder.layers[3].mlp.router, ask)
    with pytest.raises(ReplayError, match=message) as error:
        attach(model)
    assert error.value.where == f"decoder layer 3, TopKRouter of megatron-core {version()}"
    assert error.value.got == got
    assert all(router.router_replay is None for router in models.routers_of(model).values())


# Coexistence --------------------------------------------------------------------------------------------------------------


def test_megatrons_own_replay_stays_and_works(models) -> None:
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    registry = RouterReplay.global_router_replay_instances
    before = list(registry)
    model = models.build(models.config(moe_enable_routing_replay=True))
    theirs = {layer: router.router_replay for layer, router in models.routers_of(model).items()}
    assert registry == before + list(theirs.values())
    replay = attach(model, min_agreement=0)
    assert registry == before + list(theirs.values())
    micro = models.Micro(*LENGTHS)
    live = micro.forward(model)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    with models.watch(model) as seen:
        micro.forward(model)  # ours is idle: theirs records
    for layer, own in theirs.items():
        chosen = seen[layer][0][2]
        assert torch.equal(torch.zeros_like(chosen).scatter(1, own.get_recorded_indices(), True), chosen)
    assert exact(models, model, replay, micro)  # ours replays, whatever theirs is set to
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    for layer, router in models.routers_of(model).items():
        router.router_replay.set_target_indices(theirs[layer].get_recorded_indices())  # through our object
    torch.testing.assert_close(micro.forward(model), live)
    RouterReplay.clear_global_router_replay_action()
    detach(model)
    assert {layer: router.router_replay for layer, router in models.routers_of(model).items()} == theirs
    del registry[len(before) :]


def test_an_object_that_somebody_put_over_ours_is_not_taken_away(models) -> None:
    model = models.build(models.config())
    attach(model)
    router = model.decoder.layers[1].mlp.router
    router.router_replay = theirs = object()
    detach(model)
    assert router.router_replay is theirs


@pytest.fixture
def verl_patch() -> Iterator[types.ModuleType]:
    """veRL 0.9.1's patch in force, and undone."""
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.utils.megatron import router_replay_patch

    owners = (TopKRouter, MoEAlltoAllTokenDispatcher, TransformerConfig)
    before = [dict(vars(owner)) for owner in owners]
    router_replay_patch.apply_router_replay_patch()
    yield router_replay_patch
    for owner, names in zip(owners, before, strict=True):
        for name in set(vars(owner)) - set(names):
            delattr(owner, name)
        for name in ("__init__", "routing", "preprocess"):
            if name in names:
                setattr(owner, name, names[name])


def test_under_verls_patch(models, verl_patch) -> None:
    """It replaces TopKRouter.routing in 0.16.1 by code of its own, which asks the same seam by keyword."""
    from megatron.core.transformer.moe.router import TopKRouter

    assert TopKRouter.routing is verl_patch.patched_routing
    settings = models.config()
    settings.enable_routing_replay = True
    model = models.build(settings)
    theirs = [router.router_replay for router in models.routers_of(model).values()]
    assert all(type(one) is verl_patch.RouterReplay for one in theirs)
    replay = attach(model, min_agreement=0)
    assert exact(models, model, replay)
    verl_patch.RouterReplay.set_global_router_replay_action(verl_patch.RouterReplayAction.RECORD)
    models.Micro(*LENGTHS).forward(model)
    assert all(one.get_recorded_indices() is not None for one in theirs)
    detach(model)
    assert [router.router_replay for router in models.routers_of(model).values()] == theirs


def test_numbers_may_be_set_through_the_seam(models) -> None:
    """0.19: `set_layer_number` of a router writes to its `router_replay`; SkyRL's patch does the same."""
    model = models.build(models.config())
    attach(model)
    router = model.decoder.layers[1].mlp.router
    router.router_replay.layer_number = 2
    assert router.router_replay.layer == 1
    with pytest.raises(AttributeError, match="set_target_indices"):
        router.router_replay.set_target_indices(None)
    detach(model)


# Micro-batches ------------------------------------------------------------------------------------------------------------


def test_a_chunk_that_is_not_attached(models) -> None:
    model, other = models.build(models.config()), models.build(models.config())
    replay = attach(model, min_agreement=0)
    with pytest.raises(ReplayError, match="is not attached to this replay"):
        models.Micro(*LENGTHS).forward(other, replay)


def test_a_forward_of_something_else_is_not_a_replay(models) -> None:
    model, other = models.build(models.config()), models.build(models.config())
    replay = attach(model, min_agreement=0)
    micro = models.Micro(*LENGTHS)
    with (
        pytest.raises(ReplayError, match="no forward of the attached model"),
        replay.micro_batch(model, micro.samples, micro.layout, micro.tokens),
    ):
        other(micro.tokens, micro.positions, None)


def lines_of(micro: Any, **_: Any) -> None:
    micro.layout = Layout(micro.layout.rows, micro.layout.lengths, 1)


def flat(micro: Any, **_: Any) -> None:
    micro.layout, micro.tokens = Layout(micro.layout.rows, micro.layout.lengths), None


def flat_tokens(micro: Any, **_: Any) -> None:
    micro.layout, micro.tokens = Layout(micro.layout.rows, micro.layout.lengths), micro.tokens.flatten()


def another_sample(micro: Any, models: Any) -> None:
    micro.samples = [*micro.samples[:2], models.Micro(9, 12, 5, seed=6).samples[2]]


def without_layers(micro: Any, **_: Any) -> None:
    micro.samples = [PartialSample.of(sample, (1, 2)) for sample in micro.samples]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lines_of, ReplayError, "another number of lines"),
        (flat, LayoutError, "how many lines the token tensor has is not known"),
        (flat_tokens, LayoutError, "how many lines the token tensor has is not known"),
        (another_sample, ReplayError, "tokens are not the rollout's"),
        (without_layers, ReplayError, "read without layers that are replayed here"),
    ],
)
def test_micro_batches_that_cannot_be_right(change: Any, error: type[R3Error], message: str, models) -> None:
    model = models.build(models.config())
    replay = attach(model, min_agreement=0)
    micro = models.Micro(*LENGTHS)
    change(micro, models=models)
    with pytest.raises(error, match=message):
        replay.micro_batch(model, micro.samples, micro.layout, micro.tokens).__enter__()
    assert exact(models, model, replay)  # and the handle is as before


def test_a_stage_without_tokens_and_samples_of_some_layers(models) -> None:
    model = models.build(models.config())
    replay = attach(model, min_agreement=0)
    micro = models.Micro(*LENGTHS)
    tokens = micro.tokens
    whole = micro.forward(model, replay)
    micro.samples = [PartialSample.of(sample, replay.layers_of(model)) for sample in micro.samples]
    with replay.micro_batch(model, micro.samples, micro.layout):
        assert torch.equal(model(tokens, micro.positions, None), whole)


def test_a_chunk_without_routers(models) -> None:
    """An embedding stage: it takes micro-batches like the others and does not count."""
    model = models.build(models.config(pipeline_model_parallel_size=1))
    model.decoder.layers = model.decoder.layers[:1]
    model.config.pipeline_model_parallel_size = 2
    replay = attach(model, SPEC)
    assert replay.layers == ()
    models.Micro(*LENGTHS).forward(model, replay).sum().backward()
    assert (replay.coverage.forwards, replay.coverage.replayed) == (0, 0)
    with (
        pytest.raises(ReplayError, match="no forward of the attached model"),
        replay.micro_batch(model, [], Layout.padded([])),
    ):
        pass
