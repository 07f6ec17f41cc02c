"""A real Qwen3-MoE whose routing says which token it is: row (layer, k) is a digit of the token's id and of its position.

So a captured row can be read back: whose token it is follows from the row alone, exactly, whatever the numbers of the batch were.
Attention, cache and sampling are the model's own and random.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from torch import nn

VOCABULARY = 4096
CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    intermediate_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=128,
    num_experts_per_tok=4,
    max_position_embeddings=512,
    eos_token_id=None,
    pad_token_id=None,
    bos_token_id=None,
)


def rows_of(tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[n, 2 layers, 4]: eight digits of 5 bits, each 32 above the one before in its layer, so that all differ.

    21 bits are token and position themselves; the rest mixes them, so that every layer depends on both.
    """
    value = (tokens * 512 + positions) | ((tokens * 40503 + positions * 30103) % 2**16) << 21
    digits = (value[:, None] >> (5 * np.arange(8))) & 31
    return digits.reshape(-1, 2, 4) + 32 * np.arange(4)


class OracleRouter(nn.Module):
    """Stands where a router stands, and is a capture source of its own."""

    def __init__(self, layer_id: int, seen: dict[str, Any]) -> None:
        super().__init__()
        self.layer_id, self.capture_fn, self.seen = layer_id, None, seen

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, positions = (self.seen[name].reshape(-1).long().numpy() for name in ("input_ids", "position_ids"))
        rows = rows_of(tokens, positions)
        ids = torch.from_numpy(rows[:, self.layer_id])
        if self.capture_fn is not None:
            self.capture_fn(ids)
        weights = torch.full(ids.shape, 0.25, dtype=hidden.dtype)
        return torch.zeros(len(ids), CONFIG.num_experts), weights, ids


def build(**changes: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**CONFIG.to_dict(), **changes})).eval()
    seen: dict[str, Any] = {}

    def note(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        seen.update(input_ids=kwargs["input_ids"], position_ids=kwargs["position_ids"])

    model.register_forward_pre_hook(note, with_kwargs=True)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate = OracleRouter(index, seen)
    return model
