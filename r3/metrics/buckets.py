"""The gap by rollout probability, by position in the response, by weight version, and by what the live routers did.

A bucket keeps five sums, so a table costs nothing however many tokens go through it. Position buckets grow with the position: one
in sixteen at the start, half a power of two later, 64 of them up to a million tokens.

n tokens, B buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.metrics.definitions import Float, k3_terms

PROBABILITY_EDGES = (0.0, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999)
POSITION_EDGES = (0, 16, *(half * 2**power for power in range(4, 22) for half in (2, 3)))
LAYER_EDGES = (0, 1, 2, 3, 5, 9, 17, 33)  # number of a token's layers in which the live routers chose another set

_SUMS = ("tokens", "k1", "k3", "mean_abs", "exceed_1.5", "exceed_2")


def bucket_of(values: npt.NDArray[Any], edges: Sequence[float]) -> npt.NDArray[np.int64]:
    """Index of the last edge that is not above each value; values below the first edge go to the first bucket."""
    return np.maximum(np.searchsorted(np.asarray(edges), values, side="right") - 1, 0)


def token_terms(d: Float) -> Float:
    """[5, n] what is summed by bucket, of tokens with log-ratio d [n]: computed once for all tables."""
    absolute = np.abs(d)
    return np.stack([-d, k3_terms(d), absolute, absolute > np.log(1.5), absolute > np.log(2.0)])


def bucket_sums(terms: Float, bucket: npt.NDArray[np.int64], num_buckets: int) -> Float:
    """[B, 6] of _SUMS, of tokens with `terms` [5, n] in `bucket` [n]."""
    counts = np.bincount(bucket, minlength=num_buckets)
    return np.stack([counts, *(np.bincount(bucket, weights=t, minlength=num_buckets) for t in terms)], axis=1)


class Buckets:
    """Sums of d by bucket, for fixed edges: bucket i is [edges[i], edges[i + 1])."""

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.sums = np.zeros((len(self.edges), len(_SUMS)))

    def add(self, terms: Float, values: npt.NDArray[Any]) -> None:
        """`token_terms` [5, n] of tokens with `values` [n] to sort by."""
        self.sums += bucket_sums(terms, bucket_of(values, self.edges), len(self.edges))

    def merge(self, other: Buckets) -> None:
        self.sums += other.sums

    def to_list(self) -> list[dict[str, float | int | None]]:
        """One dict a bucket that holds tokens: `low`, `high` (None: no upper end), `tokens` and the means."""
        ends: list[float | None] = [*self.edges[1:], None]
        return [
            {"low": low, "high": high, **means(sums)}
            for low, high, sums in zip(self.edges, ends, self.sums, strict=True)
            if sums[0]
        ]


class ByVersion:
    """Sums of d by weight version (-1: not known)."""

    def __init__(self) -> None:
        self.sums: dict[int, Float] = {}

    def add(self, terms: Float, versions: npt.NDArray[np.int32]) -> None:
        found, bucket = np.unique(versions, return_inverse=True)
        for version, sums in zip(found.tolist(), bucket_sums(terms, bucket, len(found)), strict=True):
            self.sums[version] = self.sums.get(version, np.zeros(len(_SUMS))) + sums

    def merge(self, other: ByVersion) -> None:
        for version, sums in other.sums.items():
            self.sums[version] = self.sums.get(version, np.zeros(len(_SUMS))) + sums

    def to_list(self) -> list[dict[str, float | int]]:
        """One dict a version, ascending: `version`, `tokens` and the means."""
        return [{"version": version, **means(self.sums[version])} for version in sorted(self.sums)]


def means(sums: Float) -> dict[str, float | int]:
    """`tokens`, and k1, k3, mean_abs, exceed_1.5, exceed_2 as means over them."""
    return {
        "tokens": int(sums[0]),
        **{name: float(value / max(sums[0], 1)) for name, value in zip(_SUMS[1:], sums[1:], strict=True)},
    }
