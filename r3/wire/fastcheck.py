"""fastcheck: are the ids of every token and layer distinct, and rows into layer-major order, at the speed of memory.

A 16k-token sample of 48 layers and top-8 is 6.3 MB and 22 million pairs of ids, and every sample of a rollout is checked,
so this is the hot loop of the whole decoder. Python's only fast instruction here is a numpy operation over a long contiguous
array; so the ids are compared with *themselves, shifted by one, two, ... K-1 places*. A shift by i compares slot j of a token
with its slot j + i (for j < K - i) and, in the other places, with slots of the next token, which mean nothing. The comparisons
are ANDed over all tokens, slot by slot, before the meaningless places are dropped: two operations a shift, no index, no sort.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 21  # ids compared at a time: a scratch of 2 MB, and few calls
_TILE = 512  # groups of K ids whose slots are ANDed side by side where K ids are no machine word
_ROWS = 256  # rows reordered at a time: their cache lines are still there when the next layer wants its part of them


def peak_if_distinct(ids: npt.NDArray[Any], *, zero_may_repeat: bool = False) -> int | None:
    """The largest of contiguous ids [..., K] (0 of none), or None if an id is repeated anywhere within the last axis."""
    k = ids.shape[-1]
    flat = ids.reshape(-1)
    if k == 1 or ids.size == 0:
        return int(flat.max(initial=0))
    peak = 0
    tile = _TILE * k
    block = max(1, _BLOCK // tile) * tile
    differ = np.ones(min(block, -(-flat.size // tile) * tile), np.bool_)
    for begin in range(0, flat.size, block):
        part = flat[begin : begin + block]
        size = part.size
        peak = max(peak, int(part.max()))
        if size < differ.size:
            differ = differ[: -(-size // tile) * tile]
            differ[size:] = True
        slots = _Slots(differ, k)
        zero = part == 0 if zero_may_repeat else None
        for i in range(1, k):
            found = differ[: size - i]
            np.not_equal(part[i:], part[:-i], out=found)  # 1.4 times as fast as np.equal in numpy 2.3
            if zero is not None:
                np.logical_or(found, zero[:-i], out=found)
            if not slots.all_set(k - i):
                return None
    return peak


class _Slots:
    """Groups of K booleans, ANDed over all groups."""

    def __init__(self, differ: npt.NDArray[np.bool_], k: int) -> None:
        self.k, self.as_word = k, k in (2, 4, 8)
        if self.as_word:  # a group is a machine word, the lowest byte is slot 0
            self.groups = differ.view(f"<u{k}")
            self.masks = [int.from_bytes(b"\1" * n, "little") for n in range(k + 1)]
        else:
            self.groups = differ.view(np.uint8).reshape(-1, _TILE * k)

    def all_set(self, first: int) -> bool:
        """Are the first `first` slots set in every group?"""
        common = np.bitwise_and.reduce(self.groups)
        if self.as_word:
            return int(common) & self.masks[first] == self.masks[first]
        return bool(common.reshape(-1, self.k)[:, :first].all())


def reorder(rows: npt.NDArray[Any], layers: tuple[int, ...], out: npt.NDArray[Any]) -> None:
    """Contiguous rows [R, any layers, K] into out [L, R, K], taking `layers`; both of one dtype.

    The ids of one token and layer move as one machine word where they are as long as one.
    """
    size = rows.shape[2] * rows.itemsize
    word = np.dtype(f"u{size}") if size in (1, 2, 4, 8) else np.dtype((np.void, size))
    source, target = rows.view(word)[..., 0], out.view(word)[..., 0]
    which = _as_slice(layers)
    for begin in range(0, len(source), _ROWS):
        target[:, begin : begin + _ROWS] = source[begin : begin + _ROWS, which].T


def _as_slice(layers: tuple[int, ...]) -> slice | list[int]:
    """The layers as a slice where they are evenly spaced: numpy then copies nothing in between."""
    step = layers[1] - layers[0] if len(layers) > 1 else 1
    same = layers == tuple(range(layers[0], layers[-1] + 1, step))
    return slice(layers[0], layers[-1] + 1, step) if same else list(layers)
