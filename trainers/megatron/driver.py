"""The driver: from sample ids to a rank's micro-batch, for a `forward_step` of one's own.

    replay = attach(chunks)
    driver = Driver(replay, chunks, ShardStore("shards/step-0012"))

    def forward_step(batches, chunk):
        batch = next(batches)
        with batch.replay():
            logits = chunk(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
        return logits, functools.partial(loss, batch)

    schedule(forward_step_func=forward_step, data_iterator=driver.iterators(micro_batches), model=chunks, ...)

`micro_batches` is a list of lists of sample ids, the same on every rank of a data-parallel replica. Each rank opens the shards
and reads for itself: the layers of the chunk that the micro-batch is for, the tokens that its routers will see, and log-probs
only where the loss is computed. Nothing is sent between ranks. Numbers, and the comparison with reading once and broadcasting
within TP: docs/megatron-example.md, by scripts/bench_megatron_reads.py.

Contract: a token whose routes were not read cannot be replayed by mistake (`PartialSample.held`). The next micro-batch is read by
a thread while the current one runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import nn

from r3.errors import ReplayError
from r3.microbatch import MicroBatch
from r3.partial import PartialSample, Replayable, positions_of
from r3.routes import Routes, runs_of
from r3.sample import RolloutSample
from r3.shard import ShardFile
from r3.store import ShardStore
from r3.trainers.data.lazy import LazySample
from r3.trainers.megatron import MegatronReplay
from r3.trainers.megatron.batch import Form, LocalBatch, Placed, Rank
from r3.trainers.megatron.routers import decoder_of

# Bytes of one layer of a sample from which on a rank reads only its tokens' ranges of it. Smaller layers are read whole and
# verified: from a local disk that took as long up to 16k tokens of 8 experts, and half as long at 131k over two ranks.
RANGES_FROM = 128 * 1024


@dataclass(frozen=True, eq=False)
class DrivenBatch(LocalBatch):
    """A `LocalBatch` that knows the chunk that it is for."""

    _handle: MegatronReplay | None = None
    _chunk: nn.Module | None = None

    def replay(self) -> contextlib.AbstractContextManager[MicroBatch]:
        """Replay these samples in the forward of the chunk inside the block."""
        assert self._handle is not None
        assert self._chunk is not None
        return self._handle.micro_batch(self._chunk, self.samples, self.layout, self.tokens)


class Driver:
    """Reads micro-batches of one rank's model chunks from a store.

    Args:
        replay: The handle of these chunks.
        chunks: As they were given to `attach`.
        store: Where the shards are; None if every micro-batch is of samples in memory.
        form: How samples become tensors; packed, padded as this rank's parallelism needs it, if None.
        rank: Where this process stands; from `parallel_state` if None.
        prefetch: Read the next micro-batch while the current one runs.
    """

    def __init__(
        self,
        replay: MegatronReplay,
        chunks: nn.Module | Sequence[nn.Module],
        store: ShardStore | None = None,
        *,
        form: Form | None = None,
        rank: Rank | None = None,
        prefetch: bool = True,
    ) -> None:
        self.replay, self.store = replay, store
        self.chunks = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
        config = _unwrapped(self.chunks[0]).config
        self.rank = Rank.here(config.sequence_parallel) if rank is None else rank
        self.form = Form(multiple=self.rank.multiple) if form is None else form
        self.device = next(self.chunks[0].parameters()).device
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="r3-read") if prefetch else None

    def iterators(self, micro_batches: Iterable[Sequence[str | Replayable]]) -> Any:
        """What Megatron's schedules take as `data_iterator`: one iterator, or a list of one for each model chunk."""
        plan = [list(items) for items in micro_batches]
        each = [self.batches(plan, chunk) for chunk in self.chunks]
        return each if len(each) > 1 else each[0]

    def batches(self, micro_batches: Iterable[Sequence[str | Replayable]], chunk: nn.Module) -> Iterator[DrivenBatch]:
        """The micro-batches for one chunk, in order.

        Args:
            micro_batches: Sample ids, or samples, of each. Of a LazySample this rank's part is read from its shard, as of an id.
            chunk: One of `chunks`.

        Raises:
            StoreError, ShardError: a shard that is absent or damaged.
            ReplayError: a micro-batch without samples, or a token of the loss without a rollout log-prob.
        """
        if self._reader is None:
            for items in micro_batches:
                yield self._finish(self.read(items, chunk), chunk)
            return
        ahead: Future[Read] | None = None
        for items in micro_batches:
            following = self._reader.submit(self.read, items, chunk)
            if ahead is not None:
                yield self._finish(ahead.result(), chunk)
            ahead = following
        if ahead is not None:
            yield self._finish(ahead.result(), chunk)

    def read(self, items: Sequence[str | Replayable], chunk: nn.Module) -> Read:
        """Host work of one micro-batch: open its shards, place its tokens, read what this rank needs of it."""
        if not items:
            raise ReplayError(
                "a micro-batch without samples",
                remedy="give every rank as many samples: Megatron's schedules run all ranks in step",
            )
        layers = self.replay.layers_of(chunk)
        with_logprobs = bool(getattr(_unwrapped(chunk), "post_process", True))
        with contextlib.ExitStack() as files:
            opened = [
                files.enter_context(self._open(item)) if isinstance(item, (str, LazySample)) else item for item in items
            ]
            placed = self.form.place([one.num_tokens for one in opened], self.rank)
            seen = _tokens_seen(self.rank.router_rows(placed.layout)) if layers else None
            samples: list[Replayable] = []
            logprobs: list[npt.NDArray[np.float32]] = []
            first = 0
            for item, one in zip(items, opened, strict=True):
                needed = None if seen is None else seen[first : first + one.num_tokens]
                first += one.num_tokens
                name = item if isinstance(item, str) else item.sample_id
                samples.append(one if not isinstance(one, ShardFile) else _read(name, one, layers, needed))
                if with_logprobs:
                    logprobs.append(_logprobs(one))
        return Read(samples, placed, logprobs if with_logprobs else None)

    def _open(self, sample_id: str | LazySample) -> ShardFile:
        if isinstance(sample_id, LazySample):
            return sample_id.open()
        if self.store is None:
            raise ReplayError(
                "a sample id, and no store", where=repr(sample_id), remedy="Driver(replay, chunks, store)"
            )
        return self.store.open_file(sample_id)

    def _finish(self, read: Read, chunk: nn.Module) -> DrivenBatch:
        batch = DrivenBatch.build(read.samples, read.placed, self.device, read.rollout_logprobs)
        return replace(batch, _handle=self.replay, _chunk=chunk)


class Read(NamedTuple):
    """What was read of a micro-batch, on the host."""

    samples: list[Replayable]
    placed: Placed
    rollout_logprobs: list[npt.NDArray[np.float32]] | None


def _unwrapped(chunk: nn.Module) -> Any:
    return decoder_of(chunk)[0]


def _tokens_seen(rows: Any) -> npt.NDArray[np.bool_]:
    """[total tokens of the samples] bool: those whose rows these routers see."""
    seen = np.zeros(sum(rows.lengths), np.bool_)
    seen[rows.rows[rows.rows >= 0]] = True
    return seen


def _read(
    sample_id: str, file: ShardFile, layers: Sequence[int], needed: npt.NDArray[np.bool_] | None
) -> PartialSample:
    positions = positions_of(file.spec, layers, f"sample {sample_id!r}")
    held = None
    if needed is None or not layers:  # nothing routes here
        routes = Routes(np.zeros((0, file.num_tokens, file.spec.top_k), file.spec.dtype), file.recorded)
    elif needed.all() or (needed.any() and file.num_tokens * file.spec.top_k * file.spec.dtype.itemsize < RANGES_FROM):
        routes = file.routes(positions)
    else:
        ids = np.zeros((len(layers), file.num_tokens, file.spec.top_k), file.spec.dtype)
        for start, stop in runs_of(needed):
            ids[:, start:stop] = file.routes(positions, slice(start, stop)).ids
        routes, held = Routes(ids, file.recorded), needed
    return PartialSample(sample_id, file.spec, file.tokens(), routes, tuple(layers), file.loss_mask, held)


def _logprobs(one: ShardFile | Replayable) -> npt.NDArray[np.float32]:
    if isinstance(one, ShardFile):
        return one.rollout_logprobs()
    if isinstance(one, RolloutSample):
        return one.rollout_logprobs
    raise ReplayError(
        "a partial sample has no rollout log-probs, and this chunk computes the loss",
        where=f"sample {one.sample_id!r}",
        remedy="give the sample's id, or the whole sample",
    )
