"""Quantiles of d over any number of tokens in 41 KB: a histogram of sign and magnitude with bins that are 1 % wide.

A bin holds the d of one sign whose |d| lies between 1e-9 * 1.01^i and 1e-9 * 1.01^(i + 1), up to 100; smaller ones are 0,
larger ones fall in the last bin. A quantile is the geometric middle of its bin: at most 0.5 % from the value at that rank,
whatever the distribution (1e-9 absolute below the first bin). Two sketches merge by adding counts, so ranks, batches and
their order give the same answer to the last digit. The sketches that people use for this (t-digest, KLL) bound the error
of the *rank*, a poor bound for p99.9 of a heavy tail, and their state depends on the order of arrival. DDSketch
(VLDB 2019) bounds the value too, and is this histogram with bins made on demand; the range of a log-ratio is known, so fixed
bins do.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.metrics.definitions import Float

WIDTH = 0.01  # relative width of a bin
SMALLEST, LARGEST = 1e-9, 100.0
_LOG_WIDTH = math.log1p(WIDTH)
BINS = math.ceil(math.log(LARGEST / SMALLEST) / _LOG_WIDTH)


class LogRatioSketch:
    """Histogram of d.

    Attributes:
        counts: [2 * BINS + 1] int64: the negative bins from the largest magnitude, zero, the positive bins.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(2 * BINS + 1, np.int64)

    def add(self, d: Float) -> None:
        magnitude = np.abs(d)
        with np.errstate(divide="ignore"):
            index = np.floor(np.log(magnitude / SMALLEST) / _LOG_WIDTH)
        index = np.clip(index, -1, BINS - 1).astype(np.int64) + 1  # 0 is the bin of zero
        self.counts += np.bincount(BINS + np.where(d < 0, -index, index), minlength=2 * BINS + 1)

    def merge(self, other: LogRatioSketch) -> None:
        self.counts += other.counts

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile_abs(self, q: float) -> float:
        """The |d| at rank ceil(q * n), within 0.5 %."""
        negative, positive = self.counts[:BINS][::-1], self.counts[BINS + 1 :]
        magnitudes = np.concatenate([[0.0], _middles()])
        return _at_rank(magnitudes, np.concatenate([self.counts[BINS : BINS + 1], negative + positive]), q)

    def quantile(self, q: float) -> float:
        """The d at rank ceil(q * n), within 0.5 %."""
        middles = _middles()
        return _at_rank(np.concatenate([-middles[::-1], [0.0], middles]), self.counts, q)

    def plot_bins(self, num_bins: int = 80) -> dict[str, Any]:
        """Counts over equal bins of d between the 0.05 % and the 99.95 % quantile, symmetric about 0, for a chart.

        Returns:
            `edges` [num_bins + 1] and `counts` [num_bins]; tokens outside are in the outermost bins.
        """
        reach = max(-self.quantile(0.0005), self.quantile(0.9995), 1e-6)
        edges = np.linspace(-reach, reach, num_bins + 1)
        middles = _middles()
        values = np.concatenate([-middles[::-1], [0.0], middles])
        index = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, num_bins - 1)
        counts = np.bincount(index, weights=self.counts, minlength=num_bins).astype(np.int64)
        return {"edges": edges.tolist(), "counts": counts.tolist()}

    def tail_counts(self, log_taus: Float) -> npt.NDArray[np.int64]:
        """Tokens with |d| above each of `log_taus`, by bins: for the curve F(tau); the table's F(tau) are counted exactly."""
        both = self.counts[:BINS][::-1] + self.counts[BINS + 1 :]
        above = np.concatenate([np.cumsum(both[::-1])[::-1], [0]])
        return np.asarray(above[np.searchsorted(_middles(), log_taus, side="right")])


def _middles() -> Float:
    """[BINS] geometric middles."""
    middles: Float = SMALLEST * np.exp((np.arange(BINS) + 0.5) * _LOG_WIDTH)
    return middles


def _at_rank(values: Float, counts: npt.NDArray[np.int64], q: float) -> float:
    total = int(counts.sum())
    if total == 0:
        return float("nan")
    rank = min(max(math.ceil(q * total), 1), total)
    return float(values[int(np.searchsorted(np.cumsum(counts), rank))])
