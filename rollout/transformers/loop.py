"""loop: the engine's thread, what it is told and what it tells.

transformers' manager runs its loop in one thread. Requests come to it through a queue and commands (new weights, a flush) through
another, which is emptied between two steps; results leave through futures. Contract: a future is settled once, whatever ends the
request: its last token, a failed step, the end of the engine.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import InvalidStateError as _Settled
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState

from r3.errors import EngineError, R3Error, first_line
from r3.rollout.transformers.hooks import RoutedManager, Tags
from r3.rollout.transformers.keeping import RowKeeper
from r3.rollout.transformers.loading import Borrowed, longest
from r3.rollout.transformers.requests import Output, Run
from r3.spec import RoutingSpec

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class Loop:
    """transformers' manager from `start` to `close`. A context manager, synchronous and asynchronous; what enters first leaves.

    Attributes:
        name: For messages.
        evictions: Running requests that lost their blocks, since it was made.
        prefix_sharing: Whether requests share blocks; known once it has started.
        max_model_len: The longest sequence, prompt and response; known once it has started.
    """

    prefix_sharing: bool
    max_model_len: int

    def __init__(
        self, name: str, model: Any, spec: RoutingSpec, config: ContinuousBatchingConfig, *, capture: bool
    ) -> None:
        self.name, self.model, self.spec, self.capture = name, model, spec, capture
        self._config = config
        self._runs: dict[str, Run] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._manager: RoutedManager | None = None
        self._keeper: RowKeeper | None = None
        self._borrowed: Borrowed | None = None
        self._error: Exception | None = None
        self._entered = False
        self.evictions = 0

    # A context manager

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._entered = self._manager is None
        if self._entered:
            await asyncio.to_thread(self.start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._entered:
            await asyncio.to_thread(self.close)

    def start(self) -> None:
        """Make the cache, bind the routers, begin the loop."""
        if self._manager is not None:
            raise EngineError("the engine runs already", where=self.name)
        borrowed = Borrowed(self.model, self.name)
        try:
            manager = RoutedManager(
                listener=self,
                capture=self.capture,
                model=self.model,
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
                continuous_batching_config=self._config,
            )
            processor = manager._create_batch_processor()
            manager.batch_processor = processor
            cache = processor.cache
            self.prefix_sharing = bool(cache.use_prefix_sharing)
            self.max_model_len = longest(self.model.config, cache)
            if self.capture:
                slots = int(cache.num_pages) if self.prefix_sharing else 0
                self._keeper = RowKeeper(self.model, self.spec, max_tokens=cache.max_batch_tokens, slots=slots)
        except BaseException:
            borrowed.give_back()
            raise
        # A command that the loop of before did not come to was reported as failed: it must not run now.
        self._error, self._commands = None, queue.SimpleQueue()
        self._borrowed, self._manager = borrowed, manager
        manager.start()

    def close(self) -> None:
        """End the loop; requests that are under way fail. The model is as it was."""
        with self._lock:  # whoever submits has put the request where it is failed below, or finds no manager
            manager, self._manager = self._manager, None
        if manager is None:
            return
        manager.stop(block=True, hard_stop=True)
        manager.destroy()
        self._fail(self._failure(""))
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None
        if self._borrowed is not None:
            self._borrowed.give_back()
        self._borrowed = None

    @property
    def counters(self) -> dict[str, int]:
        """Requests under way; since it was started: steps, tokens that went through the model, evictions."""
        processor = self._running().batch_processor
        return {
            "running": len(self._runs),
            "steps": processor.steps,
            "tokens": processor.tokens,
            "evictions": self.evictions,
        }

    @property
    def failure(self) -> R3Error | None:
        """Why it can sample no more; None while it can."""
        return None if self._error is None else self._failure(first_line(self._error))

    def between_two_steps(self, function: Callable[[], T]) -> T:
        """Run a function in the engine's thread; returns what it returns, raises what it raises."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        with self._lock:
            manager = self._running()
            self._commands.put(run)
        manager.wake()
        while not wait([done], timeout=1.0).done:
            self._running()  # a loop that died takes no commands
        return done.result()

    def _forget(self) -> None:
        assert self._manager is not None
        cache = self._manager.batch_processor.cache
        cache._block_manager.forget()
        if self._keeper is not None:
            self._keeper.forget()

    # What the engine's thread tells (`hooks.Listener`)

    def between_steps(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def begin_step(self, num_rows: int) -> None:
        self._kept().begin_step(num_rows)

    def end_step(self, slots: torch.Tensor | None) -> None:
        self._kept().end_step(slots)

    def commit_step(self, parts: list[tuple[Run, int, int]]) -> None:
        self._kept().commit_step(parts)

    def shared(self, request_id: str, slots: Tags, generations: Tags) -> None:
        self._runs[request_id].share(self._kept().rows_of(slots, generations))

    def allocated(self, slots: Tags) -> Tags:
        return self._kept().allocated(slots)

    def evicted(self) -> None:
        self.evictions += 1

    def cancelled(self, state: RequestState) -> None:
        self._runs.pop(state.request_id, None)

    def finished(self, output: GenerationOutput) -> None:
        run = self._runs.pop(output.request_id, None)
        if run is None:
            return
        try:
            if output.error is not None:
                raise self._failure(output.error)
            result = run.output()
        except R3Error as error:
            _settle(run.future, error)
        else:
            _settle(run.future, result)

    def died(self, error: Exception) -> None:
        with self._lock:  # as in `close`
            self._error = error
        self._fail(self._failure(first_line(error)))

    # Details

    def _kept(self) -> RowKeeper:
        assert self._keeper is not None
        return self._keeper

    def _failure(self, said: str) -> R3Error:
        if isinstance(self._error, R3Error):
            return self._error
        if self._error is None and self._manager is None:
            return EngineError("the engine was closed before this request ended", where=self.name)
        return EngineError(
            f"the engine failed: {said}",
            where=self.name,
            remedy="make a new engine; with a larger num_blocks if it ran out of blocks",
        )

    def _fail(self, error: R3Error) -> None:
        for request_id in list(self._runs):
            run = self._runs.pop(request_id, None)
            if run is not None:
                _settle(run.future, error)

    def _running(self) -> RoutedManager:
        if self.failure is not None:
            raise self.failure
        if self._manager is None:
            raise EngineError("the engine does not run", where=self.name, remedy="use it inside a `with` block")
        return self._manager


def _settle(future: Future[Any], result: Output | R3Error) -> None:
    """Give a future its result; a request that was cancelled meanwhile has none to give it to."""
    with suppress(_Settled):
        if isinstance(result, R3Error):
            future.set_exception(result)
        else:
            future.set_result(result)
