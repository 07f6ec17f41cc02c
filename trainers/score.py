"""Scorers for `r3.diagnose`: forwards without gradients, live or replayed, with the experts' ids observed.

`load_scorer` picks one by name: `transformers` (here) or `megatron` (`r3.trainers.megatron.score`, imported when asked for).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from r3.checkpoint import require_whole
from r3.diagnose.scoring import Scored, Scorer, require_dtype
from r3.errors import ConfigError
from r3.fingerprint import model_fingerprint
from r3.routers import find_routers
from r3.sample import RolloutSample
from r3.spec import RoutingSpec
from r3.trainers.transformers import attach, observe, right_padded, token_logprobs

BACKENDS = ("transformers", "megatron")


def load_scorer(
    backend: str,
    path: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    device: str | None = None,
    router_scores: bool = False,
) -> Scorer:
    """The scorer of a backend.

    Args:
        backend: Of BACKENDS.
        path, dtype, device, router_scores: As for `TransformersScorer`; Megatron's scorer gives no router scores.

    Raises:
        ConfigError: another backend, or its framework is not installed.
    """
    if backend == "transformers":
        return TransformersScorer(path, dtype=dtype, device=device, router_scores=router_scores)
    if backend != "megatron":
        raise ConfigError("no such backend", expected=list(BACKENDS), got=backend)
    if importlib.util.find_spec("megatron") is None:
        raise ConfigError("megatron-core is not installed", remedy='pip install "r3-replay[megatron]"')
    from r3.trainers.megatron.score import MegatronScorer

    return MegatronScorer(path, dtype=dtype, device=device)


class TransformersScorer:
    """Load a causal language model and score samples with it.

    Args:
        path: Model directory.
        dtype: `bfloat16`, `float16` or `float32`: the trainer's forward.
        device: torch device; a GPU if there is one, else the CPU.
        router_scores: Also give the routers' log-softmax (`Scored.router_logprobs`), 4 bytes per layer, token and expert; of
            routers that are one linear map of their input, which is what `weight` [E, hidden] says.

    Raises:
        SpecError: not a MoE model that r3 knows.
        ReplayError: its routers cannot be bound.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str = "bfloat16",
        device: str | None = None,
        router_scores: bool = False,
    ) -> None:
        require_dtype(dtype)
        self.spec = RoutingSpec.from_config(path)
        self.fingerprint = model_fingerprint(path)
        self.path, self.dtype, self.router_scores = str(path), dtype, router_scores
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            model, keys = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"transformers cannot load this model ({error})", where=self.path) from None
        require_whole(keys, self.path, ConfigError)
        self.model: Any = model.to(self.device).eval()
        self.vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
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
        with observe(self.model, self.spec) as seen, self._routers() as routers:
            if replay:
                with self.replay.micro_batch(samples, layout, input_ids):
                    logits = self._forward(input_ids, attention_mask)
            else:
                logits = self._forward(input_ids, attention_mask)
        logprobs = token_logprobs(logits, input_ids.to(self.device), temperature=temperature)
        mass = padding_mass(logits, self.vocabulary, temperature) if logits.shape[-1] > self.vocabulary else None
        ids = torch.stack([seen[layer] for layer in self.spec.moe_layers]).reshape(
            self.spec.num_moe_layers, *input_ids.shape, self.spec.top_k
        )
        expert_ids = ids.cpu().numpy().astype(self.spec.dtype)
        scores = None
        if routers and len(routers) == self.spec.num_moe_layers:
            stacked = np.stack([routers[layer] for layer in self.spec.moe_layers])
            scores = stacked.reshape(self.spec.num_moe_layers, *input_ids.shape, self.spec.num_experts)
        return [
            Scored(
                logprobs[i, : sample.num_tokens],
                expert_ids[:, i, : sample.num_tokens],
                None if mass is None else mass[i, : sample.num_tokens],
                None if scores is None else scores[:, i, : sample.num_tokens],
            )
            for i, sample in enumerate(samples)
        ]

    @contextlib.contextmanager
    def _routers(self) -> Iterator[dict[int, npt.NDArray[np.float32]]]:
        """Collect each router's log-softmax [n, E], computed from its input and weight: families return logits, probabilities or
        neither."""
        seen: dict[int, npt.NDArray[np.float32]] = {}
        handles = []
        for layer, found in find_routers(self.model, self.spec).items() if self.router_scores else ():
            weight = getattr(found.gate, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[0] == self.spec.num_experts:
                hook = functools.partial(_see_router, seen, layer, weight)
                handles.append(found.gate.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids.to(self.device), attention_mask=attention_mask.to(self.device), use_cache=False)
        logits: torch.Tensor = output.logits
        return logits


def _see_router(
    seen: dict[int, npt.NDArray[np.float32]],
    layer: int,
    weight: torch.Tensor,
    _module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    hidden: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    logits = hidden.reshape(-1, weight.shape[1]).float() @ weight.float().T
    seen[layer] = logits.log_softmax(-1).cpu().numpy()


def padding_mass(
    logits: torch.Tensor, vocabulary: int, temperature: float = 1.0, *, chunk: int = 1024
) -> npt.NDArray[np.float32]:
    """Probability of ids from `vocabulary` on, for the token at each position [batch, width] (NaN at position 0), from logits
    [batch, width, > vocabulary]. Padding rows of a trainer's output layer are ids that no rollout can sample."""
    batch, width, size = logits.shape
    flat = logits[:, :-1].reshape(-1, size)
    parts = [
        flat[i : i + chunk].float().div(temperature).softmax(-1)[:, vocabulary:].sum(-1)
        for i in range(0, flat.shape[0], chunk)
    ]
    out = torch.full((batch, width), float("nan"), dtype=torch.float32)
    if parts:
        out[:, 1:] = torch.cat(parts).reshape(batch, width - 1).cpu()
    return out.numpy()
