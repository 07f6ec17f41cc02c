"""Layout: which token of which sample each row of a micro-batch holds, on one rank.

A trainer pads, packs, slices and permutes tokens before a router sees them. Here all of that is one int64 vector: entry i
is the row of local position i in the *concatenation* of the micro-batch's samples, or -1 where position i holds no token
(padding). Local positions are in the order in which the router sees its rows: for transformers' [batch, width] that is
row-major. Whoever has the vector has the routes' rows, the tokens to compare with, and the name of any bad position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import LayoutError

PADDING = -1


@dataclass(frozen=True, eq=False)
class Layout:
    """Rows of one micro-batch.

    Attributes:
        rows: [local positions] int64, index into the concatenated samples or -1.
        lengths: Tokens of each sample, in the order of the concatenation.
        lines: b, where the positions are those of a [b, width] tensor in row-major order; None if nobody said.

    Raises:
        LayoutError: rows outside the samples, a row that stands twice, or lines of unequal width.
    """

    rows: npt.NDArray[np.int64]
    lengths: tuple[int, ...]
    lines: int | None = None

    def __post_init__(self) -> None:
        total = sum(self.lengths)
        if self.rows.ndim != 1 or self.rows.dtype != np.int64:
            raise LayoutError(
                "a layout is one vector", expected="[positions] int64", got=f"{list(self.rows.shape)} {self.rows.dtype}"
            )
        if self.lines is not None:
            self._lines(self.lines)
        held = self.rows[self.rows >= 0]
        if len(self.rows) and (self.rows.min() < PADDING or self.rows.max() >= total):
            raise LayoutError(
                "a layout names a row that no sample has",
                expected=f"-1..{total - 1}",
                got=f"{self.rows.min()}..{self.rows.max()}",
            )
        counts = np.bincount(held, minlength=total)
        if counts.size and counts.max() > 1:
            sample, token = self.locate_row(int(counts.argmax()))
            raise LayoutError(
                "a token stands at two positions",
                where=f"sample {sample}, token {token}",
                expected="one position",
                got=int(counts.max()),
            )

    @classmethod
    def padded(cls, lengths: Sequence[int], width: int | None = None, *, side: str = "right") -> Layout:
        """[batch, width] with one sample a line, `side` ("right" or "left") the side of the padding.

        Args:
            width: Positions per line; the longest sample's length if None.

        Raises:
            LayoutError: a sample does not fit.
        """
        lengths = tuple(int(n) for n in lengths)
        width = max(lengths, default=0) if width is None else width
        if side not in ("left", "right"):
            raise LayoutError("unknown side of padding", expected="left or right", got=side)
        rows = np.full((len(lengths), width), PADDING, np.int64)
        first = 0
        for line, length in enumerate(lengths):
            if length > width:
                raise LayoutError(
                    "a sample is longer than its line",
                    where=f"sample {line} of the micro-batch",
                    expected=f"at most {width}",
                    got=length,
                )
            begin = 0 if side == "right" else width - length
            rows[line, begin : begin + length] = np.arange(first, first + length)
            first += length
        return cls(rows.ravel(), lengths, len(lengths) or None)

    @classmethod
    def packed(cls, lengths: Sequence[int], total: int | None = None) -> Layout:
        """All samples one after another (THD, `cu_seqlens`), padded at the end to `total` positions."""
        lengths = tuple(int(n) for n in lengths)
        used = sum(lengths)
        total = used if total is None else total
        if used > total:
            raise LayoutError("the samples do not fit the packed row", expected=f"at most {total} tokens", got=used)
        rows = np.full(total, PADDING, np.int64)
        rows[:used] = np.arange(used)
        return cls(rows, lengths, 1)

    @classmethod
    def from_attention_mask(cls, mask: npt.ArrayLike, lengths: Sequence[int]) -> Layout:
        """[batch, width] with one sample a line, tokens where the mask is not 0.

        Raises:
            LayoutError: a line of the mask has another number of tokens than its sample.
        """
        held = np.asarray(mask) != 0
        lengths = tuple(int(n) for n in lengths)
        counts = tuple(int(n) for n in held.sum(axis=1))
        if counts != lengths:
            line = next((i for i, (got, want) in enumerate(zip(counts, lengths, strict=False)) if got != want), None)
            line = min(len(counts), len(lengths)) if line is None else line
            raise LayoutError(
                "the attention mask does not fit the samples",
                where=f"line {line}",
                expected=f"{lengths[line]} tokens" if line < len(lengths) else f"{len(lengths)} lines",
                got=f"{counts[line]} tokens" if line < len(counts) else f"{len(counts)} lines",
                remedy="give the samples in the order of the batch, each cut like its tokens (RolloutSample.truncate)",
            )
        rows = np.full(held.shape, PADDING, np.int64)
        rows[held] = np.arange(sum(lengths))
        return cls(rows.ravel(), lengths, len(lengths) or None)

    def select(self, positions: npt.ArrayLike) -> Layout:
        """The layout after a slice or permutation: local position i is what stood at `positions[i]`, -1 for new padding.

        Args:
            positions: Integers of any shape, read in row-major order; of two dimensions, they are the new lines.

        Raises:
            LayoutError: a position that this layout does not have.
        """
        shape = np.shape(positions)
        index = np.asarray(positions).ravel()
        if index.dtype.kind not in "iu" or (
            index.size and (index.min() < PADDING or index.max() >= self.num_positions)
        ):
            raise LayoutError(
                "not positions of this layout",
                expected=f"integers in -1..{self.num_positions - 1}",
                got=f"{index.dtype} {index.min()}..{index.max()}" if index.size else str(index.dtype),
            )
        lines = shape[0] if len(shape) == 2 and shape[0] else None
        return Layout(np.where(index >= 0, np.append(self.rows, PADDING)[index], PADDING), self.lengths, lines)

    def trace(self, slicer: Callable[[npt.NDArray[np.int64]], npt.ArrayLike], shape: tuple[int, ...]) -> Layout:
        """The layout after the trainer's own slicing function, found by pushing position numbers through it.

        Instead of describing what a trainer does to its `input_ids`, do it to the numbers 0..n-1 and read off where each
        went. Use this wherever the slicing is somebody else's code.

        Args:
            slicer: Takes int64 position numbers of `shape`, returns the local ones (any shape, row-major in the order in
                which the router sees them; a torch tensor is fine). Padding that it adds must be -1.
            shape: Shape of the full `input_ids`.
        """
        return self.select(slicer(np.arange(self.num_positions, dtype=np.int64).reshape(shape)))

    def chunk(self, rank: int, size: int, *, batch: int = 1) -> Layout:
        """Rank's contiguous part of each of `batch` lines: sequence parallelism, Ulysses, contiguous context parallelism.

        Raises:
            LayoutError: the lines cannot be cut into `size` equal parts.
        """
        return self._parts(batch, size, [rank])

    def zigzag(self, rank: int, size: int, *, batch: int = 1) -> Layout:
        """Rank's parts `rank` and `2 size - 1 - rank` of 2 size parts of each line: load-balanced context parallelism, as
        Megatron-core's `get_batch_on_this_cp_rank` and ring attention cut (for packed rows, cut each sequence so: `trace`).

        Raises:
            LayoutError: the lines cannot be cut into `2 size` equal parts.
        """
        return self._parts(batch, 2 * size, [rank, 2 * size - 1 - rank])

    def transpose(self, batch: int) -> Layout:
        """[batch, width] seen as [width, batch]: Megatron's routers see the sequence first."""
        return self.select(self._lines(batch).T)

    def _lines(self, batch: int) -> npt.NDArray[np.int64]:
        if batch < 1 or self.num_positions % batch:
            raise LayoutError(
                "positions do not make equal lines", expected=f"a multiple of {batch}", got=self.num_positions
            )
        return np.arange(self.num_positions, dtype=np.int64).reshape(batch, -1)

    def _parts(self, batch: int, parts: int, chosen: list[int]) -> Layout:
        lines = self._lines(batch)
        width = lines.shape[1]
        if width % parts or not 0 <= chosen[0] < parts:
            raise LayoutError(
                "lines cannot be cut so",
                expected=f"a width that is a multiple of {parts}, and a rank of these",
                got=f"width {width}, part {chosen[0]}",
                remedy="pad the micro-batch to a multiple first, as the trainer does",
            )
        cut = lines.reshape(batch, parts, width // parts)
        return self.select(cut[:, chosen].reshape(batch, -1))

    @property
    def num_positions(self) -> int:
        return len(self.rows)

    def locate_row(self, row: int) -> tuple[int, int]:
        """(sample, token) of a row of the concatenation."""
        ends = np.cumsum(self.lengths)
        sample = int(np.searchsorted(ends, row, side="right"))
        return sample, row - int(ends[sample] - self.lengths[sample])

    def gather(self, concatenated: npt.NDArray[Any], *, fill: Any) -> npt.NDArray[Any]:
        """Per-token values [total, ...] as this layout places them: [positions, ...], `fill` where there is no token."""
        out = np.full((self.num_positions, *concatenated.shape[1:]), fill, concatenated.dtype)
        held = self.rows >= 0
        out[held] = concatenated[self.rows[held]]
        return out
