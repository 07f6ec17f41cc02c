"""dispatch: which sample is asked of which worker, and what happens when that goes wrong. Lives on the pool's event loop.

Work is pulled: a sample has no worker until one has a free slot and the flow admits its bytes. After every event `pump`
gives out what can be given out. Rules for what fails:

- A sample is done when it is committed, by whichever worker, and never asked again.
- A prompt that the engine refuses is final for all of its samples. Anything else is asked again, elsewhere if it can be,
  `tries` times in all; then it is reported with all causes, and the rest goes on. A store that cannot be written ends the
  run instead.
- A worker that dies takes down everything it was at, and one of these may have killed it. So a sample that was there at several
  deaths is asked for the last two times alone on a worker: innocent ones come through, and the guilty one is known.
- With `straggler_s`, a sample that takes longer is asked of a second worker as well; the first commit counts, the other
is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from r3.errors import EngineError, PromptError, R3Error, StoreError
from r3.rollout.collector import Failure
from r3.rollout.prompts import Prompt
from r3.rollout.ray.crew import Crew, Member
from r3.rollout.ray.flow import Flow
from r3.rollout.ray.results import Committed, EngineLost, Outcome, StaleWeights, WeightsChanged
from r3.rollout.ray.telemetry import PoolMetrics


@dataclass(eq=False, slots=True)
class Task:
    """One sample that is to be made. `at` are the members that are at it now; `guilty` if one died that was at nothing else."""

    prompt: Prompt
    sample_id: str
    bytes: int
    causes: list[R3Error] = field(default_factory=list)
    deaths: int = 0
    guilty: bool = False
    at: dict[Member, Any] = field(default_factory=dict)
    avoid: set[str] = field(default_factory=set)
    queued: bool = False
    held: bool = False
    done: bool = False


@dataclass
class Counts:
    """Of one run, as they are now."""

    asked: int = 0
    present: int = 0
    written: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    bytes: int = 0


class Dispatch:
    """One run. `results` holds Committed, and at the end None or the error that ended the run."""

    def __init__(
        self,
        tasks: list[Task],
        crew: Crew,
        flow: Flow,
        metrics: PoolMetrics,
        *,
        tries: int,
        straggler_s: float | None,
        version: Callable[[Member], int | None],
        paused: Callable[[], bool],
    ) -> None:
        self._crew, self._flow, self._metrics = crew, flow, metrics
        self._tries, self._straggler_s, self._version, self._paused = tries, straggler_s, version, paused
        self._queue: deque[Task] = deque(tasks)
        self._suspects: deque[Task] = deque()
        self._seconds: list[Task] = []  # stragglers that are to be asked of a second worker
        self._quiet: Member | None = None  # it takes no new sample, so that a suspect can be alone there
        self._left = len(tasks)
        self._working: set[asyncio.Task[None]] = set()
        self._bad_prompts: dict[str, R3Error] = {}
        for task in tasks:
            task.queued = True
        self.results: queue.SimpleQueue[Committed | BaseException | None] = queue.SimpleQueue()
        self.failures: list[Failure] = []
        self.counts = Counts()
        self.ended = False

    def pump(self) -> None:
        """Give out what can be given out; end the run if nothing is left to do, or nobody to do it."""
        if self.ended:
            return
        if self._left == 0:
            self.end(None)
        elif not self._crew.members:
            self.end(self._crew.none_left())
        elif not self._paused():
            self._pump_suspects()
            self._pump_seconds()
            while self._queue and (member := self._member_for(self._queue[0])) is not None:
                task = self._queue[0]
                if not task.held and not self._flow.admits(task.bytes):
                    break
                self._queue.popleft()
                self._give(task, member)
            if self._left == 0:  # the last ones were of prompts that are known to be bad
                self.end(None)
        self._metrics.queue.set(len(self._queue) + len(self._suspects))
        self._metrics.in_flight.set(sum(member.tasks for member in self._crew.members.values()))
        self._metrics.in_flight_bytes.set(self._flow.held)

    def _member_for(self, task: Task) -> Member | None:
        able = [m for m in self._crew.members.values() if m.free > 0 and m is not self._quiet and m not in task.at]
        preferred = [member for member in able if member.name not in task.avoid] or able
        return max(preferred, key=lambda member: member.free / member.slots, default=None)

    def _pump_suspects(self) -> None:
        if not self._suspects:
            if self._quiet is not None and (self._quiet.tasks == 0 or not self._quiet.ready):
                self._quiet = None
            return
        if self._quiet is None or not self._quiet.ready or self._quiet.leaving:
            ready = [member for member in self._crew.members.values() if member.ready and not member.leaving]
            self._quiet = min(ready, key=lambda member: member.tasks, default=None)
        if self._quiet is not None and self._quiet.tasks == 0:
            task = self._suspects[0]
            if task.held or self._flow.admits(task.bytes):
                self._suspects.popleft()
                self._give(task, self._quiet)

    def _pump_seconds(self) -> None:
        """Not in the queue: a straggler may only go to other workers, and must not keep the rest from the one that it is at."""
        for task in list(self._seconds):
            member = None if task.done else self._member_for(task)
            if task.done or member is not None:
                self._seconds.remove(task)
            if member is not None:
                self._give(task, member)

    def _give(self, task: Task, member: Member) -> None:
        task.queued = False
        if task.done:
            return
        refused = self._bad_prompts.get(task.prompt.prompt_id)
        if refused is not None:
            self._fail(task, refused)
            return
        if not task.held:
            task.held = True
            self._flow.take(task.bytes)
        member.tasks += 1
        work = asyncio.get_running_loop().create_task(self._work(task, member))
        self._working.add(work)
        work.add_done_callback(self._worked)

    def _worked(self, work: asyncio.Task[None]) -> None:
        self._working.discard(work)
        if not work.cancelled() and (error := work.exception()) is not None:
            self.end(error)  # a defect: the run must not wait for a sample that nobody is at

    async def _work(self, task: Task, member: Member) -> None:
        asked = asyncio.get_running_loop().time()
        reference = member.handle.sample.remote(task.prompt, task.sample_id, self._version(member))
        task.at[member] = reference
        try:
            answer = asyncio.ensure_future(_answer_of(reference, member.name))
            if self._straggler_s is not None:
                await asyncio.wait([answer], timeout=self._straggler_s)
                if not answer.done():
                    self._second(task, member)
            result = await answer
        except asyncio.CancelledError:
            _cancel(reference)
            raise
        finally:
            member.tasks -= 1
            task.at.pop(member, None)
        if not self.ended:
            if isinstance(result, Outcome):
                self._judge(task, member, result, asked)
            else:
                self._crew.fault(member, result, asked, task.prompt.prompt_id)
                self._died(task, member, result)
            self.pump()

    def _second(self, task: Task, member: Member) -> None:
        if not task.done and not task.queued and len(self._crew.members) > 1:
            task.queued = True
            task.avoid.add(member.name)
            self.counts.retries += 1
            self._metrics.retries.inc(tags={"cause": "straggler"})
            self._seconds.append(task)
            self.pump()

    def _judge(self, task: Task, member: Member, outcome: Outcome, asked: float) -> None:
        error = outcome.error
        if error is None:
            assert outcome.sample is not None
            member.sampled()
            self._commit(task, outcome.sample)
        elif isinstance(error, EngineLost):
            self._crew.fault(member, error, asked, task.prompt.prompt_id, restart=True)
            self._died(task, member, error)
        elif isinstance(error, StaleWeights):
            self._crew.fault(member, error, asked)
            self._requeue(task)
        elif isinstance(error, PromptError):
            member.sampled()
            self._bad_prompts[task.prompt.prompt_id] = error
            self._fail(task, error)
        else:
            if isinstance(error, (EngineError, StoreError)) and not isinstance(error, WeightsChanged):
                self._crew.strike(member, error, asked, task.prompt.prompt_id)
            self._again(task, member, error, outcome.cause)

    def _commit(self, task: Task, sample: Committed) -> None:
        if task.done:
            return
        self._finish(task)
        self._flow.resize(task.bytes, sample.bytes)
        counts = self.counts
        counts.present += not sample.fresh
        counts.written += sample.fresh
        counts.prompt_tokens += sample.prompt_tokens
        counts.tokens += sample.tokens
        counts.bytes += sample.bytes
        self.results.put(sample)

    def _died(self, task: Task, member: Member, error: R3Error) -> None:
        task.deaths += 1
        task.guilty = member is self._quiet
        self._again(task, member, error, "death")

    def _again(self, task: Task, member: Member, error: R3Error, cause: str) -> None:
        if task.done:
            return
        task.causes.append(error)
        task.avoid.add(member.name)
        self._metrics.retries.inc(tags={"cause": cause})
        if task.at or task.queued:  # a second worker is at it, or will be
            return
        if len(task.causes) < self._tries:
            self.counts.retries += 1
            self._requeue(task)
        elif isinstance(error, StoreError):
            self.end(error)
        else:
            error = given_up(task)
            if task.guilty:  # its other samples would kill as many workers again
                self._bad_prompts[task.prompt.prompt_id] = error
            self._fail(task, error)

    def _requeue(self, task: Task) -> None:
        if task.done or task.queued:
            return
        task.queued = True
        if task.deaths >= max(1, self._tries - 2):
            self._suspects.append(task)
        else:
            self._queue.appendleft(task)

    def _fail(self, task: Task, error: R3Error) -> None:
        if task.done:
            return
        if task.held:
            self._flow.give(task.bytes)
        self._finish(task)
        self.failures.append(Failure(task.sample_id, error))
        self._metrics.retries.inc(tags={"cause": "given-up"})

    def _finish(self, task: Task) -> None:
        task.done = True
        self._left -= 1
        for reference in list(task.at.values()):
            _cancel(reference)

    def end(self, error: BaseException | None) -> None:
        """No more is given out; what is in flight is cancelled, or finishes writing and is found by the next run."""
        if self.ended:
            return
        self.ended = True
        for work in list(self._working):
            work.cancel()
        self.results.put(error)


def given_up(task: Task) -> R3Error:
    """What is reported of a sample that failed every time: each cause once, with the tries that had it."""
    tries: dict[str, list[str]] = {}
    for i, error in enumerate(task.causes, 1):
        tries.setdefault(str(error), []).append(str(i))
    causes = "".join(f"\n    try {', '.join(numbers)}: {text}" for text, numbers in tries.items())
    kind = EngineError if task.guilty else type(task.causes[-1])
    return kind(
        "this sample is given up" + (": workers that are at it die, also at nothing else" if task.guilty else ""),
        where=f"sample {task.sample_id!r} of {task.prompt.where}",
        expected=f"a sample within {len(task.causes)} tries",
        got=causes,
        remedy="look at the prompt (its length, its tokens) and at the logs of the workers; the rest was not stopped by it",
    )


async def _answer_of(reference: Any, name: str) -> Outcome | R3Error:
    """An outcome, or the error that stands for a worker's death."""
    try:
        answer: Outcome = await reference
        return answer
    except RayTaskError as failed:  # not one of ours: a defect, or a cancellation
        cause: Any = failed.cause
        error = EngineError(f"sampling failed ({type(cause).__name__}: {cause})", where=name)
        return Outcome(None, error, "crash")
    except RayError as died:
        text = " ".join(str(died).split()).rpartition(" unavailable: ")[2][:300]  # Ray's own words, three times nested
        return EngineError(f"the worker died while it was at this ({type(died).__name__}: {text})", where=name)


def _cancel(reference: Any) -> None:
    with contextlib.suppress(RayError, ValueError, TypeError):  # it has ended
        ray.cancel(reference)
