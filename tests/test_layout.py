"""Layouts against a brute-force reference: write every token's (sample, token) where the trainer would put the token."""

from __future__ import annotations

import numpy as np
import pytest
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
    ],
)
def test_what_does_not_fit_is_refused(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()
