"""RoutingSpec: which decoder layers of a model route, over how many experts, and how many each token takes.

Every check in r3 is against it: without it a payload of 48 layers cannot be told from one that lost a layer, and a dense
first layer shifts every MoE layer by one (the most expensive bug of the field: verl issue 5037, slime issue 810).

Contract: layers are *global decoder-layer indices* from 0, dense layers included in the count. Experts are *logical*
ids from 0, shared experts and expert-parallel placement excluded. A family whose pattern is not known is refused by
name; nothing is guessed. The names and patterns of the families are in `r3.families`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from r3.errors import SpecError, first_line
from r3.families import FAMILIES, MEGATRON, UNTOLD, numbers


@dataclass(frozen=True)
class RoutingSpec:
    """The routing of one model.

    Attributes:
        num_layers: Decoder layers in all, dense ones included, multi-token-prediction layers not.
        moe_layers: Global indices of the layers that have a router, ascending.
        num_experts: Experts that a router scores, E: the routed (logical) ones, then the zero-computation ones.
        top_k: Experts per token, K.
        model_type: The family's name, for messages.
        zero_experts: How many of the E experts, the last ones, compute nothing (LongCat's identity experts): ids
            E - zero_experts..E - 1. A trainer's own record has these ids. vLLM returns id 0 in their place, so an id 0 may
            repeat within a token there, and which zero expert was chosen, or whether it was expert 0, is lost.
        hash_layers: Decoder layers whose experts are looked up by token id (DeepSeek-V4). There is no choice to replay,
            so they are not in `moe_layers`; an engine may still return ids for them.

    Raises:
        SpecError: if the numbers cannot describe a model.
    """

    num_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    model_type: str = ""
    zero_experts: int = 0
    hash_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_layers", tuple(int(layer) for layer in self.moe_layers))
        object.__setattr__(self, "hash_layers", tuple(int(layer) for layer in self.hash_layers))
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
        both = set(layers) & set(self.hash_layers)
        if both or any(not 0 <= layer < self.num_layers for layer in self.hash_layers):
            raise SpecError(
                "hash_layers must be decoder layers that are not in moe_layers",
                expected=f"indices in 0..{self.num_layers - 1}",
                got=f"moe_layers={list(layers)}, hash_layers={list(self.hash_layers)}",
            )
        if not 0 <= self.zero_experts < self.num_experts:
            raise SpecError(
                "zero_experts must be some of the experts, not all of them",
                expected=f"0..{self.num_experts - 1}",
                got=self.zero_experts,
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
        """JSON of one line. Fields that few models have are left out where they are empty, so that older readers read it."""
        fields = asdict(self)
        for rare in ("zero_experts", "hash_layers"):
            if not fields[rare]:
                del fields[rare]
        return json.dumps(fields, separators=(",", ":"))

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
        """The spec of a model, from whatever configuration is at hand.

        Args:
            source: A transformers config object (a nested text config is found), its dict, or a model directory or
                `config.json`; vLLM's `ModelConfig` or `VllmConfig`; or Megatron-core's `TransformerConfig`. A dict or a
                path is read through transformers, whose defaults complete it.

        Raises:
            SpecError: if the family is dense, its layer pattern is not known here, or its layers differ from each other
                in experts or top-k.
        """
        config = _text_config(_load(source))
        if hasattr(config, "num_moe_experts") and hasattr(config, "moe_router_topk"):
            return cls(**numbers(config, "megatron", MEGATRON))
        family = family_of(config)
        if family not in FAMILIES:
            reason = f": {UNTOLD[family]}" if family in UNTOLD else ""
            raise SpecError(
                f"the routing of model family {family!r} is not known{reason}",
                expected=f"one of {', '.join(sorted(FAMILIES))}",
                remedy="write the spec by hand: RoutingSpec(num_layers=..., moe_layers=..., num_experts=..., top_k=...)",
            )
        return cls(**numbers(config, family, FAMILIES[family]))

    def require_same(self, other: RoutingSpec, where: str) -> None:
        """Raise unless `other` routes alike (the family's name may differ)."""
        if replace(self, model_type="") != replace(other, model_type=""):
            raise SpecError(
                "the routing differs from what is expected here", where=where, expected=self.brief(), got=other.brief()
            )

    def brief(self) -> str:
        """One line for messages: `8 of 8 layers route, top-4 of 32 experts (qwen3_moe)`."""
        name = f" ({self.model_type})" if self.model_type else ""
        zero = f", {self.zero_experts} of them zero-computation" if self.zero_experts else ""
        hashed = f", {len(self.hash_layers)} more by token id" if self.hash_layers else ""
        return (
            f"{self.num_moe_layers} of {self.num_layers} layers route{hashed}, "
            f"top-{self.top_k} of {self.num_experts} experts{zero}{name}"
        )


def family_of(config: Any) -> str:
    """The `model_type` of a config's text part, by which the families are known."""
    config = _text_config(config)
    return str(getattr(config, "model_type", type(config).__name__))


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
                f"transformers makes no config of family {family!r} from this ({first_line(error)})"
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
            f"transformers cannot read this model's config ({first_line(error)})", where=str(path)
        ) from None


def _text_config(config: Any) -> Any:
    config = getattr(config, "model_config", config)  # vLLM's VllmConfig
    config = getattr(config, "hf_text_config", config)  # vLLM's ModelConfig
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if callable(get) else config
