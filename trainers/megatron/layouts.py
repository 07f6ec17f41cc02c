"""How Megatron-core cuts the tokens of a micro-batch, as layouts.

    global batch -> micro-batch [b, s] (SBHD) or [1, t] (packed, THD), padded -> this context-parallel rank's part
                 -> the router's rows: sequence first, [s, b], and under sequence parallelism this TP rank's part of s

Contract: a layout given to `MegatronReplay.micro_batch` describes this rank's *token tensor*: after padding and after the
context-parallel cut, row-major, before tensor and sequence parallelism. `router_rows` does the last step, and r3 calls it
itself. Cuts that Megatron makes in one of its own functions can be traced through that function instead (`on_this_cp_rank`,
`Layout.trace`). tests/test_megatron_layouts.py holds all of it against loops over tokens that are obviously right.

Micro-batches of different sizes (dynamic batches) need nothing: each has a layout of its own.

b lines, s positions of a line, t packed positions, n sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from r3.errors import LayoutError
from r3.layout import PADDING, Layout


def sbhd(lengths: Sequence[int], *, width: int | None = None, side: str = "right", multiple: int = 1) -> Layout:
    """[b, s] with one sample a line.

    Args:
        width: s before rounding; the longest sample's length if None.
        side: Where the padding is, `right` or `left`.
        multiple: s is rounded up to it: TP size under sequence parallelism, times 2 x CP size; 16 (FP8), 32 (MXFP8).

    Raises:
        LayoutError: a sample is longer than `width`.
    """
    wanted = max(lengths, default=0) if width is None else width
    return Layout.padded(lengths, _round_up(wanted, multiple), side=side)


class Packed(NamedTuple):
    """A packed micro-batch [1, t] (THD).

    Attributes:
        layout: t positions.
        cu_seqlens: [n + 1] int32, bounds of the sequences without padding, as if packed without any.
        cu_seqlens_padded: [n + 1] int32, where each sequence begins in the tensor; the last entry is t.
    """

    layout: Layout
    cu_seqlens: npt.NDArray[np.int32]
    cu_seqlens_padded: npt.NDArray[np.int32]


def thd(lengths: Sequence[int], *, multiple: int = 1, total_multiple: int = 1) -> Packed:
    """Samples one after another, each padded at its end.

    Args:
        multiple: Each sequence's length is rounded up to it: TP size x CP size x 2 (zigzag).
        total_multiple: t is rounded up to it as well (FP8: 16 or 32 for each of TP x CP ranks, 128 for block scaling); the
            last sequence is lengthened, as cu_seqlens must cover t.
    """
    lengths = tuple(int(n) for n in lengths)
    padded = [_round_up(n, multiple) for n in lengths]
    if padded:
        padded[-1] += _round_up(sum(padded), math.lcm(multiple, total_multiple)) - sum(padded)
    bounds = np.concatenate([[0], np.cumsum(padded)]).astype(np.int32)
    plain = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = np.full(int(bounds[-1]), PADDING, np.int64)
    for begin, first, length in zip(bounds[:-1], plain[:-1], lengths, strict=True):
        rows[begin : begin + length] = np.arange(first, first + length)
    return Packed(Layout(rows, lengths, 1), plain, bounds)


def context_parallel(
    layout: Layout, rank: int, size: int, *, cut: str = "zigzag", cu_seqlens_padded: npt.ArrayLike | None = None
) -> Layout:
    """This context-parallel rank's part of a micro-batch.

    Args:
        layout: Of the whole micro-batch, with its `lines`.
        cut: `zigzag`: parts r and 2c-1-r of 2c parts of each line (`get_batch_on_this_cp_rank`), or of each packed sequence
            (Transformer Engine's `thd_get_partitioned_indices`). `contiguous`: part r of c parts of each line; packed, of
            the whole buffer.
        cu_seqlens_padded: [n + 1] of a packed micro-batch.

    Raises:
        LayoutError: a line or a sequence that cannot be cut into so many equal parts.
    """
    if cut not in ("zigzag", "contiguous"):
        raise LayoutError("unknown cut of context parallelism", expected="zigzag or contiguous", got=cut)
    lines = _lines_of(layout)
    if size == 1:
        return layout
    if cut == "contiguous":
        return layout.chunk(rank, size, batch=lines)
    if cu_seqlens_padded is None:
        return layout.zigzag(rank, size, batch=lines)
    bounds = np.asarray(cu_seqlens_padded, np.int64).ravel()
    if lines != 1 or bounds[0] != 0 or bounds[-1] != layout.num_positions or (np.diff(bounds) < 0).any():
        raise LayoutError(
            "cu_seqlens_padded are not the bounds of this packed micro-batch",
            expected=f"ascending from 0 to {layout.num_positions}, one line",
            got=f"{bounds.tolist()}, {lines} lines",
        )
    parts = []
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if (end - begin) % (2 * size):
            raise LayoutError(
                "a packed sequence cannot be cut zigzag",
                where=f"sequence {number} of the micro-batch",
                expected=f"a padded length that is a multiple of {2 * size}",
                got=int(end - begin),
                remedy="pad each sequence first, as the trainer does: thd(lengths, multiple=2 * cp_size * tp_size)",
            )
        quarter = (end - begin) // (2 * size)
        for part in (rank, 2 * size - 1 - rank):
            parts.append(np.arange(begin + part * quarter, begin + (part + 1) * quarter))
    return layout.select(np.concatenate([*parts, np.zeros(0, np.int64)])[None])


def on_this_cp_rank(layout: Layout, cp_group: Any = None) -> Layout:
    """The same for [b, s], traced through Megatron-core's own `get_batch_on_this_cp_rank`.

    Args:
        layout: Of the whole micro-batch, with its `lines`.
        cp_group: The process group; Megatron's global one if None.
    """
    import torch
    from megatron.core.utils import get_batch_on_this_cp_rank

    def cut(positions: npt.NDArray[np.int64]) -> npt.ArrayLike:
        group = {} if cp_group is None else {"cp_group": cp_group}
        local: torch.Tensor = get_batch_on_this_cp_rank({"tokens": torch.from_numpy(positions)}, **group)["tokens"]
        return local.cpu().numpy()

    lines = _lines_of(layout)
    return layout.trace(cut, (lines, layout.num_positions // lines))


def router_rows(layout: Layout, *, tp_rank: int = 0, tp_size: int = 1) -> Layout:
    """The rows of this rank's routers: positions of [s, b], and of these the TP rank's part of s.

    Args:
        layout: Of this rank's token tensor, with its `lines`.
        tp_rank, tp_size: Under sequence parallelism; 0 of 1 without.

    Raises:
        LayoutError: s is not a multiple of `tp_size`.
    """
    lines = _lines_of(layout)
    width = layout.num_positions // lines
    if width % tp_size:
        raise LayoutError(
            "the sequence cannot be cut over the tensor-parallel ranks",
            expected=f"a multiple of {tp_size} positions a line (sequence parallelism)",
            got=width,
            remedy="pad the micro-batch to a multiple first, as Megatron asks",
        )
    sequence_first = layout if lines == 1 else layout.transpose(lines)
    return sequence_first if tp_size == 1 else sequence_first.chunk(tp_rank, tp_size)


def _lines_of(layout: Layout) -> int:
    if layout.lines is None:
        raise LayoutError(
            "how many lines the token tensor has is not known",
            where=f"a layout of {layout.num_positions} positions",
            expected="lines=b for tokens [b, s], 1 for packed tokens [1, t]",
            remedy="dataclasses.replace(layout, lines=b), or give token_ids as [b, s]",
        )
    return layout.lines


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
