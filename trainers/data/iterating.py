"""ShardIterableDataset: one data-parallel rank's share of the samples of some stores, as a stream that knows how far it is.

    dataset = ShardIterableDataset(ShardStore("shards/step-0012"), rank=rank, world_size=world_size, group_size=8)
    loader = StatefulDataLoader(dataset, batch_size=16, num_workers=2, collate_fn=PackedCollator())
    for batch in loader:
        with batch.replay(replay):
            ...

Both deal the samples of one snapshot (`r3.trainers.data.snapshot`) by names and a seed (`dealing`), give `LazySample`s,
and know how far they are (`progress`). They differ in who orders: the map-style one has an order that does not depend on
the number of workers, and the loader's sampler counts; the iterable one counts itself, also in workers, can follow a store
that is being filled, can read ahead within a budget of bytes, and can be saved and loaded at another number of ranks
without further ado.

Contract: every rank has the same number of samples and batches, or an error says why not. What was given out and saved is
not given again after a resume. A damaged shard is an error with its name, or a counted, named substitute.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from r3.errors import ConfigError
from r3.trainers.data.following import Follow, Follower
from r3.trainers.data.lazy import LazySample
from r3.trainers.data.progress import Progress, require_whole_group
from r3.trainers.data.reading import UnitReader
from r3.trainers.data.share import Share
from r3.trainers.data.snapshot import Selection, Snapshot, Source, Unit, Versions

_MOST_WORKERS = 4096


class ShardIterableDataset(Share, IterableDataset[LazySample]):
    """Iterable: this rank's share, split over the loader's workers, resumable in each of them.

    Args:
        sources, rank, world_size, seed, shuffle, uneven, layers, tokens, routes: As of ShardDataset, and so are the
            settings of a snapshot.
        follow: Give samples of stores that are still being filled, as they arrive (`r3.trainers.data.following`); what is
            there at the beginning if None.
        prefetch_bytes: Read ahead in threads, routes included, holding at most so many bytes in each worker; 0 does not
            read ahead.
            For loaders without workers: workers read ahead by themselves, a fixed number of batches.
        threads: Of reading ahead.

    With `bad="skip"` a unit of which a shard turns out to be damaged is left out on a single rank; with several, another unit of
    the share is given a second time in its place, so that all ranks give as many. `instead_of` of its samples names the
    damaged shard.

    Raises:
        ConfigError, StoreError, ShardError: as ShardDataset.
    """

    def __init__(
        self,
        sources: Snapshot | Source | Sequence[Source],
        *,
        rank: int | None = None,
        world_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        uneven: str = "raise",
        layers: Sequence[int] | None = None,
        tokens: slice = slice(None),
        routes: str = "lazy",
        steps: Iterable[int] | None = None,
        versions: Versions | None = None,
        group_size: int | None = None,
        incomplete: str = "raise",
        bad: str = "raise",
        follow: Follow | None = None,
        prefetch_bytes: int = 0,
        threads: int = 4,
    ) -> None:
        if follow is not None and isinstance(sources, Snapshot):
            raise ConfigError("a snapshot does not grow: give the stores themselves to follow them")
        self.follow, self.prefetch_bytes, self.threads = follow, prefetch_bytes, threads
        super().__init__(
            sources,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=shuffle,
            uneven=uneven,
            layers=layers,
            tokens=tokens,
            routes=routes,
            steps=steps,
            versions=versions,
            group_size=group_size,
            incomplete=incomplete,
            bad=bad,
        )
        self.follower: Follower | None = None
        self._resume: Progress | None = None
        # By worker: whether it has gone on from `_resume`. Shared, because a loader may pickle this dataset for each epoch anew.
        self._resumed = torch.zeros(_MOST_WORKERS, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._in_workers = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._now: Progress | None = None

    def _look(self, selection: Selection) -> Snapshot | None:
        return super()._look(selection) if self.follow is None else None

    @property
    def num_samples(self) -> int:
        """Of this rank in a whole epoch, over all of its workers."""
        snapshot = self._require_snapshot()
        return len(self._deal(self.epoch, ()).shares[self.rank]) * snapshot.unit_size

    def set_epoch(self, epoch: int) -> None:
        """Of the next iteration. An iteration that was loaded to be gone on with is forgotten, if it is of another epoch."""
        if self._resume is not None and epoch != self._resume.epoch:
            self._resume = None
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """How far this worker's iteration is; small, but for the snapshot in it (about 10 bytes a sample).

        Raises:
            ConfigError: it is iterated over in the workers of a loader, and here is the process of the loader.
        """
        if self._in_workers[0] and get_worker_info() is None:
            raise ConfigError(
                "workers of a loader iterate over this dataset, so it does not know how far they are",
                remedy="save state_dict() of the loader, torchdata's StatefulDataLoader",
            )
        if self._now is not None:
            return self._now.to_state()
        if self._resume is not None:
            return self._resume.to_state()
        return self._progress(taken=() if self.follow is not None else None).to_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of `state_dict` (same ranks and workers) or of `merge_states`.

        Raises:
            ConfigError: a state of other settings, of another rank or number of ranks, or of a following dataset in the
                middle of a group.
        """
        self._resume = self._load(state)
        self._resumed = torch.zeros(_MOST_WORKERS, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._now = None
        if self._resume.taken is not None:  # the order of what arrives is not the same again
            require_whole_group(self._resume)

    def __iter__(self) -> Iterator[LazySample]:
        info = get_worker_info()
        worker, workers = (0, 0) if info is None else (info.id, info.num_workers)
        self._in_workers[0] = info is not None
        begin = self._progress(worker=worker, num_workers=workers, taken=() if self.follow is not None else None)
        resume = self._resume
        if resume is not None and not self._resumed[worker]:
            self._resumed[worker] = 1
            if resume.epoch == self.epoch:
                begin = self._going_on(begin, resume, worker, workers)
            elif not self._exhausted(resume):
                raise ConfigError(
                    "the state that was loaded is in the middle of another epoch",
                    expected=f"set_epoch({resume.epoch})",
                    got=f"epoch {self.epoch}",
                )
        self._now = begin
        return self._samples(begin)

    def _going_on(self, begin: Progress, resume: Progress, worker: int, workers: int) -> Progress:
        place = resume.worker, resume.num_workers
        if resume.num_workers is not None and (resume.given or resume.taken) and place != (worker, workers):
            raise ConfigError(
                "this state is of another worker, or of another number of workers",
                expected=f"worker {resume.worker} of {resume.num_workers}",
                got=f"worker {worker} of {workers}",
                remedy="keep num_workers and load the loader's state; for another number, merge_states([... of all ranks])",
            )
        return replace(begin, done=resume.done, given=resume.given, taken=resume.taken)

    def _exhausted(self, progress: Progress) -> bool:
        if self.snapshot is None or progress.given is None:
            return False
        share = self._deal(progress.epoch, progress.done_units()).shares[self.rank]
        mine = share[progress.worker or 0 :: progress.num_workers or 1]
        return progress.world_size is not None and progress.given >= len(mine) * self.snapshot.unit_size

    def _samples(self, now: Progress) -> Iterator[LazySample]:
        decided = self.selection.bad == "skip" if self.selection is not None else False
        skip_bad = self.snapshot.skip_bad if self.snapshot is not None else decided
        reader = UnitReader(
            layers=self.layers,
            tokens=self.tokens,
            routes=self.routes == "read",
            skip_bad=skip_bad,
            alone=self.world_size == 1,
            budget=self.prefetch_bytes,
            threads=self.threads,
        )
        stop = threading.Event()
        reads = reader.read(self._units(now, stop), self._earlier(now))
        skip = (now.given or 0) % now.unit_size
        given, taken = now.given or 0, list(now.taken or ())
        try:
            for name, samples in reads:
                # Of a unit that is left out, only the count goes on.
                for sample in samples[skip:] if samples else itertools.repeat(None, now.unit_size - skip):
                    given += 1
                    if self.follow is not None and given % now.unit_size == 0:
                        taken.append(name)
                    self._now = replace(now, given=given, taken=tuple(taken) if self.follow is not None else None)
                    if sample is not None:
                        yield sample
                skip = 0
        finally:
            stop.set()
            reads.close()

    def _units(self, now: Progress, stop: threading.Event) -> Iterator[Unit]:
        """The units of this worker's share that are left."""
        worker, workers = now.worker or 0, now.num_workers or 1
        if self.follow is not None:
            assert self.selection is not None
            self.follower = Follower(
                self.selection,
                self.follow,
                slot=self.rank * workers + worker,
                slots=self.world_size * workers,
                seed=self.seed,
                epoch=now.epoch,
                uneven=self.uneven,
                done=now.done_units(),
                taken=now.taken or (),
            )
            yield from self.follower.units(stop)
            return
        for index in self._share(now)[(now.given or 0) // now.unit_size :]:
            yield self._require_snapshot().units[index]

    def _earlier(self, now: Progress) -> Iterator[Unit]:
        """The units of this worker's share that were given out, the last one first; unknown where a store is followed."""
        if self.follow is None:
            for index in reversed(self._share(now)[: (now.given or 0) // now.unit_size]):
                yield self._require_snapshot().units[index]

    def _share(self, now: Progress) -> tuple[int, ...]:
        return self._deal(now.epoch, now.done_units()).shares[self.rank][now.worker or 0 :: now.num_workers or 1]
