"""diagnose: did replay close the gap between rollout and training? One rollout, scored three ways.

    live            the trainer's own routers choose
    replay          the recorded experts
    replay again    the same once more: what is left between two identical passes is the noise floor

Paired: the same sampled tokens, in the same batches, with the same weights. A comparison that would mean nothing is
refused: log-probs after truncation by top-p or top-k, weights other than those that sampled, routes of another model.
What was replayed is proved, not assumed: the ids that the experts received are compared with the shard's on every
recorded (token, layer).

This module is numpy; the trainer behind it is a `Scorer` (`r3.trainers.score` has the one for transformers).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from r3.errors import MetricError, ReplayError
from r3.metrics import (
    DIRECTION,
    Float,
    GapMetrics,
    RouteMismatch,
    bootstrap_interval,
    gap_metrics,
    k3_terms,
    log_ratio,
)
from r3.sample import RolloutSample
from r3.spec import RoutingSpec
from r3.store import ShardStore

LIVE, REPLAY, AGAIN = "live", "replay", "replay again"
FORWARDS = (LIVE, REPLAY, AGAIN)


@dataclass(frozen=True)
class Scored:
    """What one forward said of one sample of T tokens.

    Attributes:
        logprobs: [T] log p(token t | tokens before t); entry 0 is NaN.
        expert_ids: [L, T, K], the ids that the experts received.
    """

    logprobs: npt.NDArray[np.float32]
    expert_ids: npt.NDArray[Any]


class Scorer(Protocol):
    """A trainer that can score samples with its own routing or with theirs."""

    spec: RoutingSpec
    fingerprint: str

    def describe(self) -> dict[str, str]:
        """The stack, for the report: framework and versions, model, dtype, device."""
        ...

    def score(self, samples: Sequence[RolloutSample], *, replay: bool, temperature: float) -> list[Scored]:
        """One forward over the samples as one batch; log-probs of logits / temperature."""
        ...


@dataclass
class Diagnosis:
    """The result for one trainer: metrics of each forward, and what the numbers stand on.

    Attributes:
        trainer: The scorer's stack.
        label: Name of the rollout where a report has several.
        rollout: Engine, version, model, temperature, log-probs and weight versions that the shards name.
        gaps: Metrics of each forward in FORWARDS.
        mismatch: Routes of each forward against the rollout's, on recorded rows.
        noise: Mean |log-prob difference| of the sampled tokens between the two replays.
        k3_saved: Confidence interval (95 %, over sequences) of live minus replay k3.
        verified: (token, layer) pairs whose replayed ids were seen at the experts and equal the shard's.
        rows, recorded: Tokens of all samples, and those with a record.
    """

    trainer: dict[str, str]
    rollout: dict[str, Any]
    label: str = ""
    gaps: dict[str, GapMetrics] = field(default_factory=dict)
    mismatch: dict[str, RouteMismatch] = field(default_factory=dict)
    noise: float = float("nan")
    k3_saved: tuple[float, float] = (float("nan"), float("nan"))
    verified: int = 0
    rows: int = 0
    recorded: int = 0
    sequences: int = 0

    @property
    def coverage(self) -> float:
        """Recorded rows as a share of all rows. The last token of a sequence has none, so it is just below 1."""
        return self.recorded / max(self.rows, 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "direction": DIRECTION,
            "trainer": self.trainer,
            "rollout": self.rollout,
            "sequences": self.sequences,
            "rows": self.rows,
            "recorded_rows": self.recorded,
            "coverage": self.coverage,
            "verified_token_layers": self.verified,
            "forwards": {
                name: {**gap.to_dict(), "routes": self.mismatch[name].to_dict()} for name, gap in self.gaps.items()
            },
            "noise_mean_abs": self.noise,
            "k3_saved_by_replay_95ci": list(self.k3_saved),
        }


def diagnose(
    store: ShardStore,
    scorer: Scorer,
    *,
    label: str = "",
    batch_tokens: int = 8192,
    limit: int | None = None,
    allow_other_weights: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Score every sample of a store live, replayed and replayed again.

    Args:
        label: Name of this rollout in the report.
        batch_tokens: Positions (padding included) of one forward.
        limit: At most so many samples, in the order of their ids.
        allow_other_weights: Compare although the trainer's weights are not those that sampled; the gap then contains
            the difference of the weights.
        progress: Called with (samples done, samples in all).

    Raises:
        MetricError: nothing to compare, or what must not be compared.
        ReplayError: an expert received another id than the shard holds.
    """
    sample_ids = store.sample_ids()[:limit]
    if not sample_ids:
        steps = store.steps()
        raise MetricError(
            "no sample in this store",
            where=str(store.root),
            remedy=f"give one of its steps: {store.step(steps[-1]).root}"
            if steps
            else "collect some first: `r3 collect`",
        )
    rollout = _comparable([(i, store.metadata(i)) for i in sample_ids], scorer, allow_other_weights)
    result = Diagnosis(scorer.describe(), rollout, label)
    result.mismatch = {name: RouteMismatch(scorer.spec.num_moe_layers) for name in FORWARDS}
    ratios: dict[str, list[Float]] = {name: [] for name in FORWARDS}
    for batch in _batches(map(store.open, sample_ids), batch_tokens):
        for sample in batch:
            scorer.spec.require_same(sample.spec, f"sample {sample.sample_id!r}")
            result.rows += sample.num_tokens
            result.recorded += sample.routes.num_recorded
        for name in FORWARDS:
            temperature = rollout["temperature"] if rollout["logprobs_mode"] == "processed_logprobs" else 1.0
            scores = scorer.score(batch, replay=name != LIVE, temperature=temperature)
            for sample, scored in zip(batch, scores, strict=True):
                recorded = sample.routes.recorded
                if name != LIVE:
                    _require_replayed(sample, scored, scorer.spec)
                    result.verified += (name == REPLAY) * sample.routes.num_recorded * scorer.spec.num_moe_layers
                result.mismatch[name].add(scored.expert_ids[:, recorded], sample.routes.ids[:, recorded])
                used = sample.loss_mask & ~np.isnan(sample.rollout_logprobs)
                used[0] = False  # nothing predicts the first token
                if used.any():
                    where = f"sample {sample.sample_id!r}"
                    ratios[name].append(log_ratio(scored.logprobs[used], sample.rollout_logprobs[used], where))
        result.sequences += len(batch)
        if progress is not None:
            progress(result.sequences, len(sample_ids))
    if not ratios[LIVE]:
        raise MetricError(
            "no sampled token to compare", where=str(store.root), remedy="collect with log-probs, max_tokens above 0"
        )
    result.gaps = {name: gap_metrics(np.concatenate(parts)) for name, parts in ratios.items()}
    saved = [k3_terms(live) - k3_terms(replay) for live, replay in zip(ratios[LIVE], ratios[REPLAY], strict=True)]
    result.noise = float(np.abs(np.concatenate(ratios[AGAIN]) - np.concatenate(ratios[REPLAY])).mean())
    result.k3_saved = bootstrap_interval(saved)
    return result


def _require_replayed(sample: RolloutSample, scored: Scored, spec: RoutingSpec) -> None:
    # As sets: where experts are called one by one, the order of a token's choices is not seen.
    used, recorded = np.sort(scored.expert_ids, axis=-1), np.sort(sample.routes.ids, axis=-1)
    wrong = (used != recorded).any(axis=-1) & sample.routes.recorded
    if wrong.any():
        layer, token = (int(i) for i in np.argwhere(wrong)[0])
        raise ReplayError(
            f"{int(wrong.sum())} of {wrong.size} (token, layer) used other experts than the recorded ones",
            where=f"sample {sample.sample_id!r}, token {token}, layer {spec.moe_layers[layer]}",
            expected=sample.routes.ids[layer, token].tolist(),
            got=scored.expert_ids[layer, token].tolist(),
            remedy="this is a defect of the override for this model: do not train with it, and report it",
        )


def _batches(samples: Iterable[RolloutSample], batch_tokens: int) -> Iterator[list[RolloutSample]]:
    """Runs of samples whose right-padded batch has at most `batch_tokens` positions."""
    batch: list[RolloutSample] = []
    for sample in samples:
        width = max([sample.num_tokens, *(s.num_tokens for s in batch)])
        if batch and width * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def _comparable(
    samples: Sequence[tuple[str, dict[str, str]]], scorer: Scorer, allow_other_weights: bool
) -> dict[str, Any]:
    """What the shards say of the rollout, once for all of them.

    Raises:
        MetricError: samples of different rollouts, or log-probs that no trainer can reproduce.
    """
    first_id, first = samples[0]
    same = ("engine", "engine_version", "model", "model_fingerprint", "temperature", "top_p", "top_k", "logprobs_mode")
    for sample_id, metadata in samples:
        for name in same:
            if metadata[name] != first[name]:
                raise MetricError(
                    f"samples of different rollouts in one store: {name} differs",
                    where=f"samples {first_id!r} and {sample_id!r}",
                    expected=first[name],
                    got=metadata[name],
                    remedy="give each rollout a store of its own",
                )
    mode, temperature = first["logprobs_mode"], float(first["temperature"])
    truncated = float(first["top_p"]) < 1 or int(first["top_k"]) > 0
    if mode not in ("raw_logprobs", "processed_logprobs") and (truncated or temperature != 1):
        raise MetricError(
            "the shards do not say which log-probs they hold, and the sampling makes a difference",
            expected="logprobs_mode raw_logprobs or processed_logprobs",
            got=repr(mode),
            remedy="collect with the r3 collector, which finds out, or sample at temperature 1 without top-p and top-k",
        )
    if mode == "processed_logprobs" and truncated:
        raise MetricError(
            "these log-probs are renormalised over the tokens that top-p or top-k left: no trainer can reproduce them",
            expected="raw_logprobs, or top_p=1 and top_k=0",
            got=f"processed_logprobs with top_p={first['top_p']}, top_k={first['top_k']}",
            remedy="start the engine with --logprobs-mode raw_logprobs (vLLM's default)",
        )
    fingerprint = first["model_fingerprint"]
    known = bool(fingerprint and scorer.fingerprint)
    weights = "unknown" if not known else "same" if fingerprint == scorer.fingerprint else "other"
    if weights == "other" and not allow_other_weights:
        raise MetricError(
            "the trainer's weights are not the weights that sampled",
            expected=f"model fingerprint {fingerprint}",
            got=scorer.fingerprint,
            remedy="give the checkpoint that the engine served, or pass --allow-other-weights to measure staleness as well",
        )
    return {
        **{name: first[name] for name in ("engine", "engine_version", "model", "model_fingerprint", "logprobs_mode")},
        "temperature": temperature,
        "top_p": float(first["top_p"]),
        "top_k": int(first["top_k"]),
        "weights": weights,
    }
