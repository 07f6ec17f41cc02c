"""Settings of Megatron under which routing replay does not happen, or is not what it says.

Read by name from Megatron's arguments or `TransformerConfig` fields, without Megatron: on a login node too. What attaching
itself refuses (`r3.trainers.megatron.routers.refuse`) is red here, with the same reason; a test compares the two.
"""

from __future__ import annotations

from typing import Any

from r3.doctor.checks import Check, Settings, green, red, yellow
from r3.spec import RoutingSpec

_BALANCING = {"none", "aux_loss", "seq_aux_loss", "global_aux_loss"}
_GRAPHS = {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"}


def fused_router(s: Settings) -> Check:
    if s.on("moe_router_fusion"):
        return red(
            "fused router",
            "moe_router_fusion is on: it chooses experts inside its kernel, before the seam: replay would silently do nothing",
            "set moe_router_fusion=False",
        )
    return green("fused router", "off")


def load_balancing(s: Settings) -> Check:
    kinds = s.get("moe_router_load_balancing_type", default="aux_loss")
    kinds = kinds if isinstance(kinds, (list, tuple)) else [kinds]
    other = [kind for kind in kinds if kind not in _BALANCING]
    if other:
        return red(
            "load balancing",
            f"{', '.join(map(str, other))} chooses experts by itself, not by the router's top-k",
            f"moe_router_load_balancing_type: one of {', '.join(sorted(_BALANCING))}",
        )
    return green("load balancing", ", ".join(map(str, kinds)))


def forced_routing(s: Settings) -> Check | None:
    for name in ("moe_router_force_load_balancing", "moe_router_force_biased"):
        if s.get(name) not in (None, False, "False", 0):
            return red("forced routing", f"{name} is on: gate weights are of random logits", f"take {name} out")
    return None


def capacity(s: Settings) -> Check | None:
    for name in ("moe_expert_capacity_factor", "moe_expert_rank_capacity_factor"):
        if s.get(name) is not None:
            return red(
                "expert capacity",
                f"{name}={s.get(name)}: experts drop tokens after the choice, and the rollout engine dropped none",
                f"set {name}=None",
            )
    return green("expert capacity", "no token is dropped")


def dispatcher(s: Settings) -> Check:
    kind = s.get("moe_token_dispatcher_type", default="allgather")
    if kind == "alltoall_seq":
        return red("token dispatcher", "alltoall_seq routes the rows of all tensor-parallel ranks", "use alltoall")
    return green("token dispatcher", str(kind))


def overlapped_schedule(s: Settings) -> Check | None:
    if not s.on("overlap_moe_expert_parallel_comm"):
        return None
    return red(
        "overlapped schedule",
        "overlap_moe_expert_parallel_comm never calls the model: nothing says which micro-batch a recompute is of",
        "set overlap_moe_expert_parallel_comm=False",
    )


def cuda_graphs(s: Settings) -> Check | None:
    """Names changed from version to version."""
    impl = s.get("cuda_graph_impl", default="none")
    if impl == "none":
        impl = next((name for name in ("enable_cuda_graph", "external_cuda_graph") if s.on(name)), "none")
    if impl == "none":
        return None
    scope = s.get("cuda_graph_modules", "cuda_graph_scope", default=[])
    scopes = (
        scope.split(",") if isinstance(scope, str) else list(scope) if isinstance(scope, (list, tuple)) else [scope]
    )
    if scopes and impl != "full_iteration" and not _GRAPHS & set(map(str, scopes)):
        return green("CUDA graphs", f"{impl}, without routers (scope {', '.join(map(str, scopes))})")
    return red(
        "CUDA graphs",
        f"{impl}: routers inside a graph run the kernels of the micro-batch that was captured",
        "cuda_graph_impl=none, or a scope without router, MoE layer and whole iteration (attn, mlp)",
    )


def correction_bias(s: Settings) -> Check | None:
    """Loss-free balancing counts the tokens of each expert, and under replay those are the rollout's (prime-rl 2953)."""
    if not s.on("moe_router_enable_expert_bias"):
        return None
    rate = s.number("moe_router_bias_update_rate")
    if rate == 0:
        return green("correction bias", "frozen")
    return yellow(
        "correction bias",
        "moe_router_enable_expert_bias with updates: under replay they balance the rollout's loads, one step late",
        "freeze it during RL: moe_router_bias_update_rate=0",
    )


def jitter(s: Settings) -> Check | None:
    if not s.get("moe_input_jitter_eps"):
        return None
    return yellow(
        "router jitter",
        "moe_input_jitter_eps is on: gate weights are noisy in training and not in the rollout",
        "take moe_input_jitter_eps out",
    )


def router_dtype(s: Settings) -> Check:
    """Gate weights come from the training logits, also under replay."""
    dtype = s.get("moe_router_dtype")
    if str(dtype) in ("fp32", "fp64", "float32", "float64"):
        return green("router dtype", str(dtype))
    return yellow(
        "router dtype",
        f"{dtype or 'that of the activations'}: gate weights are rounded, and live routing disagrees more often",
        "moe_router_dtype=fp32",
    )


def mtp(s: Settings) -> Check | None:
    count = s.number("mtp_num_layers")
    if not count:
        return None
    return green("multi-token prediction", f"{count:.0f} MTP layer(s): not recorded, r3 leaves their routers alone")


def number_format(s: Settings) -> Check | None:
    if s.get("fp8") or s.get("fp4"):
        name = "fp8" if s.get("fp8") else "fp4"
        return yellow(
            "trainer dtype",
            f"{name}={s.get(name)}: what its rounding costs is not routing, and replay leaves it",
            "take the diagnostic's replay row as what remains; the engine in the same format helps",
        )
    return green("trainer dtype", "bf16" if s.on("bf16") else "fp16" if s.on("fp16") else "float32 or not stated")


def same_routing(s: Settings, spec: RoutingSpec | None) -> Check | None:
    """Against --model."""
    if spec is None:
        return None
    stated: dict[str, tuple[Any, int]] = {
        "num_experts": (s.number("num_moe_experts", "num_experts"), spec.num_experts),
        "moe_router_topk": (s.number("moe_router_topk"), spec.top_k),
        "num_layers": (s.number("num_layers"), spec.num_layers),
    }
    differing = [
        f"{name}={found:.0f}, model {want}"
        for name, (found, want) in stated.items()
        if found is not None and found != want
    ]
    if differing:
        return red("trainer and model", "; ".join(differing), "give the trainer the rollout model's architecture")
    if all(found is None for found, _ in stated.values()):
        return None
    return green("trainer and model", f"experts, top-k and layers as in {spec.model_type or 'the model'}")


CHECKS = (
    fused_router,
    load_balancing,
    forced_routing,
    capacity,
    dispatcher,
    overlapped_schedule,
    cuda_graphs,
    correction_bias,
    jitter,
    router_dtype,
    mtp,
    number_format,
)


def examine(settings: Settings, spec: RoutingSpec | None) -> list[Check]:
    found = [*(check(settings) for check in CHECKS), same_routing(settings, spec)]
    return [check for check in found if check is not None]
