"""worker: RolloutWorker, the process that owns an engine, samples, and commits shards where it runs.

    prompt --Ray--> RolloutWorker: Sampler -> Completion -> Recorder -> ShardStore
    Committed (key, sizes, version; a few hundred bytes) <--Ray--

A plain class. It becomes an actor where it is used, so that all of Ray's options are the caller's:

    Worker = ray.remote(RolloutWorker)
    worker = Worker.options(num_gpus=4, scheduling_strategy=..., runtime_env=..., max_restarts=-1).remote(engine, store, sampling)
    ray.get(worker.start.remote())
    outcome = ray.get(worker.sample.remote(prompt, "p.0"))

Contract: `sample` answers with a committed sample or an error, never with half of one, and does nothing for a sample that
is in the store. Each sample is stamped with the version of the weights that made it: `update_weights` waits for the
requests in flight, loads, empties the engine's prefix cache and only then lets the next request in; if any of it fails,
the worker does not sample again. Where somebody else updates the servers, the version is asked before and after each
request (`weight_version` of the Sampler), and a sample in whose time it changed is refused. What the engine starts ends
with this process, also by SIGKILL (`r3.rollout.ray.guard`).

Ray's retries: `start` and `update_weights` may be repeated, so Ray does (`max_task_retries`). `sample` is not repeated by
Ray: it would queue for this same worker until it is up again, and a prompt that kills its worker would kill it for ever.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import ray

from r3.errors import ConfigError, EngineError, R3Error
from r3.fingerprint import model_fingerprint
from r3.rollout.collector import sample_seed
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Sampling
from r3.rollout.ray.engines import Engine
from r3.rollout.ray.guard import guard_children
from r3.rollout.ray.results import Committed, EngineLost, Outcome, StaleWeights, Started, WeightsChanged
from r3.rollout.ray.sharing import Probe
from r3.rollout.ray.telemetry import WorkerMetrics, cause_of, worker_metrics
from r3.rollout.recording import Recorder
from r3.sample import UNKNOWN_VERSION
from r3.store import ShardStore

M = TypeVar("M", bound=Callable[..., Any])
Weights = tuple[str, int]  # directory of a checkpoint, its version


def _repeatable(method: M) -> M:
    """Ray calls it again when the worker dies in it. The decorator alone, because Ray's type hides the method's own."""
    marked: M = ray.method(max_task_retries=2)(method)
    return marked


class RolloutWorker:
    """One engine and what it writes.

    Args:
        engine: What to drive.
        store: Path or URL of the store, as this worker's node sees it.
        sampling: How to sample.
        name: In messages and metrics.
        weight_version: Of the weights that the engine starts with.
        writes: Samples that are decoded and written at once. More wait in memory, at most as many as are asked for at once.
        fsync: As in `r3.shard.save_file`.
    """

    def __init__(
        self,
        engine: Engine,
        store: str,
        sampling: Sampling,
        *,
        name: str = "worker",
        weight_version: int = UNKNOWN_VERSION,
        writes: int = 2,
        fsync: bool = True,
    ) -> None:
        self._engine, self._sampling, self._name = engine, sampling, name
        self._store_at, self._fsync = store, fsync
        self._weight_version = weight_version
        self._threads = ThreadPoolExecutor(writes, thread_name_prefix="r3-write")
        self._stack = AsyncExitStack()
        self._starting, self._gate = asyncio.Lock(), _Gate()
        self._sampler: Any = None
        self._info: EngineInfo | None = None  # as the engine was opened, whatever weights it took since
        self._recorder: Recorder | None = None
        self._metrics: WorkerMetrics = worker_metrics(name)
        self._broken: R3Error | None = None
        self._node = ""

    @_repeatable
    async def start(self, probe: Probe | None = None, weights: Weights | None = None) -> Started:
        """Open the engine, once; check that the driver's store is this one; take the weights that the pool is at.

        Raises:
            StoreError: this node sees another directory than the driver.
            EngineError: the engine does not start.
        """
        async with self._starting:
            self._node = self._node or node_name()
            if self._recorder is None:
                if probe is not None:
                    await self._in_thread(probe.require_seen, self._node)
                store = await self._in_thread(ShardStore, self._store_at)
                guard_children()
                self._sampler, self._info = await self._engine.open(self._sampling, self._stack)
                self._recorder = Recorder(store, self._info, self._sampling, fsync=self._fsync)
            self._metrics.version.set(self._weight_version)
        if weights is not None and weights[1] != self._weight_version:
            await self.update_weights(*weights)
        assert self._info is not None
        return Started(self._name, self._node, os.getpid(), self._info, self._weight_version, self._self_versioned)

    async def sample(self, prompt: Prompt, sample_id: str, weight_version: int | None = None) -> Outcome:
        """Sample one response and commit it. The shard's seed follows from its id, whoever samples it.

        Args:
            weight_version: Refuse with StaleWeights if the weights are of another version; None takes those that there are.
        """
        try:
            async with self._gate.shared():
                self._metrics.running.set(self._gate.inside)
                try:
                    return Outcome(await self._sample(prompt, sample_id, weight_version))
                finally:
                    self._metrics.running.set(self._gate.inside - 1)
        except R3Error as error:
            cause = cause_of(error)
            self._metrics.rejected.inc(tags={"cause": cause})
            if not getattr(self._sampler, "alive", True):
                error = EngineLost("the worker's engine has ended", where=self._name, remedy=str(error))
            return Outcome(None, error, cause)

    @_repeatable
    async def update_weights(self, directory: str, version: int) -> int:
        """Wait for the requests in flight, load a checkpoint, empty the prefix cache, go on as `version`.

        Requests that come meanwhile wait. Loading the version that is there already does nothing.

        Raises:
            ConfigError: there are no weights in that directory on this node; the old ones stay.
            EngineError: the engine cannot change its weights, or did not; it then does not sample again.
        """
        await self.start()
        async with self._gate.alone():
            if version == self._weight_version:
                return version
            self._require_usable()
            load = getattr(self._sampler, "load_weights", None)
            if load is None:
                raise EngineError(
                    "the weights of this engine cannot be changed from here",
                    where=self._name,
                    expected="an engine with `load_weights`, such as Engine.vllm",
                    got=self._engine.kind,
                    remedy="update the servers yourself and publish the version (weight_version_url)",
                )
            if not await self._in_thread(Path(directory).is_dir):
                raise ConfigError(
                    "no such directory on this node", where=f"{self._name} on {self._node}", got=directory
                )
            assert self._info is not None
            assert self._recorder is not None
            info = replace(self._info, model_fingerprint=await self._in_thread(model_fingerprint, directory))
            try:
                await load(directory)
            except ConfigError:
                raise  # refused before anything was changed
            except BaseException as error:
                self._broken = error if isinstance(error, R3Error) else EngineError(f"{type(error).__name__}: {error}")
                raise
            self._weight_version = version
            self._recorder = Recorder(self._recorder.store, info, self._sampling, fsync=self._fsync)
            self._metrics.version.set(version)
            return version

    async def close(self) -> None:
        """Finish the writes that have begun and end the engine. Requests that still run are aborted with it."""
        self._broken = self._broken or EngineError("this worker is being closed", where=self._name)
        await asyncio.to_thread(self._threads.shutdown)
        await self._stack.aclose()

    async def _sample(self, prompt: Prompt, sample_id: str, wanted: int | None) -> Committed:
        self._require_usable()
        recorder = self._recorder  # of the weights that there are now
        assert recorder is not None
        store = recorder.store
        if await self._in_thread(store.__contains__, sample_id):
            return Committed(sample_id, prompt.prompt_id, store.key_of(sample_id))
        version = await self._version()
        if wanted is not None and version != wanted:
            raise StaleWeights(
                "this worker has other weights than are asked for", where=self._name, expected=wanted, got=version
            )
        begin = time.monotonic()
        completion = await self._sampler.sample(prompt, seed=sample_seed(self._sampling.seed, sample_id))
        answered = time.monotonic()
        if (after := await self._version()) != version:
            raise WeightsChanged(
                "the weights changed while this sample was made",
                where=f"sample {sample_id!r} of {prompt.where}",
                expected=f"version {version} from its first token to its last",
                got=after,
                remedy="it is asked again; update the servers when no request is in flight",
            )
        size = await self._in_thread(  # 0: another worker was faster
            lambda: recorder.keep(prompt, sample_id, completion, weight_version=version)
        )
        written = time.monotonic()
        sample = Committed(
            sample_id,
            prompt.prompt_id,
            store.key_of(sample_id),
            size,
            len(completion.prompt_token_ids),
            len(completion.token_ids),
            version,
            answered - begin,
            written - answered,
            self._name,
            self._node,
            fresh=size > 0,
        )
        self._count(sample)
        return sample if size else Committed(sample_id, prompt.prompt_id, sample.key)

    async def _version(self) -> int:
        return int(await self._sampler.weight_version()) if self._self_versioned else self._weight_version

    @property
    def _self_versioned(self) -> bool:
        return hasattr(self._sampler, "weight_version")

    def _count(self, sample: Committed) -> None:
        metrics = self._metrics
        metrics.engine.observe(sample.engine_s)
        metrics.write.observe(sample.write_s)
        if sample.fresh:
            metrics.samples.inc()
            for counter, value in (
                (metrics.tokens, sample.tokens),
                (metrics.prompt_tokens, sample.prompt_tokens),
                (metrics.bytes, sample.bytes),
            ):
                if value:
                    counter.inc(value)

    def _require_usable(self) -> None:
        if self._recorder is None:
            raise EngineLost("this worker was not started", where=self._name, remedy="call `start` first")
        if self._broken is not None:
            raise EngineLost("this worker may not sample again", where=self._name, remedy=str(self._broken))

    async def _in_thread(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


class _Gate:
    """Many may be inside together, or one alone: who wants to be alone keeps new ones out and waits until all have left."""

    def __init__(self) -> None:
        self.inside = 0
        self._changed = asyncio.Condition()
        self._closed = False

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1  # no await before this: a cancelled request must leave too
            async with self._changed:
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._closed = True
            try:
                await self._changed.wait_for(lambda: self.inside == 0)
            except BaseException:
                self._closed = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            self._closed = False
            async with self._changed:
                self._changed.notify_all()


def node_name() -> str:
    """Of the Ray node this process runs on, for people: its name if it has one, else its address, and the start of its id."""
    context = ray.get_runtime_context()
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return f"{address} ({context.get_node_id()[:8]})"
