"""Router-shift (RSPO, arXiv 2510.23027): how far the router of new weights has moved on the experts that the old ones activated.

Of a token: gamma = exp(-mean over layers and activated experts of |log s_new - log s_old|), s the router's softmax over all
experts. 1 is no shift. RSPO multiplies the importance ratio by it (without gradient, floored). It needs the scores of both
policies, so it is measured between two trainers, not against an engine, which records ids only.

L MoE layers, n rows, K top-k, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from r3.metrics.definitions import Float


class RouterShift:
    """Running router-shift of recorded rows.

    Attributes:
        rows: Tokens compared.
        total, smallest: Sum and minimum of gamma over them.
        moved: [L] sum over rows of the mean |log s_new - log s_old| of a layer.
    """

    def __init__(self, num_layers: int) -> None:
        self.rows, self.total, self.smallest = 0, 0.0, 1.0
        self.moved: Float = np.zeros(num_layers)

    def add(self, new: npt.NDArray[Any], old: npt.NDArray[Any], ids: npt.NDArray[Any]) -> Float:
        """Router log-probs [L, n, E] of both policies and the activated ids [L, n, K]; returns gamma [n]."""
        chosen = ids.astype(np.int64)
        difference = np.take_along_axis(new, chosen, axis=2).astype(np.float64) - np.take_along_axis(
            old, chosen, axis=2
        )
        by_layer = np.abs(difference).mean(axis=2)  # [L, n]
        gamma: Float = np.exp(-by_layer.mean(axis=0))
        self.rows += len(gamma)
        self.total += float(gamma.sum())
        self.smallest = min(self.smallest, float(gamma.min(initial=1.0)))
        self.moved += by_layer.sum(axis=1)
        return gamma

    def merge(self, other: RouterShift) -> None:
        self.rows += other.rows
        self.total += other.total
        self.smallest = min(self.smallest, other.smallest)
        self.moved += other.moved

    def to_dict(self) -> dict[str, Any]:
        """`rows`, `mean` and `min` of gamma, and `mean_abs_by_layer` [L] of the log-scores."""
        rows = max(self.rows, 1)
        return {
            "rows": self.rows,
            "mean": self.total / rows,
            "min": self.smallest,
            "mean_abs_by_layer": (self.moved / rows).tolist(),
        }
