"""The gate weights of each family, written out from its paper or model card: an independent reference for the replay tests.

weights [n, K] = f(logits [n, E] float32 of the block's input, ids [n, K], config, gate). It uses no code of r3 or of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

Gate = Callable[[torch.Tensor, torch.Tensor, Any, torch.nn.Module], torch.Tensor]


def _gate(
    score: str,
    *,
    normed: bool | str = True,
    scale: str | None = None,
) -> Gate:
    """score of all experts -> gather at ids -> divide by their sum if `normed` (a flag's name, or always) -> scale."""
    scores: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda logits: logits.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrt_softplus": lambda logits: functional.softplus(logits).sqrt(),
    }

    def weights(logits: torch.Tensor, ids: torch.Tensor, config: Any, _gate: torch.nn.Module) -> torch.Tensor:
        chosen = scores[score](logits).gather(-1, ids)
        if getattr(config, normed) if isinstance(normed, str) else normed:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen * (getattr(config, scale) if scale else 1.0)

    return weights


def _softmax_of_chosen(logits: torch.Tensor, ids: torch.Tensor, _config: Any, _gate: torch.nn.Module) -> torch.Tensor:
    return logits.gather(-1, ids).softmax(-1)


def _gemma(logits: torch.Tensor, ids: torch.Tensor, _config: Any, gate: Any) -> torch.Tensor:
    chosen = logits.softmax(-1).gather(-1, ids)
    return chosen / chosen.sum(-1, keepdim=True) * gate.per_expert_scale[ids]


def _inkling(logits: torch.Tensor, ids: torch.Tensor, config: Any, gate: Any) -> torch.Tensor:
    """The shared experts take part in the normalisation; their logits are the last ones."""
    shared = config.n_shared_experts
    chosen = torch.cat([logits[:, :-shared].gather(-1, ids), logits[:, -shared:]], dim=-1).sigmoid()
    return (chosen / chosen.sum(-1, keepdim=True))[:, :-shared] * config.route_scale * gate.global_scale


_DEEPSEEK = _gate("sigmoid", normed="norm_topk_prob", scale="routed_scaling_factor")

GATES: dict[str, Gate] = {
    "afmoe": _gate("sigmoid", scale="route_scale"),
    "aria_text": _softmax_of_chosen,
    "cohere2_moe": _softmax_of_chosen,
    "deepseek_v2": _gate("softmax", normed=False, scale="routed_scaling_factor"),
    "deepseek_v4": _gate("sqrt_softplus", scale="routed_scaling_factor"),
    "gemma4_text": _gemma,
    "gpt_oss": _softmax_of_chosen,
    "granitemoe": _softmax_of_chosen,
    "granitemoe_swa": _softmax_of_chosen,
    "granitemoehybrid": _softmax_of_chosen,
    "granitemoeshared": _softmax_of_chosen,
    "hy_v3": _gate("sigmoid", scale="router_scaling_factor"),
    "inkling_text": _inkling,
    "jamba": _gate("softmax", normed=False),
    "laguna": _gate("sigmoid"),
    "llama4_text": _gate("sigmoid", normed=False),
    "longcat_flash": _gate("softmax", normed=False, scale="routed_scaling_factor"),
    "minimax_m2": _gate("sigmoid"),
    "minimax_m3_vl_text": _gate("sigmoid"),
    "mistral4": _gate("softmax", normed="norm_topk_prob", scale="routed_scaling_factor"),
    "step3p5": _gate("sigmoid"),
    **dict.fromkeys(("dbrx", "ernie4_5_moe", "hunyuan_v1_moe", "minimax", "mixtral"), _gate("softmax")),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_vl_moe_text"), _gate("softmax")),
    **dict.fromkeys(
        (
            "flex_olmo",
            "mellum",
            "olmoe",
            "qwen2_moe",
            "qwen3_moe",
            "qwen3_next",
            "qwen3_omni_moe_text",
            "qwen4_exp_text",
        ),
        _gate("softmax", normed="norm_topk_prob"),
    ),
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "exaone_moe",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe_text",
            "glm5_next_text",
            "glm_moe_dsa",
            "hy_v4",
            "lfm2_moe",
            "mimo_v2_flash",
            "nemotron_h",
            "solar_open",
        ),
        _DEEPSEEK,
    ),
    "kimi_linear": _gate("sigmoid", normed="moe_renormalize", scale="routed_scaling_factor"),
}
