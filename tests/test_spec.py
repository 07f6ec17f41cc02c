"""RoutingSpec: every family that it knows is proved against the live model, and what it cannot tell it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import transformers

from r3 import RoutingSpec
from r3.errors import SpecError
from r3.spec import _FAMILIES

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
}
# What makes some layers dense, where the family has such a setting.
PATTERNS = {
    "deepseek_v2": [{"first_k_dense_replace": 0}, {"first_k_dense_replace": 2}],
    "deepseek_v3": [{"first_k_dense_replace": 0}, {"first_k_dense_replace": 3}],
    "glm4_moe": [{"first_k_dense_replace": 1}],
    "glm4_moe_lite": [{}, {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}],
    "qwen2_moe": [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}],
    "qwen3_moe": [{}, {"decoder_sparse_step": 2}, {"decoder_sparse_step": 2, "mlp_only_layers": [1]}],
    "qwen3_next": [{}, {"mlp_only_layers": [2]}],
}


@pytest.mark.parametrize(
    ("family", "pattern"), [(family, pattern) for family in _FAMILIES for pattern in PATTERNS.get(family, [{}])]
)
def test_spec_is_that_of_the_live_model(family: str, pattern: dict) -> None:
    experts, top_k, _ = _FAMILIES[family]
    kind = type(transformers.AutoConfig.for_model(family))
    defaults = kind()
    known = {name: value for name, value in TINY.items() if hasattr(defaults, name)}
    config = kind(**{**known, experts: 8, top_k: 2, **pattern})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with_experts = tuple(
        i
        for i, layer in enumerate(model.model.layers)
        if any(name.endswith("experts") for name, _ in layer.named_modules())
    )

    spec = RoutingSpec.from_config(config)

    assert spec == RoutingSpec(4, with_experts, 8, 2, family)
    assert pattern == {} or len(with_experts) < 4 or pattern == {"first_k_dense_replace": 0}


def test_config_object_dict_directory_and_file_agree(tmp_path) -> None:
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=6, num_experts=300, num_experts_per_tok=4, mlp_only_layers=[0]
    )
    config.save_pretrained(tmp_path)
    expected = RoutingSpec(6, (1, 2, 3, 4, 5), 300, 4, "qwen3_moe")
    sources = (config, config.to_dict(), tmp_path, str(tmp_path / "config.json"))
    assert [RoutingSpec.from_config(source) for source in sources] == [expected] * 4
    assert RoutingSpec.from_json(expected.to_json()) == expected
    assert (expected.dtype, expected.bytes_per_token) == ("uint16", 5 * 4 * 2)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (transformers.LlamaConfig(), "model family 'llama' is not known"),
        (transformers.Qwen3MoeConfig(mlp_only_layers=list(range(24))), "no decoder layer of this model routes"),
        ({"num_experts": 8}, "this config has no model_type"),
        ({"model_type": "no_such_model"}, "transformers makes no config of family 'no_such_model'"),
        ({"model_type": "qwen3_moe", "hidden_size": "wide"}, "transformers makes no config of family 'qwen3_moe'"),
        ("no/such/directory", "no config.json of a model here"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(source, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RoutingSpec.from_config(source)


@pytest.mark.parametrize(
    "values",
    [
        (4, (2, 1), 8, 2),
        (4, (1, 1), 8, 2),
        (4, (4,), 8, 2),
        (4, (-1,), 8, 2),
        (4, (), 8, 2),
        (4, (0,), 8, 9),
        (4, (0,), 8, 0),
    ],
)
def test_impossible_numbers_are_refused(values) -> None:
    with pytest.raises(SpecError):
        RoutingSpec(*values)


def test_damaged_json_is_refused() -> None:
    for text in ("", "[]", json.dumps({"num_layers": 2}), json.dumps({"num_layers": 2, "bogus": 1})):
        with pytest.raises(SpecError):
            RoutingSpec.from_json(text)


def test_importing_r3_is_light() -> None:
    code = "import sys, r3, r3.rollout, r3.trainers; print(sorted({'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
    code = "import sys; from r3 import *; print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
