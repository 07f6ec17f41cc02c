"""pool: RolloutPool, many rollout workers as one source of committed samples.

    with RolloutPool(Engine.vllm("/models/qwen3"), "/shared/run/step-000012", workers=8, ray_options={"num_gpus": 1}) as pool:
        for sample in pool.run(prompts, n=8):        # in the order in which they are committed
            train_on(sample.key)                     # more is sampled meanwhile, up to the budget

Contract: every sample asked for is yielded once, whole and in the store, or stands in `run.failures` with all of its
causes; none is written twice. What is in the store already is yielded first and not asked for. Requests in flight are
bounded by slots, bytes that nobody has consumed by `budget_mb` (`r3.rollout.ray.flow`). Workers may die, nodes may go;
what was not committed is asked again. A worker that does not come up is in `pool.lost` with its cause, and when none is
left, the run raises. Leaving the block, also by Ctrl-C, lets writes that have begun finish, and ends engines and workers.

What of Ray is used, and what is not:

- `max_restarts`: Ray starts a dead worker again, on another node if need be. `max_task_retries` on `start` and
  `update_weights`, which may be repeated. Not on `sample`: Ray would queue the call for the same worker, where a free one
  is better and a poisonous prompt worse.
- `ray.cancel` for the loser of two that were asked for one sample, and at shutdown.
- Not `ray.util.ActorPool`: it has no bound in bytes, no restart, no second try, one call per actor.
- Not `ray.wait` in a loop: references are awaited on an event loop in a thread of the driver, so work goes on while the
  consumer trains.
- Not Ray Data: its actor pool maps blocks and carries their content; here nothing but keys may travel, a single row is
  the unit that is tried again, and weights change under a running pool. As a *source* of what was committed it fits, see
  `r3.trainers.data`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from r3.errors import ConfigError, EngineError, R3Error
from r3.fingerprint import model_fingerprint
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt, require_distinct
from r3.rollout.protocol import Sampling
from r3.rollout.ray.crew import Crew, Lost, Member
from r3.rollout.ray.dispatch import Dispatch, Task
from r3.rollout.ray.engines import Engine
from r3.rollout.ray.flow import Flow, bound_of
from r3.rollout.ray.results import Committed, EngineLost
from r3.rollout.ray.run import Run
from r3.rollout.ray.sharing import probe_in
from r3.rollout.ray.telemetry import pool_metrics
from r3.rollout.ray.worker import RolloutWorker
from r3.rollout.recording import Recorder, require_usable_id, to_compare
from r3.sample import UNKNOWN_VERSION
from r3.shard import files
from r3.store import ShardStore

T = TypeVar("T")


class RolloutPool:
    """Workers, and what they are asked for; a context manager.

    Args:
        engine: What the workers drive; of several, worker i drives the i-th, in turn.
        store: Path or URL that every node sees; made if it is not there.
        workers: How many to start with.
        sampling: How to sample.
        weight_version: Version of the weights that the engines start with.
        slots: Requests in flight per worker.
        budget_mb: Megabytes (10^6) of shards in flight or not yet consumed.
        tries: How often a sample is asked for before it is given up.
        straggler_s: Ask a second worker after so many seconds; None never.
        start_timeout_s: For one start of a worker, with the wait for its resources; and for one update of its weights, with
            the wait for its requests in flight.
        ray_options: Of each actor, as `ray.remote` takes them (num_cpus, num_gpus, resources, scheduling_strategy,
            runtime_env, ...). `max_restarts` is -1 and `num_cpus` 1 unless given.
        address: Of the Ray cluster, if this process is not connected: as `ray.init` takes it; "local" starts one.
        name: Prefix of the workers' names, and the tag `pool` of the metrics.
        writes, fsync: As in `RolloutWorker`.

    Raises:
        ConfigError: a number that makes no sense.
        StoreError: on entry: the store cannot be written.
    """

    def __init__(
        self,
        engine: Engine | Sequence[Engine],
        store: str | os.PathLike[str],
        *,
        workers: int = 1,
        sampling: Sampling | None = None,
        weight_version: int = UNKNOWN_VERSION,
        slots: int = 32,
        budget_mb: float = 4096,
        tries: int = 4,
        straggler_s: float | None = None,
        start_timeout_s: float = 1800.0,
        ray_options: Mapping[str, Any] | None = None,
        address: str | None = None,
        name: str = "rollout",
        writes: int = 2,
        fsync: bool = True,
    ) -> None:
        numbers = {"workers": workers, "slots": slots, "budget_mb": budget_mb, "tries": tries, "writes": writes}
        for what, value in numbers.items():
            if value < (0 if what == "workers" else 1):
                raise ConfigError(f"{what} is out of range", where="RolloutPool", expected="at least 1", got=value)
        if straggler_s is not None and not straggler_s > 0:
            raise ConfigError("straggler_s is out of range", where="RolloutPool", expected="above 0", got=straggler_s)
        self._engines = [engine] if isinstance(engine, Engine) else list(engine)
        self.store_at = os.fspath(store) if files.is_url(store) else str(files.local_path(store).absolute())
        self.sampling, self.weight_version = sampling or Sampling(), weight_version
        self._workers, self._slots, self._budget = workers, slots, int(budget_mb * 1e6)
        self._tries, self._straggler_s, self._start_timeout_s = tries, straggler_s, start_timeout_s
        self._options = {"max_restarts": -1, "num_cpus": 1, **(ray_options or {})}
        self._address, self.name = address, name
        self._settings = {"weight_version": weight_version, "writes": writes, "fsync": fsync}
        self._stack = ExitStack()
        self._made = 0
        self._fingerprint: str | None = None  # of the weights of the last update
        self._updating = False
        self._dispatch: Dispatch | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="r3-pool", daemon=True)

    def __enter__(self) -> RolloutPool:
        with ExitStack() as stack:  # closed here if anything below raises
            if not ray.is_initialized():
                ray.init(address=self._address, log_to_driver=False, logging_level=logging.WARNING)
                stack.callback(ray.shutdown)
            self.store = ShardStore(self.store_at, create=True)
            self.store.check_writable()
            self.store.remove_leftovers()
            probe = stack.enter_context(probe_in(self.store_at))
            self._metrics = pool_metrics(self.name)
            self._thread.start()
            stack.callback(self._stop_loop)
            self._crew = Crew(self._actor, probe, self._start_timeout_s, self._metrics, self._pump)
            stack.callback(self._end_workers)
            self.add_workers(self._workers)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, prompts: Sequence[Prompt], n: int = 1) -> Run:
        """Fill the store with n samples of every prompt; ends the run before it, which raises if it is asked for more.

        Returns:
            An iterator, also asynchronous, of Committed.

        Raises:
            PromptError: two prompts have one id, or an id is too long.
            StoreError: the store holds samples that may not be mixed with these.
            EngineError: no worker comes up.
        """
        if n < 1:
            raise ConfigError("nothing to do", expected="n of at least 1", got=n)
        if self._dispatch is not None:
            self._on_loop(self._end_run(self._dispatch, _ended("another run of this pool was begun")))
        require_distinct(prompts)
        info = self.engine()
        there = set(self.store.sample_ids())
        tasks, present = [], []
        for prompt in prompts:
            require_usable_id(self.store, prompt, n)
            size = bound_of(prompt, self.sampling, info)
            for k in range(n):
                sample_id = f"{prompt.prompt_id}.{k}"
                if sample_id in there:
                    present.append((prompt, sample_id))
                else:
                    tasks.append(Task(prompt, sample_id, size))
        for prompt, sample_id in to_compare(present):
            self._recorder(info, sample_id).require_alike(prompt, sample_id)
        flow = Flow(self._budget)
        slots = sum(member.slots for member in list(self._crew.members.values()))
        flow.warn_if_narrow(max((task.bytes for task in tasks), default=1), min(slots, len(tasks)))
        self._dispatch = dispatch = Dispatch(
            tasks,
            self._crew,
            flow,
            self._metrics,
            tries=self._tries,
            straggler_s=self._straggler_s,
            version=self._version_for,
            paused=lambda: self._updating,
        )
        dispatch.counts.asked, dispatch.counts.present = len(prompts) * n, len(present)
        found = [Committed(sample_id, p.prompt_id, self.store.key_of(sample_id)) for p, sample_id in present]
        self._loop.call_soon_threadsafe(dispatch.pump)
        return Run(dispatch, found, flow, self._loop, lambda: self._on_loop(self._end_run(dispatch, None)))

    def engine(self) -> EngineInfo:
        """What the workers drive; waits until one is up.

        Raises:
            EngineError: none comes up; with the cause of each.
        """
        while self._crew.info is None:
            if not self._crew.members:
                raise self._crew.none_left()
            time.sleep(0.02)
        return self._crew.info

    def add_workers(
        self,
        count: int = 1,
        *,
        engine: Engine | None = None,
        ray_options: Mapping[str, Any] | None = None,
        slots: int | None = None,
    ) -> list[str]:
        """More workers, also in the middle of a run; returns their names. They take work when they are up."""

        async def add() -> list[str]:
            names = []
            for _ in range(count):
                chosen = engine or self._engines[self._made % len(self._engines)]
                self._made += 1
                member = self._crew.add(
                    self.name, chosen, slots or self._slots, {**self._options, **(ray_options or {})}
                )
                names.append(member.name)
            return names

        return self._on_loop(add())

    def remove_worker(self, name: str) -> None:
        """Take no more work to a worker, wait until it has finished what it has, and end it."""

        async def remove() -> None:
            member = self._member(name)
            member.leaving = True
            while member.tasks and member.ready:
                await asyncio.sleep(0.02)
            await self._crew.dismiss(member)
            self._pump()

        self._on_loop(remove())

    @property
    def workers(self) -> dict[str, str]:
        """Names of the workers, and the node that each is on ("" while it starts)."""
        return {m.name: m.started.node if m.started and m.ready else "" for m in list(self._crew.members.values())}

    @property
    def lost(self) -> list[Lost]:
        """Workers that were given up, each with its cause."""
        return list(self._crew.lost)

    @property
    def restarts(self) -> int:
        """How often a worker was started again."""
        return self._crew.restarts

    def update_weights(self, directory: str | os.PathLike[str], version: int) -> None:
        """Take all workers to another checkpoint: each finishes its requests in flight, loads, empties its prefix cache,
        goes on.

        May be called between runs or from the loop over one. A worker that starts, or starts again, after this has these
        weights before it takes work. A worker that fails is started again with them.

        Raises:
            EngineError: no worker took them (the old ones stay), or some did not (they are started again).
        """
        self._on_loop(self._update(os.path.abspath(directory), version))

    async def _update(self, directory: str, version: int) -> None:
        members = [member for member in self._crew.members.values() if member.ready]
        before, self._updating = (self._crew.weights, self.weight_version), True
        self._crew.weights, self.weight_version = (directory, version), version
        try:
            answers = await asyncio.gather(
                *(_updated(member, directory, version, self._start_timeout_s) for member in members)
            )
            failed = {member: error for member, error in zip(members, answers, strict=True) if error is not None}
            if failed and len(failed) == len(members):
                self._crew.weights, self.weight_version = before
            for member, error in failed.items():
                if len(failed) < len(members) or isinstance(error, EngineLost):
                    self._crew.fault(member, error, self._loop.time(), restart=True)
            if len(failed) < len(members) or not members:
                self._fingerprint = await asyncio.to_thread(model_fingerprint, directory)
        finally:
            self._updating = False
            self._pump()
        if failed:
            raise EngineError(
                f"{len(failed)} of {len(members)} workers did not take the weights",
                where=directory,
                got="".join(f"\n    {member.name}: {error}" for member, error in failed.items()),
            )

    def _version_for(self, member: Member) -> int | None:
        return None if member.started is None or member.started.self_versioned else self.weight_version

    def _recorder(self, info: EngineInfo, sample_id: str) -> Recorder:
        """For comparing; where the engines tell their versions themselves, any version of theirs is alike."""
        version = self.weight_version
        if self._fingerprint is not None:
            info = replace(info, model_fingerprint=self._fingerprint)
        if any(member.started and member.started.self_versioned for member in list(self._crew.members.values())):
            sample = self.store.open(sample_id)
            version = int(sample.weight_version[sample.loss_mask].max(initial=UNKNOWN_VERSION))
        return Recorder(self.store, info, self.sampling, weight_version=version)

    def _actor(self, name: str, engine: Engine, options: Mapping[str, Any]) -> Any:
        make = ray.remote(RolloutWorker).options(**options)
        return make.remote(engine, self.store_at, self.sampling, name=name, **self._settings)

    def _member(self, name: str) -> Member:
        try:
            return self._crew.members[name]
        except KeyError:
            raise ConfigError("no such worker", expected=", ".join(self._crew.members), got=name) from None

    def _pump(self) -> None:
        if self._dispatch is not None:
            self._dispatch.pump()

    async def _end_run(self, dispatch: Dispatch, error: R3Error | None) -> None:
        dispatch.end(error)

    def _end_workers(self) -> None:
        async def end() -> None:
            if self._dispatch is not None:
                self._dispatch.end(_ended("its pool was left"))
            await asyncio.gather(*(self._crew.dismiss(member) for member in list(self._crew.members.values())))

        self._on_loop(end())

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


def _ended(why: str) -> R3Error:
    return EngineError(
        f"this run was ended before all of its samples were made: {why}",
        expected="one run of a pool at a time, and within the pool's block",
        remedy="samples that were committed are whole; the same call asks for the rest",
    )


async def _updated(member: Member, directory: str, version: int, timeout_s: float) -> R3Error | None:
    """None if a worker has the new weights, else why not."""
    try:
        await asyncio.wait_for(member.handle.update_weights.remote(directory, version), timeout_s)
    except asyncio.TimeoutError:
        return EngineLost("no answer", where=member.name, expected=f"within start_timeout_s, {timeout_s:g} s")
    except RayTaskError as failed:
        cause: Any = failed.cause
        return (
            cause if isinstance(cause, R3Error) else EngineError(f"{type(cause).__name__}: {cause}", where=member.name)
        )
    except RayError as died:
        return EngineError(f"the worker died ({type(died).__name__})", where=member.name)
    return None
