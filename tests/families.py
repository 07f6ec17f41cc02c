"""Every MoE causal language model family of transformers, tiny: one config each, and the patterns that make layers dense.

Run as a program it writes the table of the installed transformers into docs/families.md; a test checks that it is current.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from r3 import RoutingSpec
from r3.errors import ReplayError
from r3.families import FAMILIES, UNTOLD
from r3.routers import find_routers, probe

# Twelve is no other size here: a matrix with twelve rows is a router.
NUM_EXPERTS, TOP_K, NUM_LAYERS = 12, 3, 4

# Applied where the family's config has such a setting.
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,  # latent attention repeats its keys otherwise
    "head_dim": 8,
    "max_position_embeddings": 128,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,  # one rotary size: some families take it from head_dim
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "routed_scaling_factor": 2.5,
    "route_scale": 1.5,
    "router_scaling_factor": 1.5,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "pad_token_id": 63,  # its embedding is zero, and the tests draw tokens below 60
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DENSE = ["dense", "sparse", "dense", "sparse"]
_STEPS: list[dict[str, Any]] = [{}, {"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}]
_FIRST: list[dict[str, Any]] = [
    {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    {"first_k_dense_replace": 3},
]
_TYPES: list[dict[str, Any]] = [{"mlp_layer_types": ["sparse"] * 4}, {"mlp_layer_types": _DENSE}]

# The layouts of routed and dense layers that each family has settings for; {} where it has none.
PATTERNS: dict[str, list[dict[str, Any]]] = {
    "afmoe": [{"num_dense_layers": 0}, {"num_dense_layers": 2}],
    "axk1": _FIRST,
    "axk2": _TYPES,
    "cohere2_moe": _TYPES,
    "deepseek_v2": [
        {"first_k_dense_replace": 0, "topk_method": "greedy"},
        {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy"},
    ],
    "deepseek_v3": _FIRST,
    "deepseek_v32": _TYPES,
    "deepseek_v4": [
        {"mlp_layer_types": ["moe"] * 4},
        {"mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"]},
    ],
    "dots1": _FIRST,
    "ernie4_5_moe": [
        {"moe_layer_start_index": 0},
        {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
        {"moe_layer_start_index": 0, "moe_layer_interval": 2},
    ],
    "ernie4_5_vl_moe_text": _TYPES,
    "exaone_moe": _TYPES,
    "glm4_moe": _FIRST,
    "glm4_moe_lite": _TYPES,
    "glm4v_moe_text": _FIRST,
    "glm5_next_text": _TYPES,
    "glm_moe_dsa": _TYPES,
    "hy_v3": _TYPES,
    "hy_v4": _TYPES,
    "inkling_text": _TYPES,
    "jamba": [{}, {"expert_layer_period": 3, "expert_layer_offset": 2}],
    "kimi_linear": _TYPES,
    "laguna": _TYPES,
    "lfm2_moe": [{"num_dense_layers": 1}, {"num_dense_layers": 2, "use_expert_bias": False}],
    "llama4_text": [{"interleave_moe_layer_step": 1}, {"interleave_moe_layer_step": 2}],
    "mellum": _TYPES,
    "mimo_v2_flash": _TYPES,
    "minimax_m3_vl_text": _TYPES,
    "mistral4": _FIRST,
    "nemotron_h": [
        {"layers_block_type": ["moe", "attention", "moe", "mlp"]},
        {"layers_block_type": ["mamba", "moe", "attention", "moe"]},
    ],
    "qwen2_moe": _STEPS,
    "qwen3_moe": _STEPS,
    "qwen3_next": _STEPS,
    "qwen3_omni_moe_text": _STEPS,
    "qwen3_vl_moe_text": _STEPS,
    "step3p5": _TYPES,
}

# What else a family needs to be tiny.
NEEDS: dict[str, dict[str, Any]] = {
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": NUM_LAYERS,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 32,
            "moe_num_experts": NUM_EXPERTS,
            "moe_top_k": TOP_K,
            "ffn_act_fn": {"name": "silu"},
        },
    },
    "doge": {"is_moe": True, "hidden_dropout": 0.0},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    },
    "gemma4_text": {"enable_moe_block": True, "global_head_dim": 8, "hidden_size_per_layer_input": 0},
    "glm4v_moe_text": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 1.0,
        }
    },
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "index_kpool": 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "indexer_types": ["full"] * 4,
    },
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "shared_intermediate_size": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "longcat_flash": {
        "num_layers": NUM_LAYERS,
        "zero_expert_num": 5,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
    },
    "mimo_v2_flash": {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 8, "v_head_dim": 16},
    "mistral4": {"head_dim": 16},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
        "ngram_vocab_size_base": 100,
    },
    "step3p5": {"sliding_window": 8, "share_expert_dim": 16, "num_sliding_attention_heads": 4},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "hidden_size": 32},
}

# Families whose text model transformers builds by a class of its own, most of them without a language model head.
CLASSES = {
    "ernie4_5_vl_moe_text": ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextConfig", "Ernie4_5_VLMoeTextModel"),
    "glm4v_moe_text": ("glm4v_moe", "Glm4vMoeTextConfig", "Glm4vMoeTextModel"),
    "glm5_next_text": ("glm5_next", "Glm5NextTextConfig", "Glm5NextTextModel"),
    "mistral4": ("mistral4", "Mistral4Config", "Mistral4ForCausalLM"),
    "qwen3_omni_moe_text": ("qwen3_omni_moe", "Qwen3OmniMoeTextConfig", "Qwen3OmniMoeThinkerTextModel"),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", "Qwen3VLMoeTextConfig", "Qwen3VLMoeTextModel"),
    "step3p5": ("step3p7", "Step3p7TextConfig", "Step3p7TextModel"),
}


def available() -> list[str]:
    """The families of the table that this transformers has."""
    return [family for family in FAMILIES if _config_class(family) is not None]


def _config_class(family: str) -> Any:
    if family not in CLASSES:
        known = family in transformers.CONFIG_MAPPING  # a dict whose `get` knows nothing
        return transformers.CONFIG_MAPPING[family] if known else None
    folder, config, _ = CLASSES[family]
    if importlib.util.find_spec(f"transformers.models.{folder}") is None:
        return None
    return getattr(importlib.import_module(f"transformers.models.{folder}.configuration_{folder}"), config)


def config(family: str, pattern: dict[str, Any]) -> Any:
    """A tiny config of a family, with twelve experts and top-3."""
    kind, line = _config_class(family), FAMILIES[family]
    defaults = kind()
    known = {*defaults.to_dict(), *getattr(kind, "attribute_map", ())}
    values = {name: value for name, value in TINY.items() if name in known}
    for name, value in ((line.experts, NUM_EXPERTS), (line.top_k, TOP_K)):
        if "." not in name:
            values[name] = value
    return kind(**{**values, **NEEDS.get(family, {}), **pattern})


def build(family: str, config: Any) -> nn.Module:
    """The model of a config, in evaluation mode, with router biases that are not zero."""
    torch.manual_seed(0)
    if family in CLASSES:
        folder, _, model = CLASSES[family]
        kind = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), model)
        built = kind(config).float()
    else:
        built = transformers.AutoModelForCausalLM.from_config(config).float()
    for module in built.modules():  # transformers 5.10 forgets it, and its group-limited router reads it
        if type(module).__name__ == "DeepseekV2Moe":
            module.num_experts = NUM_EXPERTS
    for name, tensor in (*built.named_parameters(), *built.named_buffers()):
        if name.endswith(("correction_bias", "expert_bias", "balancing_biases")):
            tensor.data.uniform_(-0.1, 0.1)
    return built.eval()


DOCS = Path(__file__).parent.parent / "docs" / "families.md"
MINOR = ".".join(transformers.__version__.split(".")[:2])


README = DOCS.parent.parent / "README.md"


def verdicts() -> dict[str, str]:
    """Each family of this transformers: `yes, ...` and where it makes its choice, or why it cannot be replayed."""
    rows = {family: f"no spec: {reason}" for family, reason in UNTOLD.items() if family in transformers.CONFIG_MAPPING}
    for family in available():
        tiny = config(family, PATTERNS.get(family, [{}])[-1])
        spec = RoutingSpec.from_config(tiny)
        try:
            layer, found = next(iter(find_routers(build(family, tiny), spec).items()))
            binding = probe(found, spec, layer, tiny.hidden_size)
        except ReplayError as refusal:
            rows[family] = f"refused: {refusal.what}"
            continue
        rows[family] = f"yes, in {'the router' if binding.module is found.gate else 'the block'} "
        rows[family] += f"`{type(binding.module).__name__}`"
    return dict(sorted(rows.items()))


def table(rows: dict[str, str]) -> str:
    """For docs/families.md."""
    replayed = sum(text.startswith("yes") for text in rows.values())
    return "\n".join(
        [
            f"{replayed} of {len(rows)} families are replayed.",
            "",
            "| family (`model_type` of the text config) | replay, and where the choice is made |",
            "|---|---|",
            *(f"| `{family}` | {text} |" for family, text in rows.items()),
        ]
    )


def summary(rows: dict[str, str]) -> str:
    """For the README."""
    replayed, refused = (
        [f"`{family}`" for family, text in rows.items() if text.startswith("yes") == yes] for yes in (True, False)
    )
    return "\n".join(
        [
            f"| transformers {MINOR} | families (`model_type` of the text config) |",
            "|---|---|",
            f"| replayed: {len(replayed)} | {', '.join(replayed)} |",
            f"| refused by name: {len(refused)} | {', '.join(refused)} |",
        ]
    )


def section(text: str) -> re.Match[str] | None:
    """The part of the document that is about the installed transformers."""
    return re.search(rf"(?<=## transformers {re.escape(MINOR)}\n\n).*?(?=\n\n## |\n*\Z)", text, re.DOTALL)


def readme_part(text: str) -> re.Match[str] | None:
    """The table in the README, if it is about the installed transformers."""
    return re.search(rf"\| transformers {re.escape(MINOR)} \|.*?(?=\n\n)", text, re.DOTALL)


if __name__ == "__main__":
    rows = verdicts()
    for path, part, new in ((DOCS, section, table(rows)), (README, readme_part, summary(rows))):
        text = path.read_text()
        found = part(text)
        if found is None:
            raise SystemExit(f"{path} says nothing of transformers {MINOR}")
        path.write_text(text[: found.start()] + new + text[found.end() :])
