"""Synthetic policies with known logits: a rollout engine that samples as told, and a trainer that scores, both in numpy.

A sample's logits [T, V] come from its id alone, so an engine and a trainer that never met agree on them. What differs is said:
the engine's rounding, the trainer's, and the tokens whose live routers choose other experts.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from helpers import SPEC

from r3 import Provenance, RolloutSample, Routes, ShardStore
from r3.diagnose import Scored
from r3.testing import random_rows

VOCABULARY = 40


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def logits_of(sample_id: str, num_tokens: int, weights: int = 0) -> np.ndarray:
    """[T, V]: row t predicts token t. Other `weights` are another policy, as far away as a few updates."""
    rng = np.random.default_rng(zlib.crc32(sample_id.encode()))
    logits = 2.0 * rng.normal(size=(num_tokens, VOCABULARY))
    if weights:
        logits += 0.3 * np.random.default_rng(weights).normal(size=(num_tokens, VOCABULARY))
    return logits


@dataclass
class Engine:
    """Samples with routes. `rounding` is the standard deviation of its error on a logit."""

    temperature: float = 1.0
    top_p: float = 1.0
    processed: bool = False
    rounding: float = 0.003
    weights: int = 0
    fingerprint: str = ""

    def sample(self, sample_id: str, num_tokens: int, *, prompt_length: int = 4, version: int = 3) -> RolloutSample:
        rng = np.random.default_rng(zlib.crc32(b"engine" + sample_id.encode()))
        logits = logits_of(sample_id, num_tokens, self.weights) + self.rounding * rng.normal(
            size=(num_tokens, VOCABULARY)
        )
        raw, processed = log_softmax(logits), self._processed(logits)
        drawn = np.array([rng.choice(VOCABULARY, p=np.exp(row)) for row in processed])
        logprobs = (processed if self.processed else raw)[np.arange(num_tokens), drawn]
        return RolloutSample.from_rollout(
            sample_id=sample_id,
            spec=SPEC,
            prompt_tokens=drawn[:prompt_length],
            response_tokens=drawn[prompt_length:],
            response_logprobs=logprobs[prompt_length:],
            routes=Routes.from_rows(random_rows(rng, SPEC, num_tokens - 1), num_tokens, SPEC),
            weight_version=version,
            provenance=Provenance(
                engine="synthetic",
                model_fingerprint=self.fingerprint,
                temperature=self.temperature,
                top_p=self.top_p,
                logprobs_mode="processed_logprobs" if self.processed else "raw_logprobs",
            ),
        )

    def _processed(self, logits: np.ndarray) -> np.ndarray:
        """Log-probs [T, V] after temperature and top-p, renormalised over what top-p left."""
        logprobs = log_softmax(logits / self.temperature)
        order = np.argsort(-logprobs, axis=-1)
        ranked = np.take_along_axis(np.exp(logprobs), order, axis=-1)
        kept = np.empty(logits.shape, bool)
        np.put_along_axis(kept, order, np.cumsum(ranked, axis=-1) - ranked < self.top_p, axis=-1)
        with np.errstate(divide="ignore"):
            return log_softmax(np.where(kept, logits, -np.inf) / self.temperature)

    def store(self, path: Path, count: int = 16, num_tokens: int = 40, **kwargs: Any) -> ShardStore:
        store = ShardStore(path, create=True)
        for i in range(count):
            store.add(self.sample(f"s{i:03d}", num_tokens, **kwargs))
        return store


@dataclass
class Trainer:
    """Scores with its own routing, of which a share `flips` of (token, layer) differs, or with the recorded one.

    A flipped row moves the logits that it gives by `flip_size`; `padding` adds ids that no rollout can sample; `shift` returns
    every log-prob so many tokens late.
    """

    rounding: float = 0.003
    flips: float = 0.02
    flip_size: float = 0.3
    noise: float = 0.0
    padding: int = 0
    shift: int = 0
    weights: int = 0
    dtype: str = "float64"
    fingerprint: str = ""
    spec = SPEC
    calls: int = 0

    def describe(self) -> dict[str, str]:
        return {"framework": "synthetic", "dtype": self.dtype, "device": "none", "model": "none"}

    def score(self, samples: Sequence[RolloutSample], *, replay: bool, temperature: float) -> list[Scored]:
        self.calls += 1
        return [self._one(sample, replay, temperature) for sample in samples]

    def _one(self, sample: RolloutSample, replay: bool, temperature: float) -> Scored:
        n = sample.num_tokens
        rng = np.random.default_rng(zlib.crc32(f"{self.dtype}{sample.sample_id}".encode()))
        logits = logits_of(sample.sample_id, n, self.weights) + self.rounding * rng.normal(size=(n, VOCABULARY))
        flipped = rng.random((SPEC.num_moe_layers, n)) < self.flips
        moved = self.flip_size * rng.normal(size=(n, VOCABULARY))
        ids = sample.routes.ids.copy()
        live = ~sample.routes.recorded if replay else np.ones(n, bool)
        flipped &= live
        for layer, row in np.argwhere(flipped):
            ids[layer, row, 0] = next(e for e in range(SPEC.num_experts) if e not in ids[layer, row])
        logits[1:] += np.where(flipped.any(axis=0)[:-1, None], moved[1:], 0)
        if self.noise:
            logits += self.noise * np.random.default_rng(self.calls).normal(size=logits.shape)
        if self.padding:
            logits = np.concatenate([logits, np.zeros((n, self.padding))], axis=1)
        logprobs = log_softmax(logits / temperature)
        own = np.roll(logprobs[np.arange(n), sample.tokens], self.shift)
        own[0] = np.nan
        mass = np.exp(logprobs[:, VOCABULARY:]).sum(axis=1) if self.padding else None
        return Scored(own.astype(np.float32), ids, None if mass is None else mass.astype(np.float32))
