"""What a diagnosis says: the structures that a report shows, and their JSON.

    Diagnosis
      verdict      one sentence, its level, and the interval that it stands on
      findings     what is wrong or worth knowing, each with an id, a severity, numbers and a remedy
      forwards     by name: gap, intervals, sequences, buckets, histogram, routes, top tokens
      comparisons  differences and ratios of two forwards, paired, with intervals
      floor        what numerics alone make of the same routes, where a float32 pass was asked for

JSON: NaN and infinities are written as null. Names of metrics are those of `r3.metrics.sums.METRICS`; what other projects call
them is in `r3.metrics.names`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from r3.metrics import DIRECTION, Estimate, Float, GapMetrics, RouteMismatch, SequenceMetrics, TopToken

LIVE, REPLAY, AGAIN = "live", "replay", "replay again"
FORWARDS = (LIVE, REPLAY, AGAIN)
R2, FLOAT32_LIVE, FLOAT32_REPLAY = "r2", "float32 live", "float32 replay"

# What is shown with an interval: every forward has these.
HEADLINE = (
    *("k1", "k2", "k3", "mean_abs", "exceed_1.1", "exceed_1.5", "exceed_2", "exceed_3", "exceed_5", "exceed_10"),
    *("mean_ratio", "chi2_token", "ess", "mult_prob", "js", "prob_diff", "pearson"),
    *("sequence_k1_mean", "sequence_k3_mean", "ppl_ratio", "log_ppl_abs_diff", "chi2_seq"),
)
COMPARED = ("k3", "mean_abs", "exceed_1.1", "exceed_1.5", "exceed_2", "exceed_5", "sequence_k3_mean")


@dataclass(frozen=True)
class Finding:
    """Something that the numbers say.

    Attributes:
        id: Stable name, e.g. `token-shift`; docs/kl-diagnostic.md lists them.
        severity: `error` (the comparison is wrong or replay is), `warning` (the numbers need care), `info`.
        text: One or two sentences with the numbers.
        remedy: What to do; "" where there is nothing to do.
        numbers: The numbers by name, for machines.
    """

    id: str
    severity: str
    text: str
    remedy: str = ""
    numbers: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Verdict:
    """The first line of a report. It claims a direction only where the interval excludes the opposite.

    Attributes:
        level: `good`, `warning`, `bad`, or `unknown` where the interval does not speak.
        text: One sentence.
        metric, statistic: What it stands on: `k3`, `ratio of replay to live`.
        estimate: With its interval.
    """

    level: str
    text: str
    metric: str = ""
    statistic: str = ""
    estimate: Estimate = field(default_factory=lambda: Estimate(math.nan))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "estimate": self.estimate.to_dict()}


@dataclass
class Forward:
    """One pass over the samples.

    Attributes:
        name: `live`, `replay`, `replay again`, `r2`, `float32 live`, `float32 replay`, or the name that a dump was given.
        routes: Whose experts: `own` (the trainer's routers), `rollout`, `r2` (the trainer's own record), `unknown` (a dump).
        trainer: The stack that made it: framework, versions, model, dtype, device.
        gap: Token metrics.
        sequences: Sequence metrics.
        intervals: By name in HEADLINE.
        by_position, by_probability: Buckets: `low`, `high`, `tokens`, `k1`, `k3`, `mean_abs`, `exceed_1.5`, `exceed_2`.
            Position counts from the first compared token; probability is the rollout's.
        by_version: The same by `version` of the weights.
        by_live_mismatch: The same by how many layers' live routers chose another set in the row that predicts the token.
        histogram: `edges` and `counts` of d.
        exceed_curve: `tau` and `share`: F(tau) from 1.01 to 100, by the sketch's bins.
        top_tokens: Largest k3 first. `top_share` is the share of this pass's k3 that each number of them carries.
        mismatch: Its routes against the rollout's; None where they are not known.
    """

    name: str
    routes: str
    trainer: dict[str, str]
    gap: GapMetrics
    sequences: SequenceMetrics
    intervals: dict[str, Estimate] = field(default_factory=dict)
    by_position: list[dict[str, Any]] = field(default_factory=list)
    by_probability: list[dict[str, Any]] = field(default_factory=list)
    by_version: list[dict[str, Any]] = field(default_factory=list)
    by_live_mismatch: list[dict[str, Any]] = field(default_factory=list)
    histogram: dict[str, Any] = field(default_factory=dict)
    exceed_curve: dict[str, list[float]] = field(default_factory=dict)
    top_tokens: list[TopToken] = field(default_factory=list)
    top_share: dict[str, float] = field(default_factory=dict)
    mismatch: RouteMismatch | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "routing": self.routes,
            "trainer": self.trainer,
            **self.gap.to_dict(),
            "intervals": {name: estimate.to_dict() for name, estimate in self.intervals.items()},
            "sequences": self.sequences.to_dict(),
            "by_position": self.by_position,
            "by_probability": self.by_probability,
            "by_version": self.by_version,
            "by_live_mismatch": self.by_live_mismatch,
            "histogram": self.histogram,
            "exceed_curve": self.exceed_curve,
            "top_tokens": [token.to_dict() for token in self.top_tokens],
            "top_share": self.top_share,
            "routes": None if self.mismatch is None else self.mismatch.to_dict(),
        }


@dataclass(frozen=True)
class Comparison:
    """One metric of two forwards on the same tokens.

    Attributes:
        metric: Of COMPARED.
        base, other: Names of forwards, e.g. `live` and `replay`.
        difference: base minus other: what `other` saves.
        ratio: other divided by base; 1 is no change.
    """

    metric: str
    base: str
    other: str
    difference: Estimate
    ratio: Estimate

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference.to_dict(), "ratio": self.ratio.to_dict()}


@dataclass(frozen=True)
class FloatFloor:
    """What the trainer's dtype alone does to log-probs under the same routes (docs/kl-diagnostic.md derives it).

    Attributes:
        rounding: k3 between replay in the trainer's dtype and replay in float32: one implementation's rounding.
        floor: Twice that: two implementations that round independently, as a rollout engine and a trainer would.
        residual: k3 of replay against the rollout.
        ratio: residual / floor, paired. Not above 1: what is left is no more than rounding.
        engine: k3 of the float32 replay against the rollout: the engine's rounding, and whatever routing still leaves.
        verdict: `within`, `above` or `unknown`, by the interval of `ratio`.
        text: One sentence with the numbers.
    """

    rounding: Estimate
    floor: Estimate
    residual: Estimate
    ratio: Estimate
    engine: Estimate
    verdict: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        names = ("rounding", "floor", "residual", "ratio", "engine")
        return {
            **{name: getattr(self, name).to_dict() for name in names},
            "verdict": self.verdict,
            "text": self.text,
        }


@dataclass
class Diagnosis:
    """The result for one rollout and one trainer, and what the numbers stand on.

    Attributes:
        trainer: The scorer's stack.
        rollout: Engine, version, model, temperature, log-probs and weight versions that the samples name; `weights` is `same`,
            `other` or `unknown`.
        label: Name of the rollout where a report has several.
        forwards: By name, in the order they were made.
        comparisons: Paired differences and ratios.
        verdict, findings, floor: See their classes; findings by severity.
        route_effect: k3 of each forward on tokens whose live routes differ, divided by that on the others at the same rollout
            probability: 1 where the gap has nothing to do with routes. By forward.
        router_shift: `RouterShift.to_dict` (r3.metrics.shift) between the weights of R2's recorder and the trainer's, on the
            recorded experts; None where there is no other recorder, or no scores.
        noise: Mean |log-prob difference| of the sampled tokens between the two replays.
        verified: (token, layer) pairs whose replayed ids were seen at the experts and equal the record.
        rows, recorded: Tokens of all samples, and those with a record.
        recorded_last: Samples whose last row has one: no replay needs it, so it must not stand in for one that is missing.
        sequences: Samples read. `empty`: those without a token to compare. `missing`: tokens under the loss mask for which
            the rollout gave no log-prob.
        run: What repeats it: command, versions, options, seed and resamples of the bootstrap, source, digest of the tokens.
        sequence_keys, sequence_rows: Of each compared sequence its id and digest, and by forward its row of sums [S, C]
            (`r3.metrics.sums`): what `r3.diagnose.compare` pairs. Not in the JSON.
    """

    trainer: dict[str, str]
    rollout: dict[str, Any]
    label: str = ""
    forwards: dict[str, Forward] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict("unknown", "nothing was compared"))
    findings: list[Finding] = field(default_factory=list)
    floor: FloatFloor | None = None
    route_effect: dict[str, Estimate] = field(default_factory=dict)
    router_shift: dict[str, Any] | None = None
    noise: float = math.nan
    verified: int = 0
    rows: int = 0
    recorded: int = 0
    recorded_last: int = 0
    sequences: int = 0
    empty: int = 0
    missing: int = 0
    run: dict[str, Any] = field(default_factory=dict)
    sequence_keys: tuple[str, ...] = ()
    sequence_rows: dict[str, Float] = field(default_factory=dict, repr=False)

    @property
    def coverage(self) -> float:
        """Recorded rows as a share of all rows. The last token of a sequence has none, so it is just below 1."""
        return self.recorded / max(self.rows, 1)

    @property
    def replay_coverage(self) -> float:
        """Recorded rows as a share of those that a replay needs: all but the last of each sequence. 1 is complete."""
        return (self.recorded - self.recorded_last) / max(self.rows - self.sequences, 1)

    @property
    def gaps(self) -> dict[str, GapMetrics]:
        return {name: forward.gap for name, forward in self.forwards.items()}

    @property
    def mismatch(self) -> dict[str, RouteMismatch]:
        return {name: f.mismatch for name, f in self.forwards.items() if f.mismatch is not None}

    def comparison(self, metric: str, base: str = LIVE, other: str = REPLAY) -> Comparison | None:
        """The paired comparison of two forwards, if both were made."""
        for each in self.comparisons:
            if (each.metric, each.base, each.other) == (metric, base, other):
                return each
        return None

    @property
    def k3_saved(self) -> tuple[float, float]:
        """Interval of live minus replay k3."""
        found = self.comparison("k3")
        return (math.nan, math.nan) if found is None else (found.difference.low, found.difference.high)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: NaN and infinities are None."""
        data: dict[str, Any] = plain(
            {
                "label": self.label,
                "direction": DIRECTION,
                "verdict": self.verdict.to_dict(),
                "findings": [finding.to_dict() for finding in self.findings],
                "trainer": self.trainer,
                "rollout": self.rollout,
                "run": self.run,
                "sequences": self.sequences,
                "empty_sequences": self.empty,
                "missing_logprobs": self.missing,
                "rows": self.rows,
                "recorded_rows": self.recorded,
                "coverage": self.coverage,
                "replay_coverage": self.replay_coverage,
                "verified_token_layers": self.verified,
                "forwards": {name: forward.to_dict() for name, forward in self.forwards.items()},
                "comparisons": [comparison.to_dict() for comparison in self.comparisons],
                "route_effect": {name: estimate.to_dict() for name, estimate in self.route_effect.items()},
                "router_shift": self.router_shift,
                "floor": None if self.floor is None else self.floor.to_dict(),
                "noise_mean_abs": self.noise,
                "k3_saved_by_replay_95ci": list(self.k3_saved),
            }
        )
        return data


def plain(value: Any) -> Any:
    """As JSON has it: NaN and infinities are None, keys are text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
