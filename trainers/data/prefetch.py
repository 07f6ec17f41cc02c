"""Prefetcher: reads ahead in threads, as far as a budget of bytes allows, and gives the results in order.

A count of items is no bound: one step has samples of 100 KB and of 40 MB. So each item says its size before its bulk is read, and
takes that much of the budget; it gives it back when the consumer takes the item. What is held is never more than the budget and
the item in the consumer's hands. One that is larger than the whole budget is read alone.

Contract: results and errors come in the order of the items, an error with the item's name, after all results before it. `close`
(or leaving the `with` block, or dropping the last reference) ends the threads; what they are reading is finished and thrown away.
No thread is started before the first result is asked for, so a Prefetcher may be made before a fork.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from r3.errors import ConfigError, R3Error, StoreError

T = TypeVar("T")
V = TypeVar("V")
Stage = Callable[[T], "tuple[int, Callable[[], V]]"]
LEAST = 4096  # bytes that an item counts at least: objects around small arrays


class Prefetcher(Generic[T, V]):
    """An iterator over the results of `items`.

    Args:
        items: What is to be read; taken from in one thread at a time.
        stage: Called in a thread with an item. Returns the bytes that its result will hold, and a function without arguments that
            reads it, which is called in the same thread once the budget has room.
        budget: Bytes that may be held ahead of the consumer.
        threads: How many items are read at once.
        name: What an item is called in errors.

    Raises:
        ConfigError: no budget, or no thread.
        R3Error: what `stage` or reading raised, at its item; errors of other kinds arrive as StoreError.
    """

    def __init__(
        self,
        items: Iterable[T],
        stage: Callable[[T], tuple[int, Callable[[], V]]],
        *,
        budget: int,
        threads: int = 4,
        name: Callable[[T], str] = str,
    ) -> None:
        if budget < 1 or threads < 1:
            raise ConfigError("a prefetcher needs a budget and a thread", got=f"{budget} bytes, {threads} threads")
        self._shared: _Shared[T, V] = _Shared(iter(items), stage, budget, name)
        self._threads: list[threading.Thread] = []
        self._num_threads = threads
        # The threads know the shared state alone: an iterator that nobody holds any more is collected, and they end.
        self._finalizer = weakref.finalize(self, _Shared.stop, self._shared)

    def __iter__(self) -> Iterator[V]:
        return self

    def __next__(self) -> V:
        if not self._threads and not self._shared.stopped:
            for number in range(self._num_threads):
                thread = threading.Thread(target=_work, args=(self._shared,), name=f"r3-prefetch-{number}", daemon=True)
                self._threads.append(thread)
                thread.start()
        try:
            return self._shared.take()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Prefetcher[T, V]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and forget what was read ahead. Waits for reads that are under way."""
        self._shared.stop()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    @property
    def held(self) -> int:
        """Bytes that are held or being read, ahead of the consumer."""
        return self._shared.held

    @property
    def peak(self) -> int:
        """The most that was held so far."""
        return self._shared.peak


class _Shared(Generic[T, V]):
    def __init__(
        self,
        source: Iterator[T],
        stage: Callable[[T], tuple[int, Callable[[], V]]],
        budget: int,
        name: Callable[[T], str],
    ) -> None:
        self.source, self.stage, self.budget, self.name = source, stage, budget, name
        self.taking = threading.Lock()  # of the source: held while it thinks, which may be long
        self.changed = threading.Condition()
        self.done: dict[int, tuple[int, Any, BaseException | None]] = {}  # by number: size, result, error
        self.issued = self.admitted = self.given = 0  # items taken from the source, let into the budget, given out
        self.held = self.peak = 0
        self.exhausted = self.stopped = False

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.done.clear()
            self.held = 0
            self.changed.notify_all()

    def next_item(self) -> tuple[int, T] | None:
        """The next item of the source, with its number; None after the last. An error of the source itself is an item's error."""
        with self.taking:
            if self.stopped or self.exhausted:
                return None
            try:
                item = next(self.source)
            except StopIteration:
                with self.changed:
                    self.exhausted = True
                    self.changed.notify_all()
                return None
            except BaseException as error:
                with self.changed:
                    self.exhausted = True
                    number, self.issued = self.issued, self.issued + 1
                self.admit(number, 0)
                self.put(number, 0, None, error)
                return None
            with self.changed:
                number, self.issued = self.issued, self.issued + 1
            return number, item

    def admit(self, number: int, size: int) -> bool:
        """Wait until it is this item's turn and there is room; False if all is over.

        In turn: were a later item let in first, the budget could be full of items that wait for this one.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self.stopped
                    or (self.admitted == number and (self.held == 0 or self.held + size <= self.budget or size == 0))
                )
            )
            if self.stopped:
                return False
            self.admitted += 1
            self.held += size
            self.peak = max(self.peak, self.held)
            self.changed.notify_all()
            return True

    def put(self, number: int, size: int, result: Any, error: BaseException | None) -> None:
        with self.changed:
            if not self.stopped:
                self.done[number] = (size, result, error)
                self.changed.notify_all()

    def take(self) -> V:
        with self.changed:
            self.changed.wait_for(
                lambda: self.stopped or self.given in self.done or (self.exhausted and self.given == self.issued)
            )
            if self.stopped or self.given not in self.done:
                raise StopIteration
            size, result, error = self.done.pop(self.given)
            self.given += 1
            self.held -= size
            self.changed.notify_all()
        if error is not None:
            raise error
        value: V = result
        return value


def _work(shared: _Shared[T, V]) -> None:
    while (turn := shared.next_item()) is not None:
        number, item = turn
        try:
            size, read = shared.stage(item)
        except BaseException as error:
            if shared.admit(number, 0):
                shared.put(number, 0, None, _named(error, shared.name(item)))
            continue
        size = max(size, LEAST)
        if not shared.admit(number, size):
            return
        try:
            result = read()
        except BaseException as error:
            shared.put(number, size, None, _named(error, shared.name(item)))
        else:
            shared.put(number, size, result, None)
        item = read = result = None  # type: ignore[assignment]  # not kept while waiting for the next


def _named(error: BaseException, name: str) -> BaseException:
    if isinstance(error, R3Error):
        return error if name in (error.where or "") else error.at(name)
    if not isinstance(error, Exception):
        return error
    named = StoreError(f"cannot be read ({type(error).__name__}: {error})", where=name)
    named.__cause__ = error
    return named
