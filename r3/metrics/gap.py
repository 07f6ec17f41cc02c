"""The gap of one forward to the rollout: an accumulator in bounded memory, and the metrics that come out of it.

    gap = GapAccumulator()
    for each sequence: gap.add(train_logprobs, rollout_logprobs)      # any number; ranks merge with gap.merge(other)
    gap.metrics().k3, gap.sequence_metrics().training_ppl

Sums are float64: exact to about 1e-16 of their size times the logarithm of a sequence's length (numpy adds pairwise). Counts
(F(tau)) and maxima are exact. Quantiles come from `LogRatioSketch`, within 0.5 % of the value.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.metrics.definitions import TAUS, Float
from r3.metrics.sketch import LogRatioSketch
from r3.metrics.sums import SEQUENCE_MEANS, SequenceRows, metrics_of, sequence_values, token_sums, with_sequence_values


@dataclass(frozen=True)
class GapMetrics:
    """Per-token gap between two policies on the same sampled tokens. All means are over tokens; logs are natural.

    Attributes:
        num_tokens: Tokens compared.
        k1, k2, k3: mean(-d), mean(d^2 / 2), mean(expm1(d) - d): estimators of KL(rollout || train).
        k3_reverse: mean(expm1(-d) + d), NeMo's `policy_kl_error`. Explodes where the trainer finds a token impossible.
        mean_abs: mean |d|.
        exceed: F(tau) for each tau of TAUS, the share of tokens with max(r, 1/r) > tau.
        unchanged: Share of tokens with d == 0 (PR2's zero-deviation share).
        p50, p95, p99, p999: Quantiles of |d|, within 0.5 %.
        max_ratio: exp(max |d|).
        mean_ratio: mean r, 1 where both log-probs are normalised and the rollout's are of the policy that sampled.
        chi2_token: mean r^2 - 1 (log-ratios clamped at 20, as veRL does).
        ess: Effective sample size (sum r)^2 / sum r^2, as a share of the tokens; 1 is no gap.
        mult_prob: mean exp |d|, NeMo's `token_mult_prob_error`.
        js: Jensen-Shannon term, NeMo's `js_divergence_error`.
        prob_diff_mean, prob_diff_max, prob_diff_std, pearson: Of the probabilities themselves, as in veRL.
    """

    num_tokens: int
    k1: float
    k2: float
    k3: float
    k3_reverse: float
    mean_abs: float
    exceed: dict[str, float]
    unchanged: float
    p50: float
    p95: float
    p99: float
    p999: float
    max_ratio: float
    mean_ratio: float
    chi2_token: float
    ess: float
    mult_prob: float
    js: float
    prob_diff_mean: float
    prob_diff_max: float
    prob_diff_std: float
    pearson: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SequenceMetrics:
    """The gap of whole sequences: what sequence-level masks and GSPO act on. Names as in veRL where it has them.

    Attributes:
        sequences: Sequences with at least one compared token.
        k1_sum: mean, p95 and max over sequences of sum_t(-d): log(p_rollout / p_train) of the response.
        k1_mean: The same of mean_t(-d); its mean is veRL's `log_ppl_diff`.
        k3_mean: The same of mean_t(k3).
        training_ppl, rollout_ppl, training_log_ppl, rollout_log_ppl, ppl_ratio, log_ppl_abs_diff, chi2_seq: As veRL
            defines them: a value per sequence, then their mean.
    """

    sequences: int
    k1_sum: dict[str, float]
    k1_mean: dict[str, float]
    k3_mean: dict[str, float]
    training_ppl: float
    rollout_ppl: float
    training_log_ppl: float
    rollout_log_ppl: float
    ppl_ratio: float
    log_ppl_abs_diff: float
    chi2_seq: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class GapAccumulator:
    """Everything about the gap of one forward, sequence by sequence."""

    def __init__(self) -> None:
        self.rows = SequenceRows()
        self.sketch = LogRatioSketch()
        self.max_abs = 0.0
        self.max_prob_diff = 0.0

    def add(self, train_logprobs: Float, rollout_logprobs: Float, d: Float | None = None) -> None:
        """One sequence of n > 0 tokens, float64 [n] (see `log_ratio`)."""
        d = train_logprobs - rollout_logprobs if d is None else d
        self.rows.add(token_sums(train_logprobs, rollout_logprobs, d))
        self.sketch.add(d)
        self.max_abs = max(self.max_abs, float(np.abs(d).max()))
        self.max_prob_diff = max(
            self.max_prob_diff, float(np.abs(np.exp(train_logprobs) - np.exp(rollout_logprobs)).max())
        )

    def merge(self, other: GapAccumulator) -> None:
        self.rows.merge(other.rows)
        self.sketch.merge(other.sketch)
        self.max_abs = max(self.max_abs, other.max_abs)
        self.max_prob_diff = max(self.max_prob_diff, other.max_prob_diff)

    def metrics(self) -> GapMetrics:
        rows = self.rows.array()
        m = {name: float(value) for name, value in metrics_of(with_sequence_values(rows).sum(axis=0)).items()}
        p50, p95, p99, p999 = (self.sketch.quantile_abs(q) for q in (0.5, 0.95, 0.99, 0.999))
        return GapMetrics(
            num_tokens=int(rows[:, 0].sum()),
            k1=m["k1"],
            k2=m["k2"],
            k3=m["k3"],
            k3_reverse=m["k3_reverse"],
            mean_abs=m["mean_abs"],
            exceed={f"{tau:g}": m[f"exceed_{tau:g}"] for tau in TAUS},
            unchanged=m["unchanged"],
            p50=p50,
            p95=p95,
            p99=p99,
            p999=p999,
            max_ratio=float(np.exp(min(self.max_abs, 700.0))),
            mean_ratio=m["mean_ratio"],
            chi2_token=m["chi2_token"],
            ess=m["ess"],
            mult_prob=m["mult_prob"],
            js=m["js"],
            prob_diff_mean=m["prob_diff"],
            prob_diff_max=self.max_prob_diff,
            prob_diff_std=m["prob_diff_std"],
            pearson=m["pearson"],
        )

    def sequence_metrics(self) -> SequenceMetrics:
        values = dict(zip(SEQUENCE_MEANS, sequence_values(self.rows.array()).T, strict=True))

        def spread(name: str) -> dict[str, float]:
            of = values[name]
            return {"mean": float(of.mean()), "p95": float(np.quantile(of, 0.95)), "max": float(of.max())}

        means = {name: float(of.mean()) for name, of in values.items()}
        return SequenceMetrics(
            sequences=len(self.rows),
            k1_sum=spread("sequence_k1_sum"),
            k1_mean={**spread("sequence_k1_mean"), "min": float(values["sequence_k1_mean"].min())},
            k3_mean=spread("sequence_k3_mean"),
            **{
                name: means[name]
                for name in (
                    *("training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl", "ppl_ratio"),
                    *("log_ppl_abs_diff", "chi2_seq"),
                )
            },
        )


def gap_metrics(d: npt.ArrayLike, rollout_logprobs: npt.ArrayLike | None = None) -> GapMetrics:
    """The metrics of per-token log-ratios [n] (see `log_ratio`), as one sequence.

    Without the rollout's log-probs [n] the metrics of probabilities (`prob_diff_*`, `pearson`) are NaN.
    """
    d = np.asarray(d, np.float64)
    rollout = np.full(d.shape, np.nan) if rollout_logprobs is None else np.asarray(rollout_logprobs, np.float64)
    gap = GapAccumulator()
    gap.add(rollout + d, rollout, d)
    if rollout_logprobs is None:
        gap.max_prob_diff = float("nan")
    return gap.metrics()
