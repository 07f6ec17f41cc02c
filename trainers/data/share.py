"""Share: what both datasets of shards have: a snapshot, a place among the data-parallel ranks, an epoch, and how a sample
is read."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from r3.errors import ConfigError, R3Error, R3Warning
from r3.trainers.data.dealing import Deal, deal
from r3.trainers.data.lazy import LazySample
from r3.trainers.data.progress import Progress
from r3.trainers.data.snapshot import Ref, Selection, Snapshot, Source, Versions, select


class Share:
    """Base of ShardDataset and ShardIterableDataset; its arguments are explained there."""

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
    ) -> None:
        self.rank, self.world_size = place(rank, world_size)
        self.seed, self.shuffle, self.uneven = seed, shuffle, uneven
        self.layers, self.tokens = None if layers is None else tuple(layers), tokens
        if routes not in ("lazy", "read"):
            raise ConfigError("unknown value of routes", expected="lazy or read", got=routes)
        self.routes = routes
        self.snapshot: Snapshot | None = None
        self.selection: Selection | None = None
        if isinstance(sources, Snapshot):
            if (steps, versions, group_size, incomplete, bad) != (None, None, None, "raise", "raise"):
                raise ConfigError(
                    "which samples are used is decided where the snapshot is taken",
                    remedy="give steps, versions, group_size, incomplete and bad to Snapshot.take",
                )
            self.snapshot = sources
        else:
            self.selection = select(sources, steps, versions, group_size, incomplete, bad)
            self.snapshot = self._look(self.selection)
        # In shared memory, so that `set_epoch` reaches workers that live on (persistent_workers).
        self._epoch = torch.full((1,), -1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._dealt: tuple[Any, Deal] | None = None
        self._done: tuple[int, ...] = ()
        if self.snapshot is not None:
            self._deal(0, ())  # what does not divide is said now

    def _look(self, selection: Selection) -> Snapshot | None:
        """The samples that there are now; None where they will be looked for later."""
        return Snapshot.of(selection)

    @property
    def epoch(self) -> int:
        return max(0, int(self._epoch[0]))

    def set_epoch(self, epoch: int) -> None:
        """Of the next iteration: another order, with `shuffle`."""
        if epoch < 0:
            raise ConfigError("an epoch is numbered from 0", got=epoch)
        self._epoch[0] = epoch

    @property
    def deal(self) -> Deal:
        """The whole epoch's, of all ranks: units that are padded, units that are dropped."""
        return self._deal(self.epoch, ())

    def _deal(self, epoch: int, done: tuple[int, ...]) -> Deal:
        snapshot = self._require_snapshot()
        key = (snapshot, epoch, done)  # snapshots are equal where they are the same object
        if self._dealt is None or self._dealt[0] != key:
            given = frozenset(done)
            dealt = deal(
                [unit.name for unit in snapshot.units],
                [index for index in range(len(snapshot.units)) if index not in given],
                seed=self.seed,
                epoch=epoch,
                shuffle=self.shuffle,
                world_size=self.world_size,
                uneven=self.uneven,
            )
            self._dealt = (key, dealt)
        return self._dealt[1]

    def _require_snapshot(self) -> Snapshot:
        if self.snapshot is None:
            raise ConfigError("a store that is being followed has no list of samples yet")
        return self.snapshot

    def _progress(self, **values: Any) -> Progress:
        snapshot = self.snapshot
        settings: dict[str, Any] = {
            "snapshot": snapshot.packed if snapshot else "",
            "digest": snapshot.digest if snapshot else "",
            "epoch": self.epoch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "uneven": self.uneven,
            "world_size": self.world_size,
            "rank": self.rank,
            "num_workers": 0,
            "worker": 0,
            "unit_size": snapshot.unit_size if snapshot else (self.selection and self.selection.group_size) or 1,
        }
        return Progress(**{**settings, **values})

    def _load(self, state: dict[str, Any]) -> Progress:
        progress = Progress.from_state(state)
        progress.require_settings(seed=self.seed, shuffle=self.shuffle, uneven=self.uneven)
        progress.require_place(self.rank, self.world_size)
        if (progress.taken is not None) != (self.snapshot is None):
            raise ConfigError(
                "the state of a dataset that follows a store, and one of a snapshot, are not exchangeable"
            )
        if self.snapshot is not None and progress.digest != self.snapshot.digest:
            self.snapshot = Snapshot.unpack(progress.snapshot)  # the store has grown: the job goes on with what it had
        if int(self._epoch[0]) < 0:
            self._epoch[0] = progress.epoch
        return progress

    def _read(self, ref: Ref) -> LazySample:
        routes = self.routes == "read"
        return LazySample.of_shard(
            ref.key, layers=self.layers, tokens=self.tokens, routes=routes, sample_id=ref.sample_id
        )


def substituted(sample: LazySample, error: R3Error) -> None:
    sample.__dict__["instead_of"] = error.where or str(error)


def warn(error: R3Error, what: str) -> None:
    warnings.warn(f"a shard cannot be read, {what}: {error}", R3Warning, stacklevel=2)


def place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and size of data parallelism.

    Raises:
        ConfigError: only one of them, not a rank, or neither in a job of several processes, where guessing would train
            every rank on the same samples, or parts of one model on different ones.
    """
    if rank is None and world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
            if size > 1:
                raise ConfigError(
                    "this job has several processes: which share of the samples is this one's?",
                    expected="rank and world_size of data parallelism",
                    remedy="without tensor, pipeline or context parallelism torch.distributed.get_rank() and "
                    "get_world_size(); with Megatron parallel_state.get_data_parallel_rank() and ..._world_size()",
                )
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ConfigError("not a data-parallel rank", expected="0 <= rank < world_size", got=f"{rank} of {world_size}")
    return rank, world_size
