"""RoutingSpec: every family that it knows is proved against the live model, and what it cannot tell it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import families
import pytest
import transformers

from r3 import RoutingSpec
from r3.errors import SpecError

PATTERNS = [(family, pattern) for family in families.available() for pattern in families.PATTERNS.get(family, [{}])]


@pytest.mark.parametrize(("family", "pattern"), PATTERNS)
def test_spec_is_that_of_the_live_model(family: str, pattern: dict) -> None:
    """The layers of the model are walked: a matrix with one row for each expert is a router, a table by token id is none."""
    config = families.config(family, pattern)
    spec = RoutingSpec.from_config(config)
    model = families.build(family, config)
    decoders = [
        layers
        for name, layers in model.named_modules()
        if name.rpartition(".")[2] in ("layers", "blocks") and len(layers) == families.NUM_LAYERS
    ]
    assert len(decoders) == 1

    # Inkling's router scores its shared experts too, to normalise with them.
    rows = spec.num_experts + (config.n_shared_experts if family == "inkling_text" else 0)

    def has(layer, kind) -> bool:
        return any(kind(name, tensor) for name, tensor in (*layer.named_parameters(), *layer.named_buffers()))

    routed = [i for i, m in enumerate(decoders[0]) if has(m, lambda _, p: p.dim() == 2 and len(p) == rows)]
    hashed = [i for i, m in enumerate(decoders[0]) if has(m, lambda name, _: name.endswith("tid2eid"))]

    assert spec.num_layers == families.NUM_LAYERS
    assert list(spec.moe_layers) == [i for i in routed if i not in hashed]
    assert list(spec.hash_layers) == hashed
    assert spec.num_experts - spec.zero_experts == families.NUM_EXPERTS
    assert spec.zero_experts == {"longcat_flash": 5, "zaya": 1}.get(family, 0)
    assert spec.top_k == (1 if family == "zaya" else families.TOP_K)
    assert spec.model_type == family
    assert RoutingSpec.from_json(spec.to_json()) == spec


def test_the_patterns_make_some_layers_dense() -> None:
    """Where a family has a setting for it, the test above must see it: else a rule that always says yes would pass."""
    for family in families.available():
        patterns = families.PATTERNS.get(family, [])
        seen = {RoutingSpec.from_config(families.config(family, pattern)).moe_layers for pattern in patterns}
        assert len(seen) == len(patterns), family


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"zero_experts": 8}, "zero_experts must be some of the experts"),
        ({"zero_experts": -1}, "zero_experts must be some of the experts"),
        ({"hash_layers": (0,)}, "hash_layers must be decoder layers that are not in moe_layers"),
        ({"hash_layers": (4,)}, "hash_layers must be decoder layers that are not in moe_layers"),
    ],
)
def test_impossible_rare_fields_are_refused(values, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        RoutingSpec(4, (0, 1), 8, 2, **values)


def test_rare_fields_are_written_only_where_they_say_something() -> None:
    """Shards of most models stay readable to a reader that does not know these fields."""
    plain = RoutingSpec(2, (0, 1), 8, 2, "mixtral")
    assert json.loads(plain.to_json()).keys() == {"num_layers", "moe_layers", "num_experts", "top_k", "model_type"}
    rare = RoutingSpec(3, (1, 2), 8, 2, "x", zero_experts=2, hash_layers=(0,))
    assert RoutingSpec.from_json(rare.to_json()) == rare
    assert rare.brief() == (
        "2 of 3 layers route, 1 more by token id, top-2 of 8 experts, 2 of them zero-computation (x)"
    )
    with pytest.raises(SpecError, match="the routing differs"):
        rare.require_same(RoutingSpec(3, (1, 2), 8, 2, "x", hash_layers=(0,)), "here")
    rare.require_same(RoutingSpec(3, (1, 2), 8, 2, "y", zero_experts=2, hash_layers=(0,)), "here")


@pytest.mark.parametrize(
    ("freq", "moe_layers"),
    [(1, (0, 1, 2, 3, 4, 5)), (2, (0, 2, 4)), (3, (0, 3)), ([0, 1, 1, 0, 1, 1], (1, 2, 4, 5))],
)
def test_megatron_config(freq, moe_layers) -> None:
    """The layers of the block spec that Megatron builds from the same configuration hold a MoE layer where ours says."""
    from megatron.core.models.gpt import gpt_layer_specs as layer_specs
    from megatron.core.transformer import transformer_config as config_module

    config = config_module.TransformerConfig(
        num_layers=6,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_layer_freq=freq,
        moe_ffn_hidden_size=16,
        add_bias_linear=False,
    )
    spec = RoutingSpec.from_config(config)
    assert spec == RoutingSpec(6, moe_layers, 8, 2, "megatron")
    block = layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, pp_rank=0)
    built = [i for i, layer in enumerate(block.layer_specs) if "MoE" in str(layer.submodules.mlp.module)]
    assert tuple(built) == moe_layers


def test_dense_megatron_config_is_refused() -> None:
    dense = SimpleNamespace(num_layers=2, num_moe_experts=None, moe_router_topk=2, moe_layer_freq=1)
    with pytest.raises(SpecError, match="the megatron config does not say how it routes"):
        RoutingSpec.from_config(dense)
    ragged = SimpleNamespace(num_layers=3, num_moe_experts=8, moe_router_topk=2, moe_layer_freq=[1, 1])
    with pytest.raises(SpecError, match="does not say which of its 3 layers route"):
        RoutingSpec.from_config(ragged)


def test_vllm_config() -> None:
    """vLLM's ModelConfig and VllmConfig carry the transformers config, nested ones included."""
    text = transformers.Qwen3MoeConfig(num_hidden_layers=3, num_experts=8, num_experts_per_tok=2)
    model_config = SimpleNamespace(hf_config=SimpleNamespace(text_config=text), hf_text_config=text)
    for source in (model_config, SimpleNamespace(model_config=model_config)):
        assert RoutingSpec.from_config(source) == RoutingSpec(3, (0, 1, 2), 8, 2, "qwen3_moe")


def test_layers_that_differ_are_refused_and_equal_lists_are_one_number() -> None:
    values = {"num_hidden_layers": 2, "moe_topk": [2, 2], "num_experts": 8}
    config = transformers.CONFIG_MAPPING["hunyuan_v1_moe"](**values)
    assert RoutingSpec.from_config(config) == RoutingSpec(2, (0, 1), 8, 2, "hunyuan_v1_moe")
    config.moe_topk = [2, 4]
    with pytest.raises(SpecError, match="the layers of this hunyuan_v1_moe model route differently"):
        RoutingSpec.from_config(config)


def test_nested_text_configs_are_found() -> None:
    text = {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}
    config = transformers.CONFIG_MAPPING["qwen3_vl_moe"](text_config=text)
    assert RoutingSpec.from_config(config) == RoutingSpec(2, (0, 1), 8, 2, "qwen3_vl_moe_text")
    assert RoutingSpec.from_config(config.to_dict()) == RoutingSpec.from_config(config)


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
