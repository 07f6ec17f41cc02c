"""How Megatron cuts tokens, as layouts, against loops over tokens that are obviously right; and against its own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from r3 import Layout
from r3.errors import LayoutError
from r3.trainers.megatron import layouts

few = settings(max_examples=40, deadline=None)
sample_lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
Rows = list[int]


def up(number: int, multiple: int) -> int:
    while number % multiple:
        number += 1
    return number


def lines(lengths: list[int], width: int, side: str) -> list[Rows]:
    out, row = [], 0
    for length in lengths:
        held = list(range(row, row + length))
        padding = [-1] * (width - length)
        out.append(held + padding if side == "right" else padding + held)
        row += length
    return out


def zigzag(line: Rows, rank: int, size: int) -> Rows:
    part = len(line) // (2 * size)
    return [*line[rank * part : (rank + 1) * part], *line[(2 * size - 1 - rank) * part : (2 * size - rank) * part]]


def routed(local: list[Rows], tp_rank: int, tp: int) -> Rows:
    """[s, b] of [b, s], then the rank's part of s."""
    width = len(local[0])
    part = width // tp
    return [local[b][s] for s in range(tp_rank * part, (tp_rank + 1) * part) for b in range(len(local))]


@given(
    sample_lengths, st.sampled_from(["left", "right"]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.data()
)
@few
def test_sbhd(lengths: list[int], side: str, cp: int, tp: int, data: Any) -> None:
    multiple = 2 * cp * tp
    width = up(max(lengths), multiple)
    whole = lines(lengths, width, side)
    cp_rank, tp_rank = data.draw(st.integers(0, cp - 1)), data.draw(st.integers(0, tp - 1))
    layout = layouts.sbhd(lengths, side=side, multiple=multiple)
    assert layout.rows.reshape(len(lengths), width).tolist() == whole
    for cut in ("zigzag", "contiguous"):
        if cp == 1:
            local = whole
        elif cut == "zigzag":
            local = [zigzag(line, cp_rank, cp) for line in whole]
        else:
            part = width // cp
            local = [line[cp_rank * part : (cp_rank + 1) * part] for line in whole]
        mine = layouts.context_parallel(layout, cp_rank, cp, cut=cut)
        assert mine.rows.tolist() == [row for line in local for row in line]
        assert mine.lines == len(lengths)
        assert layouts.router_rows(mine, tp_rank=tp_rank, tp_size=tp).rows.tolist() == routed(local, tp_rank, tp)


@given(sample_lengths, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([1, 16, 32]), st.data())
@few
def test_thd(lengths: list[int], cp: int, tp: int, total: int, data: Any) -> None:
    multiple = tp * cp * 2
    padded = [up(n, multiple) for n in lengths]
    while sum(padded) % total or padded[-1] % multiple:
        padded[-1] += 1
    sequences, row = [], 0
    for length, size in zip(lengths, padded, strict=True):
        sequences.append(list(range(row, row + length)) + [-1] * (size - length))
        row += length
    packed = layouts.thd(lengths, multiple=multiple, total_multiple=total)
    buffer = [row for sequence in sequences for row in sequence]
    assert packed.layout.rows.tolist() == buffer
    assert packed.cu_seqlens_padded.tolist() == [0, *np.cumsum(padded)]
    assert packed.cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
    cp_rank, tp_rank = data.draw(st.integers(0, cp - 1)), data.draw(st.integers(0, tp - 1))
    mine = layouts.context_parallel(packed.layout, cp_rank, cp, cu_seqlens_padded=packed.cu_seqlens_padded)
    local = [row for sequence in sequences for row in (zigzag(sequence, cp_rank, cp) if cp > 1 else sequence)]
    assert mine.rows.tolist() == local
    assert mine.lines == 1
    assert layouts.router_rows(mine, tp_rank=tp_rank, tp_size=tp).rows.tolist() == routed([local], tp_rank, tp)
    contiguous = layouts.context_parallel(packed.layout, cp_rank, cp, cut="contiguous")
    part = len(buffer) // cp
    assert contiguous.rows.tolist() == buffer[cp_rank * part : (cp_rank + 1) * part]


@given(sample_lengths, st.sampled_from([1, 2, 4]))
@few
def test_every_token_stands_on_one_rank_once(lengths: list[int], cp: int) -> None:
    packed = layouts.thd(lengths, multiple=2 * cp * 2)
    seen: list[int] = []
    for rank in range(cp):
        mine = layouts.context_parallel(packed.layout, rank, cp, cu_seqlens_padded=packed.cu_seqlens_padded)
        for tp_rank in range(2):
            rows = layouts.router_rows(mine, tp_rank=tp_rank, tp_size=2).rows
            seen += rows[rows >= 0].tolist()
    assert sorted(seen) == list(range(sum(lengths)))


def test_fp8_padding_of_verl() -> None:
    """Per sequence to lcm(16, TP x CP x 2), in all to 128 of these: its preprocess_thd_engine."""
    packed = layouts.thd([5, 40, 17], multiple=16, total_multiple=4 * 128)
    assert packed.cu_seqlens_padded.tolist() == [0, 16, 64, 512]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layouts.context_parallel(Layout.padded([5, 5]), 0, 2), "lines cannot be cut so"),
        (lambda: layouts.context_parallel(Layout.padded([4]), 0, 2, cut="ring"), "unknown cut"),
        (
            lambda: layouts.context_parallel(Layout.packed([5, 3]), 0, 2, cu_seqlens_padded=[0, 5, 8]),
            "a packed sequence cannot be cut zigzag",
        ),
        (
            lambda: layouts.context_parallel(Layout.packed([4, 4]), 0, 2, cu_seqlens_padded=[0, 4]),
            "are not the bounds of this packed micro-batch",
        ),
        (lambda: layouts.router_rows(Layout.padded([5, 5]), tp_size=2), "cannot be cut over the tensor-parallel ranks"),
        (lambda: layouts.router_rows(Layout(np.arange(4), (4,))), "how many lines the token tensor has is not known"),
        (lambda: layouts.sbhd([5], width=4), "longer than its line"),
    ],
)
def test_cuts_that_cannot_be_made(call: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        call()


def test_a_layout_knows_its_lines() -> None:
    layout = Layout.padded([3, 2], 4)
    assert layout.lines == 2
    assert layout.transpose(2).lines == 4
    assert layout.chunk(0, 2, batch=2).lines == 2
    assert layout.zigzag(0, 2, batch=2).lines == 2
    assert layout.select([0, 1]).lines is None
    assert layout.trace(lambda p: p[:, 1:], (2, 4)).lines == 2
    assert Layout.packed([3]).lines == 1
    with pytest.raises(LayoutError, match="equal lines"):
        Layout(np.arange(5), (5,), 2)


@pytest.mark.engine
@pytest.mark.parametrize("rank", [0, 1])
def test_traced_through_megatrons_own_function(rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        layout = layouts.sbhd([9, 12, 5], multiple=8)
        described = layouts.context_parallel(layout, rank, 2)
        traced = layouts.on_this_cp_rank(layout, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert np.array_equal(traced.rows, described.rows)
    assert traced.lines == described.lines == 3
    assert not np.array_equal(traced.rows, layouts.context_parallel(layout, 1 - rank, 2).rows)
