"""Evidence that guards judge by: do log-probs and routes stand at the tokens that they belong to?

A trainer's log-probs correlate with the rollout's above 0.99 at the same token and hardly at the next one (0.1 to 0.3 on the
models that were measured), so one pass of sums at offsets -1, 0 and +1 tells a shift from any other disagreement. Routes
likewise: a router repeats its own choice, and chooses otherwise for the next row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from r3.metrics import Float

OFFSETS = (-1, 0, 1)
_PAIRS = 16  # of tokens below which a correlation says nothing
_ROWS = 256  # of a sample whose routes are compared at offsets


@dataclass
class OffsetCorrelation:
    """Pearson correlation of the rollout's log-prob of token t with the trainer's of token t + offset.

    Attributes:
        sums: [3, 6]: n, x, y, x^2, y^2, xy at each of OFFSETS; x the rollout's, y the trainer's.
    """

    sums: Float = field(default_factory=lambda: np.zeros((3, 6)))

    def add(self, positions: npt.NDArray[np.int64], rollout: Float, train: Float) -> None:
        """[n] each, of one sequence; only neighbours count as neighbours."""
        for row, offset in enumerate(OFFSETS):
            here = slice(max(-offset, 0), len(positions) - max(offset, 0))
            there = slice(max(offset, 0), len(positions) - max(-offset, 0))
            adjacent = positions[there] - positions[here] == offset
            x, y = rollout[here][adjacent], np.asarray(train[there][adjacent], np.float64)
            self.sums[row] += (len(x), x.sum(), y.sum(), x @ x, y @ y, x @ y)

    def merge(self, other: OffsetCorrelation) -> None:
        self.sums += other.sums

    def correlations(self) -> dict[int, float]:
        """By offset; NaN where a side does not vary, or over fewer than _PAIRS tokens."""
        n, x, y, xx, yy, xy = self.sums.T
        with np.errstate(divide="ignore", invalid="ignore"):
            r = (xy / n - x * y / n**2) / np.sqrt((xx / n - (x / n) ** 2) * (yy / n - (y / n) ** 2))
        return dict(zip(OFFSETS, np.where(n < _PAIRS, np.nan, r).tolist(), strict=True))

    @property
    def slope(self) -> float:
        """Of the trainer's log-probs on the rollout's, in place; 1 at the same temperature."""
        n, x, y, xx, _, xy = self.sums[OFFSETS.index(0)]
        with np.errstate(divide="ignore", invalid="ignore"):
            return float((xy / n - x * y / n**2) / (xx / n - (x / n) ** 2))


@dataclass
class RouteOffsets:
    """Mean overlap of the live routers' choice for row t with the record of row t + offset, over all layers.

    Attributes:
        shared, compared: [3] ids in common, and ids compared.
    """

    shared: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))
    compared: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(3, np.int64))

    def add(
        self,
        live: npt.NDArray[np.unsignedinteger],
        record: npt.NDArray[np.unsignedinteger],
        recorded: npt.NDArray[np.bool_],
    ) -> None:
        """Ids [L, T, K] of one sample and its recorded rows [T]; the first rows of it are compared."""
        rows = min(live.shape[1], _ROWS)
        for index, offset in enumerate(OFFSETS):
            here = np.arange(max(-offset, 0), rows - max(offset, 0))
            here = here[recorded[here + offset] & recorded[here]]
            a, b = live[:, here], record[:, here + offset]
            self.shared[index] += int((a[..., :, None] == b[..., None, :]).any(axis=-1).sum())
            self.compared[index] += a.size

    def merge(self, other: RouteOffsets) -> None:
        self.shared += other.shared
        self.compared += other.compared

    def overlaps(self) -> dict[int, float]:
        """By offset; NaN where nothing was compared."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return dict(zip(OFFSETS, (self.shared / self.compared).tolist(), strict=True))
