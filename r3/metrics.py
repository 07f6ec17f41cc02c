"""Metrics of the gap between rollout and training, in float64 on the tokens that the rollout sampled.

Per token: d = log p_train - log p_rollout, r = exp(d). Samples come from the *rollout* policy, so mean(expm1(d) - d), the
k3 estimator, estimates KL(rollout || train); the R3 paper and AReaL print it under the reverse name. It is dominated by
its tail, hence F(tau), quantiles and the effective sample size beside it. Definitions: Schulman's k1, k2, k3; F(tau) of
arXiv 2510.11370, the share of tokens with max(r, 1/r) > tau.

Routes: for each (token, layer) the *sets* of chosen experts are compared; the order in which a router lists them does not
matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import MetricError

TAUS = (1.1, 1.5, 2.0, 3.0, 5.0, 10.0)
DIRECTION = "KL(rollout || train)"

Float = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GapMetrics:
    """Per-token gap between two policies on the same sampled tokens. All means are over tokens; logs are natural.

    Attributes:
        num_tokens: Tokens compared.
        k1, k2, k3: mean(-d), mean(d^2 / 2), mean(expm1(d) - d): estimators of KL(rollout || train).
        mean_abs: mean |d|.
        exceed: F(tau) for each tau of TAUS, as a share.
        p95, p99, p999: Quantiles of |d|.
        max_ratio: exp(max |d|).
        ess: Effective sample size (sum r)^2 / sum r^2, as a share of the tokens; 1 is no gap.
    """

    num_tokens: int
    k1: float
    k2: float
    k3: float
    mean_abs: float
    exceed: dict[str, float]
    p95: float
    p99: float
    p999: float
    max_ratio: float
    ess: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def log_ratio(train_logprobs: npt.ArrayLike, rollout_logprobs: npt.ArrayLike, where: str = "tokens") -> Float:
    """d = log p_train - log p_rollout [n] in float64.

    Raises:
        MetricError: unequal shapes, no token, or values that are not log-probs.
    """
    train, rollout = np.asarray(train_logprobs, np.float64), np.asarray(rollout_logprobs, np.float64)
    if train.shape != rollout.shape or train.ndim != 1:
        raise MetricError(
            "log-probs of unequal shape cannot be compared",
            where=where,
            expected=list(rollout.shape),
            got=list(train.shape),
        )
    if train.size == 0:
        raise MetricError(
            "no sampled token to compare", where=where, remedy="the loss mask is empty: nothing was sampled"
        )
    for name, values in (("trainer", train), ("rollout", rollout)):
        bad = np.flatnonzero(~np.isfinite(values) | (values > 1e-3))
        if len(bad):
            raise MetricError(
                f"the {name} gave something that is not a log-prob",
                where=f"{where}: token {int(bad[0])}",
                expected="a finite number <= 0",
                got=float(values[bad[0]]),
                remedy="look for logits in place of log-probs, or a token that the engine gave no log-prob for",
            )
    return train - rollout


def k3_terms(d: Float) -> Float:
    """expm1(d) - d per token: never negative, exact near 0."""
    return np.expm1(d) - d


def gap_metrics(d: Float) -> GapMetrics:
    """The metrics of per-token log-ratios [n] (see `log_ratio`)."""
    absolute = np.abs(d)
    ratio = np.exp(d - d.max())  # a common factor cancels in the effective sample size
    p95, p99, p999 = (float(q) for q in np.quantile(absolute, (0.95, 0.99, 0.999)))
    return GapMetrics(
        num_tokens=int(d.size),
        k1=float(-d.mean()),
        k2=float((d * d).mean() / 2),
        k3=float(k3_terms(d).mean()),
        mean_abs=float(absolute.mean()),
        exceed={f"{tau:g}": float((absolute > np.log(tau)).mean()) for tau in TAUS},
        p95=p95,
        p99=p99,
        p999=p999,
        max_ratio=float(np.exp(absolute.max())),
        ess=float(ratio.sum() ** 2 / (ratio * ratio).sum() / d.size),
    )


def bootstrap_interval(
    per_sequence: Sequence[Float], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Confidence interval of the token mean of some per-token values, resampling whole sequences: tokens of one sequence
    are not independent.

    Args:
        per_sequence: One [n_i] vector a sequence, e.g. k3 terms, or live minus replay k3 terms of the same tokens.
    """
    sums = np.array([values.sum() for values in per_sequence])
    counts = np.array([values.size for values in per_sequence])
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(sums), (resamples, len(sums)))
    means = sums[picks].sum(axis=1) / np.maximum(counts[picks].sum(axis=1), 1)
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)


@dataclass
class RouteMismatch:
    """Running comparison of two routings of the same tokens, row by row, layer by layer.

    Attributes (after `add`):
        rows: Tokens compared.
        differing: [L] rows of each layer whose expert sets differ.
        overlap: [L] sum over rows of |A & B| / K.
        rows_with_any: Rows in which at least one layer differs.
    """

    num_layers: int
    rows: int = 0
    rows_with_any: int = 0
    differing: npt.NDArray[np.int64] = field(init=False)
    overlap: Float = field(init=False)

    def __post_init__(self) -> None:
        self.differing = np.zeros(self.num_layers, np.int64)
        self.overlap = np.zeros(self.num_layers, np.float64)

    def add(self, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
        """Compare ids [L, n, K] of the same n rows."""
        if a.shape != b.shape or a.shape[0] != self.num_layers:
            raise MetricError("routes of unequal shape cannot be compared", expected=list(a.shape), got=list(b.shape))
        shared = (a[..., :, None] == b[..., None, :]).any(axis=-1).sum(axis=-1)  # [L, n]
        differs = shared != a.shape[-1]
        self.rows += a.shape[1]
        self.rows_with_any += int(differs.any(axis=0).sum())
        self.differing += differs.sum(axis=1)
        self.overlap += shared.sum(axis=1) / a.shape[-1]

    @property
    def share(self) -> float:
        """Share of (token, layer) with another expert set."""
        return float(self.differing.sum() / max(self.rows * self.num_layers, 1))

    @property
    def share_of_tokens(self) -> float:
        """Share of tokens with at least one such layer."""
        return self.rows_with_any / max(self.rows, 1)

    def to_dict(self) -> dict[str, Any]:
        rows = max(self.rows, 1)
        return {
            "rows": self.rows,
            "share_of_token_layers": self.share,
            "share_of_tokens": self.share_of_tokens,
            "mean_layers_per_token": float(self.differing.sum() / rows),
            "mean_overlap": float(self.overlap.sum() / (rows * self.num_layers)),
            "share_by_layer": (self.differing / rows).tolist(),
            "overlap_by_layer": (self.overlap / rows).tolist(),
        }
