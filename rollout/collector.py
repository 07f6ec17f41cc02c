"""collector: ask for n samples of every prompt, and keep each with its routes as a shard.

    prompts --Sampler--> Completion --Recorder--> ShardStore

One sample is one request and one shard, so what is written is never lost and a later run goes on where this one ended: by
error, Ctrl-C or SIGKILL. Sample k of a prompt is `<prompt id>.<k>`; a sample whose shard exists is not asked for again.
With a seed, each sample's own seed follows from it and the sample's id, whatever was asked before it: a resumed collection
draws the samples that an uninterrupted one would have drawn (up to the rounding of the engine's batches).

Contract: nothing half-written, no sample twice, and no samples of different models, settings or prompts in one store. A full
disk ends the run at once; a prompt or payload that cannot be used ends it when what is in flight is written (`stop`), or is
left out and reported (`skip`). Never is a sample dropped in silence.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

from r3.errors import ConfigError, EngineError, PromptError, R3Error, StoreError
from r3.rollout.client import Retry, VllmClient
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt, require_distinct
from r3.rollout.protocol import Completion, Sampler, Sampling
from r3.rollout.recording import Recorder, require_usable_id, to_compare
from r3.sample import UNKNOWN_VERSION
from r3.store import ShardStore

P = ParamSpec("P")
R = TypeVar("R")

_THREADS = 4  # decoding and writing one sample takes about a millisecond each, mostly outside the interpreter's lock
_THREADS_REMOTE = 32  # and some tens of milliseconds of waiting for an object store


@dataclass(frozen=True)
class Failure:
    """A sample that was asked for and is not in the store."""

    sample_id: str
    error: R3Error


@dataclass(frozen=True)
class CollectReport:
    """Counts of a collection, while it runs and at its end.

    Attributes:
        asked: Samples asked for: prompts times n.
        present: Of those, in the store already when this run began.
        written: Of those, sampled and written by this run.
        failures: Of those, given up, with the reason.
        prompt_tokens, tokens: Prompt tokens and sampled tokens of the samples written.
        bytes: Size of the shards written.
        seconds: Time since sampling began.
    """

    asked: int
    present: int
    written: int
    failures: tuple[Failure, ...]
    prompt_tokens: int
    tokens: int
    bytes: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class _Task:
    prompt: Prompt
    sample_id: str


async def collect(
    prompts: Sequence[Prompt],
    store: ShardStore,
    engine: EngineInfo,
    *,
    sampling: Sampling | None = None,
    n: int = 1,
    concurrency: int = 64,
    weight_version: int = UNKNOWN_VERSION,
    on_bad_prompt: Literal["stop", "skip"] = "stop",
    progress: Callable[[CollectReport], None] | None = None,
    sampler: Sampler | None = None,
    retry: Retry | None = None,
    timeout_s: float = 1800.0,
    api_key: str | None = None,
    fsync: bool = True,
) -> CollectReport:
    """Fill a store with n samples of every prompt. Of large responses it takes less time in a process that has called
    `r3.rollout.client.keep_freed_memory`, as `r3 collect` does.

    Args:
        engine: What `r3.rollout.preflight.preflight` found.
        n: Samples per prompt.
        concurrency: Requests in flight, over all servers together.
        weight_version: Version of the weights that the engine samples with, e.g. the trainer's step.
        on_bad_prompt: What a prompt that the server refuses, or a response that cannot be used, does to the rest.
        progress: Called on the event loop after every sample.
        sampler: What is asked instead of the servers, e.g. an engine in this process; it samples as it was made to.
        retry, timeout_s, api_key: As in `VllmClient`.
        fsync: As in `r3.shard.save_file`.

    Raises:
        StoreError: the store cannot be written, or holds samples that may not be mixed with these.
        EngineError: the servers stopped answering.
        R3Error: with `stop`, the first prompt or response that could not be used.
    """
    if n < 1 or concurrency < 1:
        raise ConfigError(
            "nothing to do", expected="n and concurrency of at least 1", got=f"n={n}, concurrency={concurrency}"
        )
    recorder = Recorder(store, engine, sampling or Sampling(), weight_version=weight_version, fsync=fsync)
    collection = _Collection(recorder, on_bad_prompt, progress)
    await asyncio.to_thread(collection.prepare, prompts, n)
    if sampler is None:
        sampler = VllmClient(
            engine.urls, engine.model, recorder.sampling, retry=retry, timeout_s=timeout_s, api_key=api_key
        )
    return await collection.run(sampler, concurrency)


class _Collection:
    """The state of one `collect`."""

    def __init__(
        self, recorder: Recorder, on_bad_prompt: str, progress: Callable[[CollectReport], None] | None
    ) -> None:
        self.recorder, self.store = recorder, recorder.store
        self.engine, self.sampling = recorder.engine, recorder.sampling
        self.on_bad_prompt, self.progress = on_bad_prompt, progress
        self.tasks: list[_Task] = []
        self.asked = self.present = self.started = self.written = self.prompt_tokens = self.tokens = self.bytes = 0
        self.failures: list[Failure] = []
        self.bad_prompts: dict[str, R3Error] = {}  # so that a prompt refused once is not asked n times
        self.stopped_by: R3Error | None = None
        self.begin = time.monotonic()

    def prepare(self, prompts: Sequence[Prompt], n: int) -> None:
        """Everything that can be refused before the first request."""
        require_distinct(prompts)
        self.store.check_writable()
        self.store.remove_leftovers()
        there = set(self.store.sample_ids())
        present: list[_Task] = []
        for prompt in prompts:
            require_usable_id(self.store, prompt, n)
            tasks = [_Task(prompt, f"{prompt.prompt_id}.{k}") for k in range(n)]
            self.tasks += [task for task in tasks if task.sample_id not in there]
            present += [task for task in tasks if task.sample_id in there]
        self.asked, self.present = len(prompts) * n, len(present)
        for task in to_compare(present):
            self.recorder.require_alike(task.prompt, task.sample_id)

    async def run(self, client: Sampler, concurrency: int) -> CollectReport:
        self.begin = time.monotonic()
        queue = iter(self.tasks)
        pool = ThreadPoolExecutor(_THREADS if self.store.is_local else _THREADS_REMOTE, thread_name_prefix="r3-collect")
        try:
            async with client:
                await _until_done([self._work(client, queue, pool) for _ in range(min(concurrency, len(self.tasks)))])
        except (StoreError, EngineError) as error:
            self.stopped_by = error
        finally:
            pool.shutdown(wait=True)  # a write that has begun is finished, also after Ctrl-C
        if self.stopped_by is not None:
            raise self._final(self.stopped_by)
        return self.report()

    def _final(self, error: R3Error) -> R3Error:
        """The error that ends the run, with what it means for the samples."""
        try:
            there = set(self.store.sample_ids())  # also those that were being written
        except StoreError:  # it cannot be reached: then that is what ended the run, or worse
            return error
        written = sum(task.sample_id in there for task in self.tasks)
        lost = self.started - written - len(self.failures)
        error.remedy = (
            f"{error.remedy or 'correct the cause'}\n  {written} samples of this run are written and complete"
            + (f", {lost} that were in flight are lost" if lost else "")
            + f"; {len(self.tasks) - written} are missing: run the same command again for them"
        )
        return error

    async def _work(self, client: Sampler, queue: Iterator[_Task], pool: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        for task in queue:
            self.started += 1
            try:
                self._refuse_at_once(task.prompt)
                completion = await client.sample(task.prompt, seed=sample_seed(self.sampling.seed, task.sample_id))
                size = await loop.run_in_executor(pool, self.recorder.keep, task.prompt, task.sample_id, completion)
            except (StoreError, EngineError):
                raise
            except R3Error as error:
                self._give_up(task, error)
            else:
                self._count(completion, size)
            if self.progress is not None:
                self.progress(self.report())
            if self.stopped_by is not None:
                return

    def _refuse_at_once(self, prompt: Prompt) -> None:
        if prompt.prompt_id in self.bad_prompts:
            raise self.bad_prompts[prompt.prompt_id]
        limit = self.engine.max_model_len
        if prompt.kind == "prompt_token_ids" and limit is not None:
            total = len(prompt.payload) + self.sampling.max_tokens
            if total > limit:
                raise PromptError(
                    "the prompt and max_tokens are longer than the model's context",
                    where=prompt.where,
                    expected=f"at most {limit} tokens",
                    got=f"{len(prompt.payload)} + {self.sampling.max_tokens} = {total}",
                    remedy="shorten the prompt, lower max_tokens, or serve with a larger --max-model-len; or skip such prompts",
                )

    def _give_up(self, task: _Task, error: R3Error) -> None:
        self.failures.append(Failure(task.sample_id, error))
        if isinstance(error, PromptError):
            self.bad_prompts[task.prompt.prompt_id] = error
        if self.on_bad_prompt == "stop" and self.stopped_by is None:
            self.stopped_by = error

    def _count(self, completion: Completion, size: int) -> None:
        if size == 0:
            self.present += 1
            return
        self.written += 1
        self.prompt_tokens += len(completion.prompt_token_ids)
        self.tokens += len(completion.token_ids)
        self.bytes += size

    def report(self) -> CollectReport:
        return CollectReport(
            self.asked,
            self.present,
            self.written,
            tuple(self.failures),
            self.prompt_tokens,
            self.tokens,
            self.bytes,
            time.monotonic() - self.begin,
        )


async def _until_done(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines to their end; if one raises or this is cancelled, the others are cancelled and waited for."""
    workers = [asyncio.create_task(each) for each in work]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def sample_seed(seed: int | None, sample_id: str) -> int | None:
    """The seed of one sample: a stable hash below 2^53, the integers that JSON carries exactly everywhere."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}:{sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


def _synchronous(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return asyncio.run(function(*args, **kwargs))

    run.__doc__ = """`collect`, with the same arguments, for code without an event loop.

    On Ctrl-C requests in flight are cancelled, writes that have begun are finished, and KeyboardInterrupt is raised.
    """
    return run


collect_sync = _synchronous(collect)
