"""How each model family writes down its routing: one line of names and one rule per family.

A config says which layers route in a dozen dialects (`first_k_dense_replace`, `decoder_sparse_step`, `mlp_layer_types`,
`layers_block_type`, ...), and calls the number of experts by seven names. This table is the only place that knows them.

Contract: every line is proved against the live model in tests/test_spec.py (its layers are walked and the router modules
counted); a family without that proof does not stand here, and a family that does not stand here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from r3.errors import SpecError

Rule = Callable[[Any, int], bool]


def every_layer(_config: Any, _layer: int) -> bool:
    return True


def no_layer(_config: Any, _layer: int) -> bool:
    return False


def dense_first(config: Any, layer: int) -> bool:
    return bool(layer >= config.first_k_dense_replace)


def dense_first_by_count(config: Any, layer: int) -> bool:
    return bool(layer >= config.num_dense_layers)


def sparse_step(config: Any, layer: int) -> bool:
    return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0


def typed(name: str, value: str) -> Rule:
    """The layers whose entry in the list `config.<name>` is `value`."""
    return lambda config, layer: bool(getattr(config, name)[layer] == value)


def _ernie(config: Any, layer: int) -> bool:
    first, last, step = config.moe_layer_start_index, config.moe_layer_end_index, config.moe_layer_interval
    return bool((layer + 1) % step == 0 and first <= layer <= last)


def _jamba(config: Any, layer: int) -> bool:
    return bool(config.layers_num_experts[layer] > 1)


def _megatron(config: Any, layer: int) -> bool:
    """megatron-core `models/gpt/gpt_layer_specs.py`: an integer N is one MoE layer in N, the first one included."""
    freq = config.moe_layer_freq
    return bool(freq[layer] if isinstance(freq, (list, tuple)) else layer % freq == 0)


@dataclass(frozen=True)
class Family:
    """Where a family's config keeps its routing. Names may be dotted.

    Attributes:
        experts: Attribute of the number of routed experts.
        top_k: Attribute of the experts per token.
        routes: Does decoder layer i have a router that chooses?
        layers: Attribute of the number of decoder layers.
        zero: Attribute of the number of zero-computation experts, which the router scores after the routed ones; or
            that number itself.
        hashed: Does decoder layer i take its experts from a table by token id?
    """

    experts: str = "num_experts"
    top_k: str = "num_experts_per_tok"
    routes: Rule = every_layer
    layers: str = "num_hidden_layers"
    zero: str | int = 0
    hashed: Rule = no_layer


_TYPED = typed("mlp_layer_types", "sparse")
_ROUTED, _LOCAL = "n_routed_experts", "num_local_experts"

FAMILIES: dict[str, Family] = {
    "afmoe": Family(routes=dense_first_by_count),
    "aria_text": Family("moe_num_experts", "moe_topk"),
    "axk1": Family(_ROUTED, routes=dense_first),
    "axk2": Family(_ROUTED, routes=_TYPED),
    "cohere2_moe": Family(routes=_TYPED),
    "dbrx": Family("ffn_config.moe_num_experts", "ffn_config.moe_top_k"),
    "deepseek_v2": Family(_ROUTED, routes=dense_first),
    "deepseek_v3": Family(_ROUTED, routes=dense_first),
    "deepseek_v32": Family(_ROUTED, routes=_TYPED),
    "deepseek_v4": Family(_ROUTED, routes=typed("mlp_layer_types", "moe"), hashed=typed("mlp_layer_types", "hash_moe")),
    "doge": Family(routes=lambda config, _layer: bool(config.is_moe)),
    "dots1": Family(_ROUTED, routes=dense_first),
    "ernie4_5_moe": Family("moe_num_experts", "moe_k", _ernie),
    "ernie4_5_vl_moe_text": Family("moe_num_experts", "moe_k", _TYPED),
    "exaone_moe": Family(routes=_TYPED),
    "flex_olmo": Family(),
    "gemma4_text": Family(top_k="top_k_experts", routes=lambda config, _layer: bool(config.enable_moe_block)),
    "glm4_moe": Family(_ROUTED, routes=dense_first),
    "glm4_moe_lite": Family(_ROUTED, routes=_TYPED),
    "glm4v_moe_text": Family(_ROUTED, routes=dense_first),
    "glm5_next_text": Family(_ROUTED, routes=_TYPED),
    "glm_moe_dsa": Family(_ROUTED, routes=_TYPED),
    "gpt_oss": Family(_LOCAL),
    "granitemoe": Family(_LOCAL),
    "granitemoe_swa": Family(_LOCAL),
    "granitemoehybrid": Family(_LOCAL, routes=lambda config, _layer: config.num_local_experts > 0),
    "granitemoeshared": Family(_LOCAL),
    "hunyuan_v1_moe": Family(top_k="moe_topk"),
    "hy_v3": Family(routes=_TYPED),
    "hy_v4": Family(_ROUTED, routes=_TYPED),
    "inkling_text": Family(_ROUTED, routes=_TYPED),
    "jamba": Family(routes=_jamba),
    "kimi_linear": Family(top_k="num_experts_per_token", routes=_TYPED),
    "laguna": Family(routes=_TYPED),
    "lfm2_moe": Family(routes=dense_first_by_count),
    "llama4_text": Family(_LOCAL, routes=lambda config, layer: layer in config.moe_layers),
    "longcat_flash": Family(_ROUTED, "moe_topk", layers="num_layers", zero="zero_expert_num"),
    "mellum": Family(_LOCAL, routes=_TYPED),
    "mimo_v2_flash": Family(_ROUTED, routes=_TYPED),
    "minimax": Family(_LOCAL),
    "minimax_m2": Family(_LOCAL),
    "minimax_m3_vl_text": Family(_LOCAL, routes=_TYPED),
    "mistral4": Family(_ROUTED, routes=dense_first),
    "mixtral": Family(_LOCAL),
    "nemotron_h": Family(_ROUTED, routes=typed("layers_block_type", "moe")),
    "olmoe": Family(),
    "phimoe": Family(_LOCAL),
    "qwen2_moe": Family(routes=sparse_step),
    "qwen3_5_moe_text": Family(),
    "qwen3_moe": Family(routes=sparse_step),
    "qwen3_next": Family(routes=sparse_step),
    "qwen3_omni_moe_text": Family(routes=sparse_step),
    "qwen3_vl_moe_text": Family(routes=sparse_step),
    "qwen4_exp_text": Family(),
    "solar_open": Family(_ROUTED),
    "step3p5": Family(_ROUTED, routes=_TYPED),
    "zaya": Family(zero=1),
}
MEGATRON = Family("num_moe_experts", "moe_router_topk", _megatron, layers="num_layers")

# Families with experts whose routing one spec cannot say; with the reason, for the message.
UNTOLD = {
    "jetmoe": "every layer has two routers, one for attention experts and one for MLP experts",
}


def numbers(config: Any, family: str, line: Family) -> dict[str, Any]:
    """The fields of a RoutingSpec, read from a config by a line of the table.

    Raises:
        SpecError: an attribute is absent, no integer, or differs from layer to layer.
    """
    num_layers = _integer(config, family, line.layers)
    experts, top_k = _integer(config, family, line.experts), _integer(config, family, line.top_k)
    zero = line.zero if isinstance(line.zero, int) else _integer(config, family, line.zero, absent=0)
    try:
        routes = tuple(i for i in range(num_layers) if line.routes(config, i))
        hashed = tuple(i for i in range(num_layers) if line.hashed(config, i))
    except (AttributeError, IndexError, TypeError, ZeroDivisionError) as error:
        raise SpecError(
            f"the {family} config does not say which of its {num_layers} layers route ({error})",
            remedy="write the spec by hand: RoutingSpec(num_layers=..., moe_layers=..., num_experts=..., top_k=...)",
        ) from None
    return {
        "num_layers": num_layers,
        "moe_layers": routes,
        "num_experts": experts + zero,
        "top_k": top_k,
        "model_type": family,
        "zero_experts": zero,
        "hash_layers": hashed,
    }


def _integer(config: Any, family: str, name: str, absent: int | None = None) -> int:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part, None)
    if isinstance(value, (list, tuple)) and value:
        if len(set(value)) > 1:
            raise SpecError(
                f"the layers of this {family} model route differently",
                expected=f"one {name} for all layers: a spec has one number of experts and one top-k",
                got=list(value),
            )
        value = value[0]
    if value is None and absent is not None:
        return absent
    if not isinstance(value, int):
        raise SpecError(
            f"the {family} config does not say how it routes",
            expected=f"an integer {name}",
            got=repr(value),
            remedy="check that this is the mixture-of-experts variant of the model",
        )
    return int(value)
