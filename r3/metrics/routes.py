"""Two routings of the same tokens, compared row by row and layer by layer.

For each (token, layer) the *sets* of chosen experts are compared; the order in which a router lists them does not matter.
Kept by layer, by layer and expert (who loses tokens, who gains them), by layer and position, and by the number of differing
layers of a token, so memory is L * E, whatever the number of tokens.

L MoE layers, n rows, K top-k, E experts, P buckets of position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import MetricError
from r3.metrics.buckets import POSITION_EDGES, bucket_of
from r3.metrics.definitions import Float

Counts = npt.NDArray[np.int64]


@dataclass
class RouteMismatch:
    """Running comparison of a routing `a` (a forward's) with a routing `b` (the rollout's record).

    Args:
        num_layers: L.
        num_experts: E; 0 keeps nothing by expert.

    Attributes (after `add`):
        rows: Tokens compared.
        differing: [L] rows of each layer whose expert sets differ.
        overlap: [L] sum over rows of |A & B| / K.
        disjoint: [L] rows without any common expert.
        rows_with_any: Rows in which at least one layer differs.
        rows_by_layers: [L + 1] rows by how many of their layers differ.
        recorded, lost, gained: [L, E] how often the record has the expert; has it while the forward chose another; and the
            other way round.
        position_rows, position_differing: [P] and [L, P] by position of the row, POSITION_EDGES.
    """

    num_layers: int
    num_experts: int = 0
    rows: int = 0
    rows_with_any: int = 0
    differing: Counts = field(init=False)
    overlap: Float = field(init=False)
    disjoint: Counts = field(init=False)
    rows_by_layers: Counts = field(init=False)
    recorded: Counts = field(init=False)
    lost: Counts = field(init=False)
    gained: Counts = field(init=False)
    position_rows: Counts = field(init=False)
    position_differing: Counts = field(init=False)

    def __post_init__(self) -> None:
        layers, buckets = self.num_layers, len(POSITION_EDGES)
        self.overlap = np.zeros(layers, np.float64)
        self.differing, self.disjoint = np.zeros(layers, np.int64), np.zeros(layers, np.int64)
        self.rows_by_layers = np.zeros(layers + 1, np.int64)
        self.recorded, self.lost, self.gained = (np.zeros((layers, self.num_experts), np.int64) for _ in range(3))
        self.position_rows = np.zeros(buckets, np.int64)
        self.position_differing = np.zeros((layers, buckets), np.int64)

    def add(
        self, a: npt.NDArray[Any], b: npt.NDArray[Any], positions: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.int64]:
        """Compare ids [L, n, K] of the same n rows, at `positions` [n] of their sequence.

        Returns:
            [n], in how many layers each row differs.
        """
        if a.shape != b.shape or a.shape[0] != self.num_layers:
            raise MetricError("routes of unequal shape cannot be compared", expected=list(a.shape), got=list(b.shape))
        rows = a.shape[1]
        per_row = np.zeros(rows, np.int64)
        bucket = None if positions is None else bucket_of(positions, POSITION_EDGES)
        for layer in range(self.num_layers):  # a layer at a time: [n, K, K] at once, not L times that
            same = a[layer, :, :, None] == b[layer, :, None, :]
            a_kept, b_kept = same.any(axis=2), same.any(axis=1)
            shared = b_kept.sum(axis=1)
            differs = shared != a.shape[-1]
            per_row += differs
            self.differing[layer] += int(differs.sum())
            self.overlap[layer] += shared.sum() / a.shape[-1]
            self.disjoint[layer] += int((shared == 0).sum())
            if self.num_experts:
                for count, chosen in (
                    (self.recorded, b[layer].ravel()),
                    (self.lost, b[layer][~b_kept]),
                    (self.gained, a[layer][~a_kept]),
                ):
                    count[layer] += np.bincount(chosen, minlength=self.num_experts)[: self.num_experts]
            if bucket is not None:
                self.position_differing[layer] += np.bincount(bucket[differs], minlength=len(POSITION_EDGES))
        if bucket is not None:
            self.position_rows += np.bincount(bucket, minlength=len(POSITION_EDGES))
        self.rows += rows
        self.rows_with_any += int((per_row > 0).sum())
        self.rows_by_layers += np.bincount(per_row, minlength=self.num_layers + 1)
        return per_row

    def merge(self, other: RouteMismatch) -> None:
        if (self.num_layers, self.num_experts) != (other.num_layers, other.num_experts):
            raise MetricError(
                "comparisons of different models cannot be merged",
                expected=f"{self.num_layers} layers, {self.num_experts} experts",
                got=f"{other.num_layers} layers, {other.num_experts} experts",
            )
        self.rows += other.rows
        self.rows_with_any += other.rows_with_any
        self.overlap += other.overlap
        for name in (
            *("differing", "disjoint", "rows_by_layers", "recorded", "lost", "gained"),
            *("position_rows", "position_differing"),
        ):
            getattr(self, name).__iadd__(getattr(other, name))

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
        used = int(np.max(np.flatnonzero(self.position_rows), initial=-1)) + 1
        return {
            "rows": self.rows,
            "share_of_token_layers": self.share,
            "share_of_tokens": self.share_of_tokens,
            "mean_layers_per_token": float(self.differing.sum() / rows),
            "mean_overlap": float(self.overlap.sum() / (rows * self.num_layers)),
            "share_disjoint": float(self.disjoint.sum() / (rows * self.num_layers)),
            "share_by_layer": (self.differing / rows).tolist(),
            "overlap_by_layer": (self.overlap / rows).tolist(),
            "disjoint_by_layer": (self.disjoint / rows).tolist(),
            "tokens_by_differing_layers": self.rows_by_layers.tolist(),
            "by_expert": {
                "recorded": self.recorded.tolist(),
                "lost": self.lost.tolist(),
                "gained": self.gained.tolist(),
            },
            "by_position": {
                "low": list(POSITION_EDGES[:used]),
                "rows": self.position_rows[:used].tolist(),
                "share": (self.position_differing[:, :used] / np.maximum(self.position_rows[:used], 1)).tolist(),
            },
        }
