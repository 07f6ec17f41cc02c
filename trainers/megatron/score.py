"""A `Scorer` (r3.diagnose) on a Megatron-core model: forwards without gradients, live or replayed, experts observed.

One process, or all processes of a torchrun (then `parallel` says how the model is cut, every rank is given the same samples, and
every rank gets the whole answer).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import megatron.core
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from r3.diagnose.scoring import Scored, require_dtype
from r3.errors import ConfigError
from r3.fingerprint import model_fingerprint
from r3.sample import RolloutSample
from r3.spec import RoutingSpec
from r3.trainers.megatron import attach
from r3.trainers.megatron.batch import Form, LocalBatch, Placed, Rank
from r3.trainers.megatron.model import initialize, load_model
from r3.trainers.megatron.observe import observe


class MegatronScorer:
    """Load a Hugging Face Qwen3-MoE directory into Megatron-core and score samples with it.

    Args:
        path: Model directory.
        dtype: `bfloat16`, `float16` or `float32`: the trainer's forward.
        device: `cuda` or `cpu`; what is there if None.
        parallel: Sizes for `r3.trainers.megatron.model.initialize`, under torchrun.

    Raises:
        SpecError: not a MoE model that r3 knows.
        ConfigError: another family, dtype or device than can be scored here.
        ReplayError: its routers cannot be bound.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str = "bfloat16",
        device: str | None = None,
        parallel: dict[str, int] | None = None,
    ) -> None:
        require_dtype(dtype)
        there = "cuda" if torch.cuda.is_available() else "cpu"
        if device is not None and torch.device(device).type != there:
            raise ConfigError("Megatron-core runs on the GPU where there is one", expected=there, got=device)
        self.spec = RoutingSpec.from_config(path)
        self.fingerprint = model_fingerprint(path)
        self.path, self.dtype = str(path), dtype
        initialize(**(parallel or {}))
        self.chunks = load_model(path, dtype=getattr(torch, dtype))
        for chunk in self.chunks:
            chunk.eval()
        self.device = next(self.chunks[0].parameters()).device
        self.config = self.chunks[0].config
        self.rank = Rank.here(self.config.sequence_parallel)
        self.replay = attach(self.chunks, self.spec, min_agreement=0)  # the report tells the agreement

    def describe(self) -> dict[str, str]:
        sizes = {
            "TP": self.config.tensor_model_parallel_size,
            "PP": self.config.pipeline_model_parallel_size,
            "EP": self.config.expert_model_parallel_size,
            "CP": self.config.context_parallel_size,
        }
        return {
            "framework": "megatron-core",
            "megatron-core": megatron.core.__version__,
            "torch": torch.__version__,
            "model": self.path,
            "dtype": self.dtype,
            "device": str(self.device),
            "parallel": " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one process",
        }

    @torch.no_grad()
    def score(self, samples: Sequence[RolloutSample], *, replay: bool, temperature: float = 1.0) -> list[Scored]:
        placed = Form(packed=False, multiple=self.rank.multiple).place([s.num_tokens for s in samples], self.rank)
        batch = LocalBatch.build(samples, placed, self.device)
        with observe(self.chunks) as seen:
            logprobs = self._forward(batch, replay, temperature)
        total = sum(s.num_tokens for s in samples)
        parts: list[Any] = [self._by_token(placed, logprobs, seen)]
        if dist.get_world_size() > 1:
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, self._by_token(placed, logprobs, seen))
        every = np.full(total, np.nan, np.float32)
        ids = np.zeros((self.spec.num_moe_layers, total, self.spec.top_k), self.spec.dtype)
        for rows, values, by_layer in parts:
            every[rows] = values
            for layer, (layer_rows, chosen) in by_layer.items():
                ids[self.spec.moe_layers.index(layer), layer_rows] = chosen
        ends = np.cumsum([s.num_tokens for s in samples])
        return [
            Scored(every[end - s.num_tokens : end], ids[:, end - s.num_tokens : end])
            for s, end in zip(samples, ends, strict=True)
        ]

    def _forward(self, batch: LocalBatch, replay: bool, temperature: float) -> torch.Tensor | None:
        """log p of each label [b, s] float32 on a last pipeline stage, None on others."""

        def step(_: Any, chunk: Any) -> Any:
            def call() -> torch.Tensor:
                output: torch.Tensor = chunk(batch.tokens, batch.position_ids, None)
                return output

            if replay:
                with self.replay.micro_batch(chunk, batch.samples, batch.layout, batch.tokens):
                    output = call()
            else:
                output = call()
            return output, lambda logits: (
                logits.new_zeros(()),
                {"logprobs": label_logprobs(logits, batch.labels, temperature)},
            )

        lines, width = batch.tokens.shape
        interleaved = len(self.chunks) > 1
        kept = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[None] * len(self.chunks) if interleaved else None,
            model=self.chunks if interleaved else self.chunks[0],
            num_microbatches=self.config.pipeline_model_parallel_size if interleaved else 1,
            seq_length=width * self.rank.context_size,
            micro_batch_size=lines,
            forward_only=True,
        )
        return kept[0]["logprobs"] if kept else None

    def _by_token(self, placed: Placed, logprobs: torch.Tensor | None, seen: dict[int, torch.Tensor]) -> Any:
        """This rank's part of the answer, by row of the concatenated samples."""
        layout = placed.layout
        label_rows, values = np.zeros(0, np.int64), np.zeros(0, np.float32)
        if logprobs is not None:
            firsts = np.cumsum([0, *layout.lengths])
            labelled = (layout.rows >= 0) & ~np.isin(layout.rows + 1, firsts[1:])
            label_rows, values = layout.rows[labelled] + 1, logprobs.float().cpu().numpy().ravel()[labelled]
        rows = self.rank.router_rows(layout).rows
        held = rows >= 0
        return (
            label_rows,
            values,
            {layer: (rows[held], ids.cpu().numpy().astype(self.spec.dtype)[held]) for layer, ids in seen.items()},
        )


def label_logprobs(logits: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log p of each label [b, s] float32, from this TP rank's part of the vocabulary [b, s, V / TP]; differentiable.

    The division by `temperature` runs in float32: in bfloat16 it rounds the logits a second time.
    """
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        logits = gather_from_tensor_model_parallel_region(logits)
    return logits.float().div(temperature).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
