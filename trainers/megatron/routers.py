"""Find the routers of Megatron-core model chunks by walking them, and refuse what would not replay.

A chunk is what a pipeline schedule calls: a GPTModel (or another model with a `decoder`), bare or in DDP and Float16Module. The
decoder's layers carry their *global* number (`layer_number`, from 1, the offset of the pipeline stage and of the virtual
stage included), and their routers the same; both are read and compared. Only routers in the decoder are bound: those of
multi-token-prediction layers stand beside it and reuse decoder numbers, and a decoder that a model was built with and threw
away is not in it at all. Megatron's own replay registry holds all of these, in order of construction.

Contract: what this module passes replays; what does not is refused here by name, with the remedy, not at the first forward.
docs/megatron.md has the table of features, safe and refused, with the reason of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from r3.errors import ReplayError, SpecError
from r3.spec import RoutingSpec
from r3.trainers.megatron.seam import version


@dataclass(frozen=True)
class Chunk:
    """One model chunk.

    Attributes:
        outer: The module that was given.
        inner: The module around its decoder, on which hooks survive both being called directly and being wrapped.
        routers: By global decoder-layer index: those that are bound.
        hashed: Decoder layers whose experts come from a table by token id: nothing to replay.
    """

    outer: nn.Module
    inner: nn.Module
    routers: dict[int, Any]
    hashed: tuple[int, ...]


def find_chunks(models: Sequence[nn.Module], spec: RoutingSpec | None) -> tuple[RoutingSpec, list[Chunk]]:
    """Walk the chunks of one rank.

    Args:
        models: As the schedule is given them.
        spec: The rollout model's routing; from the chunks' config if None.

    Raises:
        SpecError: the config does not tell a spec, or another number of layers than the one given.
        ReplayError: a layer that does not route as the spec says, a layer that is there twice, or none where all must be.
    """
    parts = [decoder_of(model) for model in models]
    configs = [config for inner, _ in parts if (config := getattr(inner, "config", None)) is not None]
    if not configs:
        raise ReplayError("these are not model chunks of Megatron-core: none has a config", where=_names(models))
    spec = spec_of(configs[0]) if spec is None else spec
    for config in configs:
        if getattr(config, "num_layers", spec.num_layers) != spec.num_layers:
            raise SpecError(
                "the trainer's model has another number of decoder layers than the spec",
                expected=spec.brief(),
                got=f"{config.num_layers} layers",
            )
    chunks = [_chunk(model, inner, decoder, spec) for model, (inner, decoder) in zip(models, parts, strict=True)]
    bound = [layer for chunk in chunks for layer in (*chunk.routers, *chunk.hashed)]
    twice = sorted({layer for layer in bound if bound.count(layer) > 1})
    if twice:
        raise ReplayError(
            "decoder layers stand in two model chunks of this rank",
            where=f"layers {twice}",
            remedy="give each chunk once, and build the chunks of an interleaved pipeline with their vp_stage",
        )
    alone = getattr(configs[0], "pipeline_model_parallel_size", 1) == 1
    absent = sorted(set(spec.moe_layers) - set(bound))
    if alone and absent:
        raise ReplayError(
            "MoE layers of the spec are not in these chunks, and there is no pipeline whose other stages could hold them",
            where=f"layers {absent}",
            expected=spec.brief(),
            got=f"layers {sorted(bound)}",
            remedy="attach to all model chunks of the rank, with the spec of this model",
        )
    return spec, chunks


def spec_of(config: Any) -> RoutingSpec:
    """The routing of a Megatron `TransformerConfig`; its leading hash-routed layers (DeepSeek-V4) are told apart."""
    spec = RoutingSpec.from_config(config)
    hashed = tuple(layer for layer in spec.moe_layers if layer < (getattr(config, "moe_n_hash_layers", 0) or 0))
    if not hashed:
        return spec
    rest = tuple(layer for layer in spec.moe_layers if layer not in hashed)
    return RoutingSpec(spec.num_layers, rest, spec.num_experts, spec.top_k, spec.model_type, hash_layers=hashed)


def decoder_of(model: nn.Module) -> tuple[nn.Module, Any]:
    """(the module around the decoder, the decoder or None): unwrapped, and the language model of a larger one.

    Raises:
        ReplayError: several decoders with routers.
    """
    inner = model
    while not hasattr(inner, "decoder") and isinstance(getattr(inner, "module", None), nn.Module):
        inner = inner.module  # type: ignore[assignment]
    if _layers(inner):
        return inner, inner.decoder
    around: list[Any] = [module for module in inner.modules() if _layers(module)]
    routed = [module for module in around if any(True for _ in _routers(module.decoder))]
    if len(routed) > 1:
        raise ReplayError(
            "this model has several decoders with routers",
            where=", ".join(type(module).__name__ for module in routed),
            remedy="attach to the language model itself",
        )
    # Without a router in it, a decoder that is not the model's own may be a vision tower's: no layer of the spec.
    return (routed[0], routed[0].decoder) if routed else (inner, None)


def _layers(module: nn.Module) -> bool:
    return len(getattr(getattr(module, "decoder", None), "layers", None) or ()) > 0


def _routers(module: nn.Module) -> Iterator[Any]:
    from megatron.core.transformer.moe.router import Router

    return (child for child in module.modules() if isinstance(child, Router))


def _chunk(model: nn.Module, inner: nn.Module, decoder: Any, spec: RoutingSpec) -> Chunk:
    routers: dict[int, Any] = {}
    hashed: list[int] = []
    for layer in getattr(decoder, "layers", None) or ():
        found, index = list(_routers(layer)), _index_of(layer, spec)
        by_id = [router for router in found if getattr(router, "is_hash_layer", False)]
        routed = index in spec.moe_layers or index in spec.hash_layers
        if len(found) != int(routed) or bool(by_id) != (index in spec.hash_layers):
            raise ReplayError(
                "a decoder layer does not route as the spec says",
                where=f"{type(inner).__name__}, layer {index}",
                expected=_kind(int(routed), index in spec.hash_layers),
                got=_kind(len(found), bool(by_id)),
                remedy="give the spec of this model: attach(chunks, spec). In Megatron, moe_layer_freq says which layers route",
            )
        if by_id:
            hashed.append(index)
        elif found:
            _require_fitting(found[0], spec, index)
            routers[index] = found[0]
    return Chunk(model, inner, routers, tuple(hashed))


def _index_of(layer: nn.Module, spec: RoutingSpec) -> int:
    number = getattr(layer, "layer_number", None)
    if not isinstance(number, int) or not 1 <= number <= spec.num_layers:
        raise ReplayError(
            "a decoder layer does not know its number in the whole model",
            where=type(layer).__name__,
            expected=f"layer_number 1..{spec.num_layers}",
            got=number,
            remedy="the spec is of another model, or the chunk was built without its vp_stage",
        )
    return number - 1


def _kind(count: int, by_id: bool) -> str:
    if count == 0:
        return "no router (a dense layer)"
    return f"{count} router{'s' * (count > 1)}{' by token id' * by_id}"


def _require_fitting(router: Any, spec: RoutingSpec, index: int) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    where = f"layer {index}"
    if not isinstance(router, TopKRouter):
        raise ReplayError(
            "this router is not a top-k router of Megatron-core",
            where=where,
            expected="TopKRouter",
            got=type(router).__name__,
            remedy="replay is not possible in it",
        )
    number = router.layer_number
    if number is not None and number != index + 1:
        raise ReplayError(
            "a router has another number than its decoder layer",
            where=where,
            expected=index + 1,
            got=number,
            remedy="a patch of set_layer_number numbers routers in another way: attach before it, or remove it",
        )
    got = f"top-{router.topk} of {router.config.num_moe_experts} experts"
    if (router.topk, router.config.num_moe_experts) != (spec.top_k, spec.num_experts):
        raise ReplayError(
            "a router does not route as the spec says",
            where=where,
            expected=f"top-{spec.top_k} of {spec.num_experts} experts",
            got=got,
        )


_LOAD_BALANCING = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}  # the others choose experts in other ways
_CAPTURING = {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"}


def refuse(config: Any, *, allow_token_dropping: bool = False) -> None:
    """Raise on settings of a `TransformerConfig` under which replay would not happen, or not be what it says.

    Raises:
        ReplayError: naming the setting and what to set instead.
    """
    kinds = config.moe_router_load_balancing_type
    for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
        if kind not in _LOAD_BALANCING:
            _refuse(
                "this load balancing chooses experts by itself, not by the router's top-k",
                f"moe_router_load_balancing_type={kind!r}",
                f"one of {', '.join(sorted(_LOAD_BALANCING))}",
            )
    for name, off in (("moe_router_force_load_balancing", False), ("moe_router_force_biased", None)):
        if (getattr(config, name, off) or None) is not (off or None):
            _refuse(
                "routing is forced for a benchmark: gate weights would be of random logits",
                f"{name}={getattr(config, name)!r}",
                f"{name}={off}",
            )
    if getattr(config, "moe_router_fusion", False):
        raise ReplayError(
            "the fused router chooses experts inside its kernel, before the seam: replay would silently do nothing",
            where=f"megatron-core {version()}, moe_router_fusion=True",
            remedy="set config.moe_router_fusion=False, or attach(..., disable_fused_router=True), which restores it at detach",
        )
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if getattr(config, name, None) is not None and not allow_token_dropping:
            _refuse(
                "experts with a capacity drop tokens after the choice: a dropped token does not reach its recorded experts, "
                "and the rollout engine dropped none",
                f"{name}={getattr(config, name)!r}",
                f"{name}=None, or attach(..., allow_token_dropping=True) if that is what you want",
            )
    if getattr(config, "moe_token_dispatcher_type", "") == "alltoall_seq":
        _refuse("this dispatcher routes the rows of all tensor-parallel ranks", "alltoall_seq", "alltoall")
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        _refuse(
            "the overlapped schedule (combined 1F1B) runs layers node by node and never calls the model: nothing would say "
            "which micro-batch a recompute is of",
            "overlap_moe_expert_parallel_comm=True",
            "overlap_moe_expert_parallel_comm=False",
        )
    captured = captured_by_cuda_graphs(config)
    if captured:
        _refuse(
            "routers inside a CUDA graph run the kernels of the micro-batch that was captured: they would not ask again",
            captured,
            "cuda_graph_impl='none', or a scope without router, MoE layer and whole iteration (attn, mlp, mamba are safe)",
        )


def captured_by_cuda_graphs(config: Any) -> str:
    """The setting by which routers are inside a CUDA graph; empty if they are not. Names changed from version to version."""
    impl = getattr(config, "cuda_graph_impl", None) or "none"
    for name in ("enable_cuda_graph", "external_cuda_graph"):  # until 0.15, and aliases since
        if impl == "none" and getattr(config, name, False):
            impl = name
    if impl == "none":
        return ""
    scope = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None) or []
    scopes = scope.split(",") if isinstance(scope, str) else scope if isinstance(scope, (list, tuple)) else [scope]
    names = [str(getattr(one, "name", one)) for one in scopes]
    if names and impl != "full_iteration" and not _CAPTURING & set(names):
        return ""
    return f"cuda_graph_impl={impl!r}, scope {names or 'the whole layer'}"


def _refuse(what: str, got: str, instead: str) -> None:
    raise ReplayError(what, where=f"megatron-core {version()}", got=got, remedy=f"set {instead}")


def _names(models: Sequence[nn.Module]) -> str:
    return ", ".join(type(model).__name__ for model in models)
