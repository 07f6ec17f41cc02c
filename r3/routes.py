"""Routes: the experts that the rollout chose, one row per token.

    ids       [L, T, K] uint8 (up to 256 experts) or uint16   layer-major, so that a pipeline stage's slice is contiguous
    recorded  [T] bool                                        a row without a record is marked, never filled with zeros

L = MoE layers, T = tokens, K = top-k. Expert 0 is an expert: other libraries fill missing rows with it, and every
padded token then lands on one rank's expert 0 (verl issue 7106, slime issue 941). Here `ids` where `recorded` is False
are meaningless and nothing reads them.

The one row rule: row t is the routing of token t *as an input*. The last token of a sequence is never fed back, so an
engine returns N-1 rows (or N) for N tokens; `from_rows` pads to N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import SampleError
from r3.spec import RoutingSpec

Ids = npt.NDArray[Any]  # uint8 or uint16
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Routes:
    """Expert ids [L, T, K] and which of the T rows hold a record.

    Raises:
        SampleError: if the shapes do not fit each other.
    """

    ids: Ids
    recorded: Mask

    def __post_init__(self) -> None:
        if self.ids.ndim != 3 or self.ids.dtype not in (np.uint8, np.uint16):
            raise SampleError(
                "routes need ids of shape [MoE layers, tokens, top-k]",
                expected="3 dimensions of uint8 or uint16",
                got=f"shape {self.ids.shape} of {self.ids.dtype}",
            )
        if self.recorded.shape != (self.ids.shape[1],) or self.recorded.dtype != np.bool_:
            raise SampleError(
                "the mask of recorded rows does not fit the ids",
                expected=f"bool [{self.ids.shape[1]}]",
                got=f"{self.recorded.dtype} {list(self.recorded.shape)}",
            )

    @classmethod
    def from_rows(cls, rows: npt.NDArray[Any], num_tokens: int, spec: RoutingSpec) -> Routes:
        """Routes of `num_tokens` tokens from token-major rows [R, L, K] with R <= num_tokens; missing rows are unrecorded.

        The rows are taken as checked (`r3.wire` does that); they are copied into the layer-major, narrow form.
        """
        if rows.shape[0] > num_tokens or rows.shape[1:] != (spec.num_moe_layers, spec.top_k):
            raise SampleError(
                "rows do not fit the tokens and the spec",
                expected=f"at most [{num_tokens}, {spec.num_moe_layers}, {spec.top_k}]",
                got=list(rows.shape),
            )
        ids = np.zeros((spec.num_moe_layers, num_tokens, spec.top_k), spec.dtype)
        ids[:, : rows.shape[0]] = rows.transpose(1, 0, 2)
        return cls(ids, np.arange(num_tokens) < rows.shape[0])

    @classmethod
    def empty(cls, num_tokens: int, spec: RoutingSpec) -> Routes:
        """`num_tokens` rows without a record."""
        return cls(np.zeros((spec.num_moe_layers, num_tokens, spec.top_k), spec.dtype), np.zeros(num_tokens, np.bool_))

    @property
    def num_tokens(self) -> int:
        return int(self.ids.shape[1])

    @property
    def num_recorded(self) -> int:
        return int(np.count_nonzero(self.recorded))

    def tokens(self, start: int, stop: int) -> Routes:
        """The routes of tokens start..stop-1, as views."""
        return Routes(self.ids[:, start:stop], self.recorded[start:stop])

    def layers(self, which: slice | Sequence[int]) -> Routes:
        """The routes of some MoE layers (by position on the layer axis); a slice gives a view."""
        return Routes(self.ids[which if isinstance(which, slice) else list(which)], self.recorded)

    def equal(self, other: Routes) -> bool:
        """Same record on the same rows; the ids of unrecorded rows do not count."""
        return (
            self.ids.shape == other.ids.shape
            and bool(np.array_equal(self.recorded, other.recorded))
            and bool(np.array_equal(self.ids[:, self.recorded], other.ids[:, self.recorded]))
        )

    def check(self, spec: RoutingSpec, where: str | None = None) -> None:
        """Raise unless layers, top-k, dtype and every recorded id fit the spec."""
        expected = (spec.num_moe_layers, self.num_tokens, spec.top_k)
        if self.ids.shape != expected or self.ids.dtype != spec.dtype:
            raise SampleError(
                "routes do not fit the routing spec",
                where=where,
                expected=f"{list(expected)} of {spec.dtype}",
                got=f"{list(self.ids.shape)} of {self.ids.dtype}",
            )
        if self.ids.max(initial=0) < spec.num_experts:  # 20 times as quick as the search below
            return
        bad = np.argwhere((self.ids >= spec.num_experts) & self.recorded[None, :, None])
        if len(bad):
            layer, token, slot = (int(i) for i in bad[0])
            raise SampleError(
                f"{len(bad)} expert ids are out of range",
                where=f"{where or 'routes'}: token {token}, layer {spec.moe_layers[layer]}",
                expected=f"0..{spec.num_experts - 1}",
                got=int(self.ids[layer, token, slot]),
            )


def runs_of(mask: Mask) -> tuple[tuple[int, int], ...]:
    """The runs [start, stop) of True in a mask [T]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return tuple((int(start), int(stop)) for start, stop in edges.reshape(-1, 2))
