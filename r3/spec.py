"""RoutingSpec: which decoder layers of a model route, over how many experts, and how many each token takes.

Every check in r3 is against it: without it a payload of 48 layers cannot be told from one that lost a layer, and a dense
first layer shifts every MoE layer by one (the most expensive bug of the field: verl issue 5037, slime issue 810).

Contract: layers are *global decoder-layer indices* from 0, dense layers included in the count. Experts are *logical*
ids from 0, shared experts and expert-parallel placement excluded. A family whose pattern is not known is refused by
name; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from r3.errors import SpecError


@dataclass(frozen=True)
class RoutingSpec:
    """The routing of one model.

    Attributes:
        num_layers: Decoder layers in all, dense ones included, multi-token-prediction layers not.
        moe_layers: Global indices of the layers that have a router, ascending.
        num_experts: Routed (logical) experts per MoE layer, E.
        top_k: Experts per token, K.
        model_type: The family's name, for messages.

    Raises:
        SpecError: if the numbers cannot describe a model.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    model_type: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_layers", tuple(int(layer) for layer in self.moe_layers))
        layers = self.moe_layers
        if not layers:
            raise SpecError(
                "no decoder layer of this model routes: there is nothing to replay",
                where=self.model_type or None,
                remedy="check that this is the mixture-of-experts variant of the model",
            )
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_layers:
            raise SpecError(
                "moe_layers must be ascending, distinct decoder-layer indices",
                expected=f"indices in 0..{self.num_layers - 1}",
                got=list(layers),
            )
        if not 1 <= self.top_k <= self.num_experts <= 65536:
            raise SpecError(
                "top_k and num_experts do not describe a router",
                expected="1 <= top_k <= num_experts <= 65536",
                got=f"top_k={self.top_k}, num_experts={self.num_experts}",
            )

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest dtype that holds an expert id: uint8 up to 256 experts, else uint16."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def bytes_per_token(self) -> int:
        return self.num_moe_layers * self.top_k * self.dtype.itemsize

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RoutingSpec:
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise SpecError(
                f"not a routing spec ({error})", expected="the JSON of RoutingSpec.to_json", got=text[:200]
            ) from None

    @classmethod
    def from_config(cls, source: Any) -> RoutingSpec:
        """The spec of a transformers model.

        Args:
            source: A transformers config object (a nested text config is found), its dict, or a model directory or
                `config.json`. A dict or a path is read through transformers, whose defaults complete it.

        Raises:
            SpecError: if the family is dense or its layer pattern is not known here.
        """
        config = _text_config(_load(source))
        family = str(getattr(config, "model_type", type(config).__name__))
        if family not in _FAMILIES:
            raise SpecError(
                f"the routing of model family {family!r} is not known",
                expected=f"one of {', '.join(sorted(_FAMILIES))}",
                remedy="write the spec by hand: RoutingSpec(num_layers=..., moe_layers=..., num_experts=..., top_k=...)",
            )
        num_experts, top_k, routes = _FAMILIES[family]
        experts, k = getattr(config, num_experts, None), getattr(config, top_k, None)
        if not isinstance(experts, int) or not isinstance(k, int):
            raise SpecError(
                f"the {family} config does not say how it routes",
                expected=f"integers {num_experts} and {top_k}",
                got=f"{num_experts}={experts!r}, {top_k}={k!r}",
                remedy="check that this is the mixture-of-experts variant of the model",
            )
        num_layers = int(config.num_hidden_layers)
        moe_layers = tuple(i for i in range(num_layers) if routes(config, i))
        return cls(num_layers, moe_layers, experts, k, family)

    def require_same(self, other: RoutingSpec, where: str) -> None:
        """Raise unless `other` routes alike (the family's name may differ)."""
        mine, theirs = ((s.num_layers, s.moe_layers, s.num_experts, s.top_k) for s in (self, other))
        if mine != theirs:
            raise SpecError(
                "the routing differs from what is expected here", where=where, expected=self.brief(), got=other.brief()
            )

    def brief(self) -> str:
        """One line for messages: `8 of 8 layers route, top-4 of 32 experts (qwen3_moe)`."""
        name = f" ({self.model_type})" if self.model_type else ""
        return f"{self.num_moe_layers} of {self.num_layers} layers route, top-{self.top_k} of {self.num_experts} experts{name}"


def _load(source: Any) -> Any:
    if not isinstance(source, (str, Path, Mapping)):
        return source
    try:
        from transformers import AutoConfig
    except ImportError:
        raise SpecError(
            "reading a model's config needs transformers, which is not installed",
            remedy='pip install "r3-replay[hf]", or write the RoutingSpec by hand',
        ) from None
    if isinstance(source, Mapping):
        values = dict(source)
        family = values.pop("model_type", None)
        if family is None:
            raise SpecError("this config has no model_type", got=sorted(values)[:20])
        try:
            return AutoConfig.for_model(family, **values)
        except Exception as error:  # unknown family, or its own validation in one of several exception types
            raise SpecError(
                f"transformers makes no config of family {family!r} from this ({_first_line(error)})"
            ) from None
    path = Path(source)
    if not (path / "config.json" if path.is_dir() else path).is_file():
        raise SpecError(
            "no config.json of a model here", where=str(path), remedy="give a model directory or its config.json"
        )
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"transformers cannot read this model's config ({_first_line(error)})", where=str(path)
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _text_config(config: Any) -> Any:
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if callable(get) else config


def _every_layer(_config: Any, _layer: int) -> bool:
    return True


def _sparse_step(config: Any, layer: int) -> bool:
    return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0


def _dense_first(config: Any, layer: int) -> bool:
    return bool(layer >= config.first_k_dense_replace)


def _mlp_layer_types(config: Any, layer: int) -> bool:
    return bool(config.mlp_layer_types[layer] == "sparse")


# family: (attribute of the expert count, attribute of top-k, does decoder layer i route?)
# Each line is proved against the live model in tests/test_spec.py; a family without that proof does not stand here.
_FAMILIES: dict[str, tuple[str, str, Callable[[Any, int], bool]]] = {
    "deepseek_v2": ("n_routed_experts", "num_experts_per_tok", _dense_first),
    "deepseek_v3": ("n_routed_experts", "num_experts_per_tok", _dense_first),
    "flex_olmo": ("num_experts", "num_experts_per_tok", _every_layer),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok", _dense_first),
    "glm4_moe_lite": ("n_routed_experts", "num_experts_per_tok", _mlp_layer_types),
    "gpt_oss": ("num_local_experts", "num_experts_per_tok", _every_layer),
    "minimax_m2": ("num_local_experts", "num_experts_per_tok", _every_layer),
    "mixtral": ("num_local_experts", "num_experts_per_tok", _every_layer),
    "olmoe": ("num_experts", "num_experts_per_tok", _every_layer),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", _sparse_step),
    "qwen3_moe": ("num_experts", "num_experts_per_tok", _sparse_step),
    "qwen3_next": ("num_experts", "num_experts_per_tok", _sparse_step),
}
