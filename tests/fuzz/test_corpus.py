"""What the fuzzers kept, replayed: inputs that reached new code, and every input that once crashed.

`corpus/*.hex` has one input a line, written by `corpus.py`; the fuzzers themselves are not needed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from corpus import kept, seeds
from targets import decode_one, load_one

TARGETS: dict[str, Callable[[bytes], bool]] = {"wire": decode_one, "shard": load_one}


@pytest.mark.parametrize("kind", TARGETS)
def test_nothing_that_was_found_crashes_or_is_garbage(kind: str) -> None:
    inputs = kept(kind)
    assert len(inputs) > 20
    for data in inputs:
        TARGETS[kind](data)


@pytest.mark.parametrize("kind", TARGETS)
def test_the_seeds_are_accepted(kind: str) -> None:
    """So that the fuzzers begin behind the checks, and not in front of them."""
    refused = [name for name, data in seeds(kind).items() if not TARGETS[kind](data)]
    assert refused == []


@pytest.mark.parametrize("kind", TARGETS)
def test_every_cut_and_every_flipped_bit_of_a_seed(kind: str) -> None:
    for data in list(seeds(kind).values())[::7]:
        for i in range(0, len(data), 1 + len(data) // 60):
            TARGETS[kind](data[:i])
            TARGETS[kind](data[:i] + bytes([data[i] ^ 1 << i % 8]) + data[i + 1 :])
