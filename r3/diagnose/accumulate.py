"""Accumulate a diagnosis sequence by sequence, in memory that does not grow with the number of tokens.

What goes in is a `ScoredSequence`: the rollout's log-probs of the compared tokens and those of every forward, paired by
construction. It may come from models (`r3.diagnose.run`) or from files (`r3.diagnose.dumped`). Accumulators of several
ranks merge.

n compared tokens of a sequence of T; S sequences; P buckets of probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from r3.diagnose.offsets import OffsetCorrelation
from r3.diagnose.result import AGAIN, COMPARED, HEADLINE, LIVE, REPLAY, Comparison, Diagnosis, Forward
from r3.metrics import (
    Bootstrap,
    Estimate,
    Float,
    GapAccumulator,
    RouteMismatch,
    TopToken,
    TopTokens,
    log_ratio,
)
from r3.metrics.bootstrap import MIN_SEQUENCES, bca, resampled_sums
from r3.metrics.buckets import (
    LAYER_EDGES,
    POSITION_EDGES,
    PROBABILITY_EDGES,
    Buckets,
    ByVersion,
    bucket_of,
    token_terms,
)
from r3.metrics.toptokens import CONTEXT

_STRATA = len(PROBABILITY_EDGES)
_TAUS = np.geomspace(1.01, 100, 60)


@dataclass(frozen=True, eq=False)
class ScoredSequence:
    """The compared tokens of one sequence under the rollout and every forward.

    Attributes:
        sample_id: Of the sample.
        positions: [n] int64, indices of the compared tokens among the sequence's, ascending.
        rollout: [n] the engine's log-probs.
        train: By forward [n].
        versions: [n] int32 weight versions, -1 if not known.
        tokens: [T] token ids of the sequence; None where the source has none.
        differing: [n] layers in which the live routers chose another set in the row that predicts the token, -1 where that row
            has no record; None where routes are not known.
    """

    sample_id: str
    positions: npt.NDArray[np.int64]
    rollout: Float
    train: Mapping[str, Float]
    versions: npt.NDArray[np.int32]
    tokens: npt.NDArray[Any] | None = None
    differing: npt.NDArray[np.int64] | None = None


class ForwardAccumulator:
    """One forward's part."""

    def __init__(self) -> None:
        self.gap = GapAccumulator()
        self.by_position, self.by_probability = Buckets(POSITION_EDGES), Buckets(PROBABILITY_EDGES)
        self.by_live_mismatch, self.by_version = Buckets(LAYER_EDGES), ByVersion()
        self.top = TopTokens()
        # Of each sequence [2, P]: sums of k3 by whether live routes differ, and by probability.
        self.strata: list[Float] = []

    def add(self, sequence: ScoredSequence, name: str) -> None:
        train, rollout = sequence.train[name], sequence.rollout
        d = log_ratio(train, rollout, f"sample {sequence.sample_id!r}, {name}")
        terms = token_terms(d)
        self.gap.add(np.asarray(train, np.float64), rollout, d)
        self.by_position.add(terms, sequence.positions - sequence.positions[0])
        self.by_probability.add(terms, np.exp(rollout))
        self.by_version.add(terms, sequence.versions)
        if sequence.differing is not None:
            known = sequence.differing >= 0
            self.by_live_mismatch.add(terms[:, known], sequence.differing[known])
            self.strata.append(_strata(sequence, terms[1]))
        for i in self.top.candidates(terms[1]):
            self.top.add(_top_token(sequence, int(i), float(terms[1, i])))

    def merge(self, other: ForwardAccumulator) -> None:
        for name in ("gap", "by_position", "by_probability", "by_live_mismatch", "by_version", "top"):
            getattr(self, name).merge(getattr(other, name))
        self.strata += other.strata


@dataclass
class Accumulator:
    """All forwards of one diagnosis.

    Args:
        names: The forwards that every sequence has, in their order.
    """

    names: Sequence[str]
    forwards: dict[str, ForwardAccumulator] = field(init=False)
    routes: dict[str, RouteMismatch] = field(default_factory=dict)
    sample_ids: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    main_version: list[int] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    missing: int = 0
    noise: float = 0.0
    offsets: OffsetCorrelation = field(default_factory=OffsetCorrelation)
    stratum_tokens: list[Float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forwards = {name: ForwardAccumulator() for name in self.names}

    def add(self, sequence: ScoredSequence) -> None:
        """Count one sequence; one without a compared token is only noted."""
        if not len(sequence.positions):
            self.empty.append(sequence.sample_id)
            return
        self.sample_ids.append(sequence.sample_id)
        self.keys.append(f"{sequence.sample_id}:{_digest(sequence)}")
        versions, counts = np.unique(sequence.versions, return_counts=True)
        self.main_version.append(int(versions[counts.argmax()]))
        for name, forward in self.forwards.items():
            forward.add(sequence, name)
        if sequence.differing is not None:
            self.stratum_tokens.append(_strata(sequence, np.ones(len(sequence.rollout))))
        self.offsets.add(sequence.positions, sequence.rollout, sequence.train[self.names[0]])
        if REPLAY in sequence.train and AGAIN in sequence.train:
            self.noise += float(np.abs(sequence.train[AGAIN] - sequence.train[REPLAY]).sum())

    def merge(self, other: Accumulator) -> None:
        """Add what another rank saw."""
        for name, forward in self.forwards.items():
            forward.merge(other.forwards[name])
        for name, routes in other.routes.items():
            self.routes[name].merge(routes)
        for mine, theirs in (
            (self.sample_ids, other.sample_ids),
            (self.keys, other.keys),
            (self.main_version, other.main_version),
            (self.empty, other.empty),
        ):
            mine += theirs  # type: ignore[operator]
        self.stratum_tokens += other.stratum_tokens
        self.missing += other.missing
        self.noise += other.noise
        self.offsets.merge(other.offsets)

    @property
    def num_tokens(self) -> int:
        return self.forwards[self.names[0]].gap.sketch.total

    def rows(self) -> dict[str, Float]:
        """The rows of sums [S, C] of each forward, in the order of `sample_ids`."""
        return {name: forward.gap.rows.array() for name, forward in self.forwards.items()}

    def fill(
        self,
        result: Diagnosis,
        *,
        routing: Mapping[str, str],
        trainers: Mapping[str, dict[str, str]],
        level: float = 0.95,
        resamples: int = 2000,
        seed: int = 0,
    ) -> None:
        """Write forwards, comparisons, route effect and counts into a diagnosis. Verdict and findings come after it.

        Args:
            routing, trainers: `Forward.routes` and `Forward.trainer` by forward.
        """
        result.sequence_keys, result.sequence_rows = tuple(self.keys), self.rows()
        bootstrap = Bootstrap(result.sequence_rows, level=level, resamples=resamples, seed=seed)
        for name in self.names:
            result.forwards[name] = self._forward(name, routing[name], trainers[name], bootstrap)
        base = LIVE if LIVE in self.names else self.names[0]
        for other in self.names:
            if other != base:
                result.comparisons += [
                    Comparison(
                        metric,
                        base,
                        other,
                        bootstrap.difference(base, other, metric),
                        bootstrap.ratio(other, base, metric),
                    )
                    for metric in COMPARED
                ]
        if self.stratum_tokens:
            result.route_effect = {
                name: route_effect(
                    np.array(self.stratum_tokens), np.array(self.forwards[name].strata), level, resamples, seed
                )
                for name in self.names
            }
        if {REPLAY, AGAIN} <= set(self.names):
            result.noise = self.noise / self.num_tokens
        result.empty, result.missing = len(self.empty), self.missing
        result.run["bootstrap"] = {
            "resamples": resamples,
            "seed": seed,
            "level": level,
            "sequences": len(self.sample_ids),
        }

    def _forward(self, name: str, routes: str, trainer: dict[str, str], bootstrap: Bootstrap) -> Forward:
        of = self.forwards[name]
        gap = of.gap.metrics()
        top = of.top.sorted()
        carried = np.cumsum([token.k3 for token in top]) / max(gap.k3 * gap.num_tokens, 1e-300)
        tail = of.gap.sketch.tail_counts(np.log(_TAUS)) / gap.num_tokens
        return Forward(
            name=name,
            routes=routes,
            trainer=trainer,
            gap=gap,
            sequences=of.gap.sequence_metrics(),
            intervals={metric: bootstrap.estimate(name, metric) for metric in HEADLINE},
            by_position=of.by_position.to_list(),
            by_probability=of.by_probability.to_list(),
            by_version=of.by_version.to_list(),
            by_live_mismatch=of.by_live_mismatch.to_list(),
            histogram=of.gap.sketch.plot_bins(),
            exceed_curve={"tau": _TAUS.tolist(), "share": tail.tolist()},
            top_tokens=top,
            top_share={str(count): float(carried[count - 1]) for count in (1, 5, 10, 20, 50) if count <= len(top)},
            mismatch=self.routes.get(name),
        )


def route_effect(tokens: Float, k3: Float, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Estimate:
    """k3 on tokens whose live routes differ, divided by that on the others at the same rollout probability.

    The others are reweighted to the probabilities of the first (direct standardisation), because rounding itself depends
    on the probability. 1 says that the gap does not care whether the live routers would have chosen otherwise.

    Args:
        tokens: [S, 2, P] tokens of each sequence by whether they differ (0 same, 1 differ) and bucket of probability.
        k3: [S, 2, P] their sums of k3 in the forward.
    """

    def statistic(sums: Float) -> Float:
        n_same, n_differ, k_same, k_differ = np.moveaxis(sums.reshape(*sums.shape[:-1], 4, _STRATA), -2, 0)
        both = (n_same > 0) & (n_differ > 0)
        expected = np.where(both, n_differ * k_same / np.maximum(n_same, 1), 0).sum(axis=-1)
        return np.asarray(np.where(both, k_differ, 0).sum(axis=-1) / expected)

    table = np.concatenate([tokens, k3], axis=1).reshape(len(tokens), -1)
    total = table.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(total))
        if len(table) < MIN_SEQUENCES:
            return Estimate(value)
        return Estimate(
            value, *bca(statistic(resampled_sums(table, resamples, seed)), value, statistic(total - table), level)
        )


def _strata(sequence: ScoredSequence, values: Float) -> Float:
    """Sums [2, P] of values [n] of tokens whose row has a record."""
    assert sequence.differing is not None
    known = sequence.differing >= 0
    bucket = bucket_of(np.exp(sequence.rollout[known]), PROBABILITY_EDGES) + _STRATA * (sequence.differing[known] > 0)
    return np.bincount(bucket, weights=values[known], minlength=2 * _STRATA).reshape(2, _STRATA).astype(np.float64)


def _digest(sequence: ScoredSequence) -> str:
    """Of the compared tokens: where they stand, and which they are. Where ids are not known, the rollout's log-probs tell two
    rollouts apart."""
    digest = xxhash.xxh3_64(np.ascontiguousarray(sequence.positions, "<i8").data)
    if sequence.tokens is not None:
        digest.update(np.ascontiguousarray(sequence.tokens, "<i8").data)
    else:
        digest.update(np.ascontiguousarray(sequence.rollout, "<f8").data)
    return digest.hexdigest()


def _top_token(sequence: ScoredSequence, i: int, k3: float) -> TopToken:
    position = int(sequence.positions[i])
    start = max(position - CONTEXT, 0)
    tokens = sequence.tokens
    return TopToken(
        sample_id=sequence.sample_id,
        position=position,
        response_position=i,
        token_id=-1 if tokens is None else int(tokens[position]),
        k3=k3,
        rollout_logprob=float(sequence.rollout[i]),
        train_logprobs={name: float(logprobs[i]) for name, logprobs in sequence.train.items()},
        weight_version=int(sequence.versions[i]),
        differing_layers=-1 if sequence.differing is None else int(sequence.differing[i]),
        context=() if tokens is None else tuple(tokens[start : position + CONTEXT + 1].tolist()),
        context_start=start,
    )
