"""Layouts against a brute-force reference: write every token's (sample, token) where the trainer would put the token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from r3 import Layout
from r3.errors import LayoutError

LENGTHS = st.lists(st.integers(0, 7), max_size=5)


def place(grid: list[list[tuple[int, int] | None]]) -> list[tuple[int, int] | None]:
    return [cell for line in grid for cell in line]


def located(layout: Layout) -> list[tuple[int, int] | None]:
    return [None if row < 0 else layout.locate_row(int(row)) for row in layout.rows]


@given(LENGTHS, st.integers(0, 3), st.sampled_from(["left", "right"]))
def test_padded(lengths, extra, side) -> None:
    width = max(lengths, default=0) + extra
    reference = []
    for sample, length in enumerate(lengths):
        tokens = [(sample, token) for token in range(length)]
        padding = [None] * (width - length)
        reference.append(padding + tokens if side == "left" else tokens + padding)
    layout = Layout.padded(lengths, width, side=side)
    assert located(layout) == place(reference)
    mask = [[cell is not None for cell in line] for line in reference]
    if lengths:
        assert np.array_equal(Layout.from_attention_mask(mask, lengths).rows, layout.rows)


@given(LENGTHS, st.integers(0, 5))
def test_packed(lengths, extra) -> None:
    reference = [(sample, token) for sample, length in enumerate(lengths) for token in range(length)]
    layout = Layout.packed(lengths, len(reference) + extra)
    assert located(layout) == reference + [None] * extra
    assert layout.gather(np.arange(sum(lengths)) * 10, fill=-7).tolist() == [
        *(10 * i for i in range(len(reference))),
        *[-7] * extra,
    ]


GRIDS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)).flatmap(
    lambda t: st.tuples(st.just(t), st.lists(st.integers(0, 2 * t[1] * t[2]), min_size=t[0], max_size=t[0]))
)


@given(GRIDS)
def test_context_parallel_slices_follow_their_definitions(grid) -> None:
    """Each rank's positions, written out; together the ranks hold every token once."""
    (batch, size, unit), lengths = grid
    width = 2 * size * unit
    layout = Layout.padded(lengths, width)
    cells = located(layout)
    lines = [cells[b * width : (b + 1) * width] for b in range(batch)]
    held = {"chunk": [], "zigzag": []}
    for rank in range(size):
        chunk = [cell for line in lines for cell in line[rank * 2 * unit : (rank + 1) * 2 * unit]]
        last = 2 * size - 1 - rank
        zigzag = [
            cell
            for line in lines
            for cell in line[rank * unit : (rank + 1) * unit] + line[last * unit : (last + 1) * unit]
        ]
        assert located(layout.chunk(rank, size, batch=batch)) == chunk
        assert located(layout.zigzag(rank, size, batch=batch)) == zigzag
        held["chunk"] += filter(None, chunk)
        held["zigzag"] += filter(None, zigzag)
    for cells_held in held.values():
        assert sorted(cells_held) == [(s, t) for s, length in enumerate(lengths) for t in range(length)]
    assert located(layout.transpose(batch)) == [line[i] for i in range(width) for line in lines]


def test_a_traced_slicer_gives_the_layout_that_describing_it_gives() -> None:
    layout = Layout.padded([5, 8], 8, side="left")

    def as_megatron_cuts(numbers) -> object:  # get_batch_on_this_cp_rank of rank 1 of 2, then sequence first
        parts = torch.as_tensor(numbers).view(2, 4, 2)
        return parts.index_select(1, torch.tensor([1, 2])).reshape(2, 4).T

    traced = layout.trace(as_megatron_cuts, (2, 8))
    assert located(traced) == located(layout.zigzag(1, 2, batch=2).transpose(2))
    padded = layout.trace(lambda numbers: np.pad(numbers.ravel(), (0, 3), constant_values=-1), (2, 8))
    assert located(padded) == [*located(layout), None, None, None]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.padded([3, 9], 8), "sample 1 of the micro-batch: a sample is longer than its line"),
        (lambda: Layout.padded([3], side="up"), "unknown side"),
        (lambda: Layout.packed([3, 9], 8), "do not fit the packed row"),
        (lambda: Layout.from_attention_mask([[1, 1, 0]], [3]), "line 0: the attention mask does not fit"),
        (lambda: Layout.from_attention_mask([[1, 1, 0]], [2, 2]), "line 1: the attention mask does not fit"),
        (lambda: Layout(np.array([0, 5]), (3,)), "a row that no sample has"),
        (lambda: Layout(np.array([-2, 0]), (3,)), "a row that no sample has"),
        (lambda: Layout(np.array([0, 3, 3]), (2, 3)), "sample 1, token 1: a token stands at two positions"),
        (lambda: Layout(np.zeros((2, 2), np.int64), (3,)), "a layout is one vector"),
        (lambda: Layout.packed([6]).zigzag(0, 2), "lines cannot be cut so"),
        (lambda: Layout.packed([6]).chunk(2, 2), "lines cannot be cut so"),
        (lambda: Layout.packed([6]).transpose(4), "do not make equal lines"),
        (lambda: Layout.packed([6]).select([6]), "not positions of this layout"),
        (lambda: Layout.packed([6]).select([0.5]), "not positions of this layout"),
        (lambda: Layout.packed([6]).select([2, 2]), "a token stands at two positions"),
    ],
)
def test_what_does_not_fit_is_refused(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
