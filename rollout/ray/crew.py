"""crew: the workers of a pool as the driver sees them: being started, ready, down, lost. Lives on the pool's event loop.

Starting again after a death is Ray's work (`max_restarts`): the handle stays the same, and a call of `start` waits until
the actor is up, on whatever node has its resources. Added to that are the rules that Ray cannot know: a worker is given
work only when its `start` has answered with the engine and the weights of the pool, and one that goes down again and
again without a single sample, or does not come up in time, is given up, with the reason, while the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from r3.errors import EngineError, R3Error
from r3.rollout.preflight import EngineInfo
from r3.rollout.ray.engines import Engine
from r3.rollout.ray.results import Started
from r3.rollout.ray.sharing import Probe
from r3.rollout.ray.telemetry import PoolMetrics
from r3.rollout.ray.worker import Weights

STRIKES = 8  # failures of a worker in a row, with no sample between them, before it is given up,
PROMPTS = 3  # at so many prompts: the failures of one or two are theirs
STARTS = 6  # deaths in its start before it is given up; two minutes, with the waits between them
_CLOSE_S = 20.0  # seconds that a worker has to finish its writes and end its engine

log = logging.getLogger("r3.rollout.ray")


@dataclass(frozen=True)
class Lost:
    """A worker that was given up, and why."""

    worker: str
    node: str
    error: R3Error


@dataclass(eq=False)
class Member:
    """One worker. `down` is set by whoever finds that it does not answer as it should."""

    name: str
    engine: Engine
    slots: int
    handle: Any
    ready: bool = False
    leaving: bool = False
    strikes: int = 0  # since its last sample, and
    prompts: set[str] = field(default_factory=set)  # at these prompts
    struck: float = 0.0  # time of the last one
    since: float = 0.0  # time at which it became ready
    started: Started | None = None
    reason: R3Error | None = None
    tasks: int = 0
    down: asyncio.Event = field(default_factory=asyncio.Event)
    tending: asyncio.Task[None] | None = None

    def sampled(self) -> None:
        """It works."""
        self.strikes = 0
        self.prompts.clear()

    @property
    def is_out(self) -> bool:
        return self.strikes >= STRIKES and len(self.prompts) >= PROMPTS

    @property
    def free(self) -> int:
        return self.slots - self.tasks if self.ready and not self.leaving else 0


class Crew:
    """All of them.

    Args:
        make: Makes the actor of a member: (name, engine, options) -> handle.
        probe: What every node must see.
        start_timeout_s: For a start or a restart, with the wait for resources.
        changed: Called when a member became ready or was lost.
    """

    def __init__(
        self,
        make: Callable[[str, Engine, Mapping[str, Any]], Any],
        probe: Probe,
        start_timeout_s: float,
        metrics: PoolMetrics,
        changed: Callable[[], None],
    ) -> None:
        self._make, self._probe, self._timeout_s = make, probe, start_timeout_s
        self._metrics, self._changed = metrics, changed
        self.members: dict[str, Member] = {}
        self.lost: list[Lost] = []
        self.info: EngineInfo | None = None
        self.weights: Weights | None = None
        self.restarts = 0
        self._count = 0

    def add(self, prefix: str, engine: Engine, slots: int, options: Mapping[str, Any]) -> Member:
        name = f"{prefix}-{self._count}"
        self._count += 1
        member = Member(name, engine, slots, self._make(name, engine, options))
        self.members[name] = member
        member.tending = asyncio.get_running_loop().create_task(self._tend(member))
        member.tending.add_done_callback(lambda done: self._ended(member, done))
        return member

    async def _tend(self, member: Member) -> None:
        """The life of a member, until it is lost or removed."""
        while True:
            error = await self._start(member)
            if error is None:
                await member.down.wait()
                member.ready = False
                self.restarts += 1
                self._metrics.restarts.inc()
                self._metrics.workers.set(self.num_ready)
                log.warning("%s is down and is started again: %s", member.name, _brief(member.reason))
                error = member.reason if member.is_out else None
            if error is not None:
                self._lose(member, error)
                return

    async def _start(self, member: Member) -> R3Error | None:
        """Until the member is ready; else why it is not. Each time that it dies in its start, the wait for the next is
        longer."""
        loop = asyncio.get_running_loop()
        deadline, deaths = loop.time() + self._timeout_s, 0
        while True:
            try:
                call = member.handle.start.remote(self._probe, self.weights)
                return self._accept(member, await asyncio.wait_for(call, max(0.0, deadline - loop.time())))
            except asyncio.TimeoutError:
                return EngineError(
                    "this worker does not come up",
                    where=member.name,
                    expected=f"within {self._timeout_s:g} s",
                    remedy="`ray status` says which resources are wanted and not there; else its log, in the session's logs",
                )
            except RayTaskError as failed:
                cause: Any = failed.cause
                if isinstance(cause, R3Error):
                    return cause.at(member.name)
                return EngineError(f"this worker does not start ({type(cause).__name__}: {cause})", where=member.name)
            except ActorDiedError as died:
                return EngineError(f"this worker has died and is not restarted ({_line(died)})", where=member.name)
            except RayError as failed:
                # Ray answers at once, and not when the actor is up, if it is being restarted: that is no other death.
                deaths += "is restarting" not in str(failed)
                if deaths >= STARTS:
                    what = f"this worker dies whenever it starts ({type(failed).__name__}: {_line(failed)})"
                    return EngineError(what, where=member.name, remedy="its log, in the session's logs, says why")
                await asyncio.sleep(min(2.0**deaths, max(0.0, deadline - loop.time())))

    def _accept(self, member: Member, started: Started) -> R3Error | None:
        self.info = self.info or started.engine
        ours, theirs = self.info, started.engine
        for name in ("spec", "engine", "engine_version", "model", "model_fingerprint", "logprobs_mode"):
            if getattr(ours, name) != getattr(theirs, name):
                return EngineError(
                    f"the workers differ in {name}: their samples may not be mixed",
                    where=f"{member.name} on {started.node}",
                    expected=getattr(ours, name),
                    got=getattr(theirs, name),
                    remedy="give all workers of a pool the same model and version",
                )
        member.started = started
        member.down.clear()
        if self.weights is not None and not started.self_versioned and started.weight_version != self.weights[1]:
            member.down.set()  # the pool went on to other weights meanwhile: once more
        else:
            member.ready, member.since = True, asyncio.get_running_loop().time()
        self._metrics.workers.set(self.num_ready)
        self._changed()
        return None

    def fault(self, member: Member, error: R3Error, asked: float, prompt: str = "", *, restart: bool = False) -> None:
        """A member did not do what it was asked at a time of the loop: it is down. With `restart`, its process is ended,
        so that Ray starts it again. What was asked before it became ready, or is not ready again, says nothing new: a
        death fails many calls."""
        member.prompts.add(prompt)
        if not member.ready or asked < member.since:
            return
        member.reason = error
        member.strikes += 1
        if restart:
            with contextlib.suppress(RayError):
                ray.kill(member.handle, no_restart=False)
        member.ready = False
        member.down.set()

    def strike(self, member: Member, error: R3Error, asked: float, prompt: str) -> None:
        """A failure of what was asked at a time of the loop. It may be the member's or the sample's; enough in a row are the
        member's, where requests that fail together are one failure."""
        member.prompts.add(prompt)
        if not member.ready or asked < max(member.struck, member.since):
            return
        member.reason = error
        member.struck = asyncio.get_running_loop().time()
        member.strikes += 1
        if member.is_out:
            member.ready = False
            member.down.set()

    def _ended(self, member: Member, done: asyncio.Task[None]) -> None:
        """A defect in what tends a member must not leave it hanging."""
        if not done.cancelled() and (error := done.exception()) is not None:
            self._lose(member, EngineError(f"{type(error).__name__}: {error}", where=member.name))

    def _lose(self, member: Member, error: R3Error | None) -> None:
        error = error or EngineError("this worker was lost", where=member.name)
        node = member.started.node if member.started else ""
        self.lost.append(Lost(member.name, node, error))
        log.warning("%s is given up: %s", member.name, error)
        self.members.pop(member.name, None)
        with contextlib.suppress(RayError):
            ray.kill(member.handle)
        self._metrics.workers.set(self.num_ready)
        self._changed()

    async def dismiss(self, member: Member) -> None:
        """End a member in order: what it writes is finished, its engine is closed, its process is gone."""
        self.members.pop(member.name, None)
        member.ready = False
        if member.tending is not None:
            member.tending.cancel()
        with contextlib.suppress(RayError, asyncio.TimeoutError):
            if member.started is not None:
                await asyncio.wait_for(member.handle.close.remote(), _CLOSE_S)
        with contextlib.suppress(RayError):
            ray.kill(member.handle)
        self._metrics.workers.set(self.num_ready)

    @property
    def num_ready(self) -> int:
        return sum(member.ready for member in self.members.values())

    def none_left(self) -> R3Error:
        """The error of a pool without workers."""
        causes = "\n".join(
            f"    {lost.worker}{f' on {lost.node}' if lost.node else ''}: {lost.error}" for lost in self.lost
        )
        return EngineError(
            "no worker is left",
            expected="at least one",
            got=f"{len(self.lost)} lost:\n{causes}" if causes else "none was added",
            remedy="correct the cause; samples that were committed are whole, and the same call asks for the rest",
        )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _brief(error: R3Error | None) -> str:
    return "" if error is None else str(error).partition("\n")[0]
