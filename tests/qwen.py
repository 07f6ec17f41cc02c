"""A tiny Qwen3-MoE model with random weights, and samples for it: what most tests of replay need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from helpers import random_sample
from torch import nn

from r3 import RolloutSample, RoutingSpec
from r3.replay import Replay
from r3.trainers.transformers import right_padded

CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    mlp_only_layers=[0],
)
SPEC = RoutingSpec.from_config(CONFIG)


def config(**changes: Any) -> transformers.Qwen3MoeConfig:
    """CONFIG with some values changed."""
    return transformers.Qwen3MoeConfig(**{**CONFIG.to_dict(), **changes})


def build(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM(config(**changes)).eval()


def samples_of(*lengths: int, seed: int = 5, spec: RoutingSpec = SPEC) -> list[RolloutSample]:
    """Random tokens with random routes."""
    rng = np.random.default_rng(seed)
    return [random_sample(rng, spec, n, sample_id=f"s{i}") for i, n in enumerate(lengths)]


def forward(model: nn.Module, samples: list[RolloutSample], replay: Replay | None = None) -> torch.Tensor:
    """Logits [batch, width, vocabulary] of a right-padded batch, replayed if there is a handle."""
    layout, input_ids, mask = right_padded(samples)
    if replay is None:
        return model(input_ids, attention_mask=mask, use_cache=False).logits
    with replay.micro_batch(samples, layout, input_ids):
        return model(input_ids, attention_mask=mask, use_cache=False).logits


def loss(model: nn.Module, samples: list[RolloutSample], replay: Replay | None = None) -> torch.Tensor:
    return forward(model, samples, replay).logsumexp(-1).square().mean()


def gradients(model: nn.Module) -> torch.Tensor:
    """All of them in one vector, and reset."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def recorded(model: nn.Module, samples: list[RolloutSample], replay: Replay) -> list[RolloutSample]:
    """The same samples with the routes that the model itself chooses."""
    layout, input_ids, mask = right_padded(samples)
    with torch.no_grad(), replay.record(layout) as recording:
        model(input_ids, attention_mask=mask, use_cache=False)
    return [replace(s, routes=r) for s, r in zip(samples, recording.routes(), strict=True)]
