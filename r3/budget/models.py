"""Models that a run can be sized for: what their routers cost, by name or from a config on disk.

A preset holds what decides the bytes: decoder layers (an engine returns them all), MoE layers (a shard holds these), experts
(one byte an id up to 256, else two), top-k, and the vocabulary (bytes of a token id). Each names its source; tests hold those
that transformers knows against the defaults of its config classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from r3.errors import ConfigError
from r3.spec import RoutingSpec


@dataclass(frozen=True)
class Model:
    """What decides the size of a model's routes.

    Attributes:
        name: For tables.
        spec: Its routing.
        vocabulary: Token ids are below it.
        source: Where the numbers are from.
    """

    name: str
    spec: RoutingSpec
    vocabulary: int
    source: str


def _preset(
    name: str, layers: int, dense: int, experts: int, top_k: int, vocabulary: int, family: str, source: str
) -> Model:
    return Model(name, RoutingSpec(layers, tuple(range(dense, layers)), experts, top_k, family), vocabulary, source)


_ARGUMENTS = "model arguments of slime and miles, scripts/models/{}.sh"
_TRANSFORMERS = "defaults of transformers' {}"

PRESETS = {
    model.name: model
    for model in (
        _preset("qwen3-30b-a3b", 48, 0, 128, 8, 151936, "qwen3_moe", _ARGUMENTS.format("qwen3-30B-A3B")),
        _preset("qwen3-235b-a22b", 94, 0, 128, 8, 151936, "qwen3_moe", _ARGUMENTS.format("qwen3-235B-A22B")),
        _preset("glm-4.5-air", 46, 1, 128, 8, 151552, "glm4_moe", _TRANSFORMERS.format("Glm4MoeConfig")),
        _preset("glm-4.5", 92, 3, 160, 8, 151552, "glm4_moe", _ARGUMENTS.format("glm4.5-355B-A32B")),
        _preset("gpt-oss-120b", 36, 0, 128, 4, 201088, "gpt_oss", _TRANSFORMERS.format("GptOssConfig")),
        _preset("deepseek-v3", 61, 3, 256, 8, 129280, "deepseek_v3", _TRANSFORMERS.format("DeepseekV3Config")),
        _preset("kimi-k2", 61, 1, 384, 8, 163840, "kimi_k2", _ARGUMENTS.format("kimi-k2")),
    )
}


def model_of(name: str) -> Model:
    """A preset by its name, or the model of a directory or `config.json`.

    Raises:
        ConfigError: neither a preset nor a path.
        SpecError: a config whose routing cannot be told.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"no such model: {name!r}",
            expected=f"a model directory, its config.json, or one of {', '.join(PRESETS)}",
            remedy="for another model give its config.json; nothing is downloaded here",
        )
    from transformers import AutoConfig

    spec = RoutingSpec.from_config(path)
    config = AutoConfig.from_pretrained(path)
    config = config.get_text_config(decoder=True)
    return Model(path.name if path.is_dir() else path.parent.name, spec, int(config.vocab_size), str(path))
