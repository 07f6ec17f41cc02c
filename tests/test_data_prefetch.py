"""Prefetcher: in order, within its budget whatever the consumer does, loud, and gone when it is closed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from r3.errors import ConfigError, ShardError, StoreError
from r3.trainers.data.prefetch import LEAST, Prefetcher

MB = 2**20


def reading(size_of: Callable[[int], int], seen: dict[str, int] | None = None) -> Callable[[int], Any]:
    """A stage that gives an array of so many bytes, some items later than those after them; counts reads."""
    lock = threading.Lock()

    def stage(item: int) -> tuple[int, Callable[[], Any]]:
        size = size_of(item)

        def read() -> tuple[int, Any]:
            time.sleep(0.002 * (item % 3 == 0))
            if seen is not None:
                with lock:
                    seen["read"] = seen.get("read", 0) + 1
            return item, np.ones(size, np.uint8)

        return size, read

    return stage


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("r3-prefetch")]


@pytest.mark.parametrize("count", [0, 1, 40])
@pytest.mark.parametrize("number", [1, 4])
def test_order_and_budget(count: int, number: int) -> None:
    sizes = np.random.default_rng(0).integers(1, MB, 40)
    with Prefetcher(range(count), reading(lambda i: int(sizes[i])), budget=2 * MB, threads=number) as ahead:
        for expected, (item, array) in enumerate(ahead):
            assert (item, len(array)) == (expected, sizes[item])
            assert ahead.held <= 2 * MB
        assert ahead.peak <= 2 * MB
    assert not count or expected == count - 1
    assert threads() == []


def test_a_budget_for_many_small_items_and_for_one_that_is_larger() -> None:
    seen: dict[str, int] = {}
    with Prefetcher(range(1000), reading(lambda _: 10, seen), budget=5 * LEAST, threads=2) as ahead:
        next(ahead)
        time.sleep(0.05)
        assert seen["read"] <= 6
    with Prefetcher(range(3), reading(lambda i: [10, 5 * MB, 10][i]), budget=MB) as ahead:
        assert [item for item, _ in ahead] == [0, 1, 2]
        assert ahead.peak == 5 * MB  # alone


def test_memory_is_flat_behind_a_slow_consumer() -> None:
    """400 MB pass through a budget of 16 MB."""
    taken, most = 0, 0
    with Prefetcher(range(400), reading(lambda _: MB), budget=16 * MB, threads=8) as ahead:
        next(ahead)
        before = resident()
        for _ in ahead:
            taken += 1
            time.sleep(0.0005)
            most = max(most, resident() - before)
        assert ahead.peak <= 16 * MB
    assert taken == 399
    assert most < 48 * MB


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("in_stage", [True, False])
@pytest.mark.parametrize(
    ("raised", "kind", "where"),
    [
        (ValueError("broken"), StoreError, "item 5"),
        (ShardError("damaged", where="a/b.safetensors"), ShardError, "item 5: a/b.safetensors"),
    ],
)
def test_an_error_comes_in_its_turn_and_by_name(
    raised: Exception, kind: type[Exception], where: str, in_stage: bool
) -> None:
    def fail() -> Any:
        raise raised

    def stage(item: int) -> tuple[int, Callable[[], int]]:
        if item == 5 and in_stage:
            fail()
        return 10, fail if item == 5 else lambda: item

    got: list[int] = []
    ahead = Prefetcher(range(100), stage, budget=MB, threads=3, name=lambda item: f"item {item}")
    with pytest.raises(kind) as error:
        got += iter_to_error(ahead, got)
    assert got == [0, 1, 2, 3, 4]
    assert error.value.where == where
    assert threads() == []
    assert list(ahead) == []  # it is over


def iter_to_error(ahead: Iterator[int], got: list[int]) -> list[int]:
    for item in ahead:
        got.append(item)
    return []


def test_an_error_of_the_source() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise StoreError("the store is gone")

    ahead = Prefetcher(source(), lambda item: (1, lambda: item), budget=MB)
    assert next(ahead) == 1
    with pytest.raises(StoreError, match="the store is gone"):
        next(ahead)


def test_closing_in_the_middle_and_dropping_it() -> None:
    ahead = Prefetcher(range(10**9), reading(lambda _: MB), budget=4 * MB)
    next(ahead)
    ahead.close()
    assert (threads(), ahead.held, list(ahead)) == ([], 0, [])
    ahead = Prefetcher(range(10**9), reading(lambda _: MB), budget=4 * MB)
    next(ahead)
    running = threads()
    assert running
    del ahead
    gc.collect()
    for thread in running:
        thread.join(5)
    assert threads() == []


def test_no_thread_before_the_first_result() -> None:
    assert Prefetcher(range(3), reading(lambda _: 1), budget=MB) is not None
    assert threads() == []


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"budget": 1, "threads": 0}])
def test_no_budget_or_no_thread(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="needs a budget and a thread"):
        Prefetcher(range(3), reading(lambda _: 1), **wrong)
