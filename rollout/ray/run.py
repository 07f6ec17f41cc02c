"""run: what `RolloutPool.run` returns, the consumer's end of a run."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from r3.rollout.collector import CollectReport, Failure
from r3.rollout.ray.dispatch import Dispatch
from r3.rollout.ray.flow import Flow
from r3.rollout.ray.results import Committed

_POLL_S = 0.01  # of an asynchronous consumer, while nothing is there


class Run:
    """Committed samples as they come; of one consumer. Asking for the next one says that the last one is consumed.

    It ends when every sample was yielded or is in `failures`, or after `close`; a run that was ended by anything else (another
    run of the pool, the end of the pool, the loss of all workers) raises.

    Attributes:
        failures: Samples that were given up until now, with all causes.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        present: list[Committed],
        flow: Flow,
        loop: asyncio.AbstractEventLoop,
        close: Callable[[], None],
    ) -> None:
        self._dispatch, self._present, self._flow, self._loop = dispatch, iter(present), flow, loop
        self._close = close
        self._held: int | None = None
        self._ended: BaseException | bool = False
        self._begin = time.monotonic()
        self._seconds: float | None = None

    def __iter__(self) -> Iterator[Committed]:
        return self

    def __next__(self) -> Committed:
        sample = self._present_one()
        if sample is None and not self._ended:
            sample = self._taken(self._dispatch.results.get())
        if sample is None:
            raise StopIteration
        return sample

    def __aiter__(self) -> AsyncIterator[Committed]:
        return self

    async def __anext__(self) -> Committed:
        """May be cancelled, as by asyncio.wait_for: a thread that waited in its place would take a sample that nobody gets."""
        sample = self._present_one()
        while sample is None and not self._ended:
            try:
                sample = self._taken(self._dispatch.results.get_nowait())
            except queue.Empty:
                await asyncio.sleep(_POLL_S)
        if sample is None:
            raise StopAsyncIteration
        return sample

    def _present_one(self) -> Committed | None:
        """The next that was there already, until there is none."""
        self._release()
        if isinstance(self._ended, BaseException):
            raise self._ended
        return None if self._ended else next(self._present, None)

    def _taken(self, answer: Committed | BaseException | None) -> Committed | None:
        if isinstance(answer, Committed):
            self._held = answer.bytes
            return answer
        self._ended, self._seconds = answer or True, time.monotonic() - self._begin
        if answer is not None:
            raise answer
        return None

    def _release(self) -> None:
        if self._held is not None:
            size, self._held = self._held, None
            with contextlib.suppress(RuntimeError):  # the pool was left, and its loop is closed
                self._loop.call_soon_threadsafe(self._freed, size)

    def _freed(self, size: int) -> None:
        self._flow.give(size)
        self._dispatch.pump()

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(self._dispatch.failures)

    def report(self) -> CollectReport:
        """Counts, as of `r3.rollout.collector.collect`; `present` also has those that another writer was first with."""
        counts = self._dispatch.counts
        return CollectReport(
            counts.asked,
            counts.present,
            counts.written,
            self.failures,
            counts.prompt_tokens,
            counts.tokens,
            counts.bytes,
            time.monotonic() - self._begin if self._seconds is None else self._seconds,
        )

    @property
    def retries(self) -> int:
        """How often a sample was asked for again."""
        return self._dispatch.counts.retries

    def close(self) -> None:
        """End the run before its end: what is in flight is cancelled; a later run asks for what is missing."""
        if not self._loop.is_closed():
            self._close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
