"""A `Scorer` (r3.diagnose) on a transformers model: forwards without gradients, live or replayed, experts observed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from r3.diagnose import Scored
from r3.errors import ConfigError
from r3.fingerprint import model_fingerprint
from r3.sample import RolloutSample
from r3.spec import RoutingSpec
from r3.trainers.transformers import attach, observe, right_padded, token_logprobs


class TransformersScorer:
    """Load a causal language model and score samples with it.

    Args:
        path: Model directory.
        dtype: `bfloat16`, `float16` or `float32`: the trainer's forward.
        device: torch device; a GPU if there is one, else the CPU.

    Raises:
        SpecError: not a MoE model that r3 knows.
        ReplayError: its routers cannot be bound.
    """

    def __init__(self, path: str | os.PathLike[str], *, dtype: str = "bfloat16", device: str | None = None) -> None:
        if dtype not in ("bfloat16", "float16", "float32"):
            raise ConfigError(
                "unknown dtype of the trainer's forward", expected="bfloat16, float16 or float32", got=dtype
            )
        self.spec = RoutingSpec.from_config(path)
        self.fingerprint = model_fingerprint(path)
        self.path, self.dtype = str(path), dtype
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise ConfigError(f"transformers cannot load this model ({error})", where=self.path) from None
        self.model: Any = model.to(self.device).eval()
        self.replay = attach(self.model, self.spec, min_agreement=0)  # the report tells the agreement

    def describe(self) -> dict[str, str]:
        return {
            "framework": "transformers",
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "model": self.path,
            "dtype": self.dtype,
            "device": str(self.device),
        }

    @torch.no_grad()
    def score(self, samples: Sequence[RolloutSample], *, replay: bool, temperature: float = 1.0) -> list[Scored]:
        layout, input_ids, attention_mask = right_padded(samples)
        with observe(self.model, self.spec) as seen:
            if replay:
                with self.replay.micro_batch(samples, layout, input_ids):
                    logits = self._forward(input_ids, attention_mask)
            else:
                logits = self._forward(input_ids, attention_mask)
        logprobs = token_logprobs(logits / temperature, input_ids.to(self.device))
        ids = torch.stack([seen[layer] for layer in self.spec.moe_layers]).reshape(
            self.spec.num_moe_layers, *input_ids.shape, self.spec.top_k
        )
        expert_ids = ids.cpu().numpy().astype(self.spec.dtype)
        return [
            Scored(logprobs[i, : sample.num_tokens], expert_ids[:, i, : sample.num_tokens])
            for i, sample in enumerate(samples)
        ]

    def _forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids.to(self.device), attention_mask=attention_mask.to(self.device), use_cache=False)
        logits: torch.Tensor = output.logits
        return logits
