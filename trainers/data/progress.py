"""Progress: how far a job has come in a snapshot, as a dictionary for a checkpoint; and the way to another number of ranks.

A worker's share is a fixed list, so its progress is one number. On the same ranks and workers a job goes on from these
numbers. On
others the share is another list: `merge_states` takes the states of *all* ranks, adds up what has been given out, and what
is left is dealt anew. Nothing is given twice and nothing is left out, which is why a state that is missing, or is of a
rank that stopped in the middle of a group, is refused.

    states = [torch.load(f"rank-{r}.pt") for r in range(8)]         # loader.state_dict() of each of 8 ranks
    dataset = ShardIterableDataset(store, rank=rank, world_size=6, ...)
    dataset.load_state_dict(merge_states(states))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from r3.errors import ConfigError
from r3.trainers.data.dealing import deal
from r3.trainers.data.snapshot import Snapshot, pack, unpack

FORMAT = 1
MARK = "r3_data"  # key by which a state is found in whatever a loader wraps it in
SETTINGS = ("seed", "shuffle", "uneven")


@dataclass(frozen=True)
class Progress:
    """Where one worker of one rank is.

    Attributes:
        snapshot: Text of the snapshot; "" while a store is followed.
        digest: Of the snapshot.
        epoch, seed, shuffle, uneven: Of the deal.
        world_size, rank, num_workers, worker: Who; all None of a merged state, that is for anybody.
        unit_size: Samples of a unit.
        done: What was given out before this deal, packed: indices of units; their names, while a store is followed.
        given: Samples of its share that were given out; None where only the loader knows.
        taken: While a store is followed, the names of the units of its share that were given out; else None.
    """

    snapshot: str
    digest: str
    epoch: int
    seed: int
    shuffle: bool
    uneven: str
    world_size: int | None
    rank: int | None
    num_workers: int | None
    worker: int | None
    unit_size: int = 1
    done: str = ""
    given: int | None = 0
    taken: tuple[str, ...] | None = None

    def to_state(self) -> dict[str, Any]:
        return {MARK: FORMAT, **asdict(self), "taken": None if self.taken is None else list(self.taken)}

    @classmethod
    def from_state(cls, state: Any) -> Progress:
        """
        Raises:
            ConfigError: not a state of these datasets, or of another version.
        """
        if not isinstance(state, dict) or state.get(MARK) != FORMAT:
            raise ConfigError(
                "not the state of a dataset of shards",
                expected=f"{MARK}={FORMAT}",
                got=f"{MARK}={state.get(MARK)!r}" if isinstance(state, dict) else type(state).__name__,
                remedy="give what state_dict() of the dataset returned; states_in(...) finds it in the state of a loader",
            )
        fields = {name: value for name, value in state.items() if name != MARK}
        if fields.get("taken") is not None:
            fields["taken"] = tuple(fields["taken"])
        try:
            return cls(**fields)
        except TypeError as error:
            raise ConfigError(f"the state of a dataset of shards is not complete ({error})") from None

    def done_units(self) -> tuple[Any, ...]:
        """What `done` lists."""
        return tuple(unpack(self.done)) if self.done else ()

    def require_settings(self, **mine: Any) -> None:
        """Raise unless the dataset deals as the one that was saved."""
        for name in SETTINGS:
            if name == "uneven" and self.world_size is None:  # what is left is dealt anew
                continue
            if getattr(self, name) != mine[name]:
                raise ConfigError(
                    f"the dataset was made with another {name} than the one that was saved",
                    expected=getattr(self, name),
                    got=mine[name],
                    remedy="go on with the settings of the checkpoint, or begin an epoch anew",
                )

    def require_place(self, rank: int, world_size: int, where: str = "this dataset") -> None:
        """Raise unless it is of this rank, or of nobody."""
        if self.world_size is not None and (self.rank, self.world_size) != (rank, world_size):
            raise ConfigError(
                "this state is of another data-parallel rank, or of another number of ranks",
                where=where,
                expected=f"rank {rank} of {world_size}",
                got=f"rank {self.rank} of {self.world_size}",
                remedy="load each rank's own state; for another number of ranks, merge_states([... of all ranks])",
            )


def states_in(state: Any) -> list[dict[str, Any]]:
    """The states of these datasets in what a loader returned (torchdata's StatefulDataLoader: one for each worker).

    Raises:
        ConfigError: the loader saved its workers' states less often than each step, so they are behind.
    """
    if isinstance(state, dict) and state.get("_steps_since_snapshot"):
        raise ConfigError(
            "the loader's state is some steps behind what it gave out",
            expected="snapshot_every_n_steps=1, the default of StatefulDataLoader",
            got=f"{state['_steps_since_snapshot']} steps since",
        )
    return list(_walk(state))


def snapshot_in(state: Any) -> Snapshot:
    """The snapshot in the state of a loader or a dataset: what a resumed job makes its dataset of, so that it goes on with the
    samples that it began with, in later epochs too.

    Raises:
        ConfigError: there is none: not a state of these datasets, or of one that follows a store.
    """
    for found in states_in(state):
        if found.get("snapshot"):
            return Snapshot.unpack(found["snapshot"])
    raise ConfigError(
        "no snapshot in this state", remedy="give what state_dict() of a loader of these datasets returned"
    )


def _walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if MARK in value:
            yield value
        else:
            for item in value.values():
                yield from _walk(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk(item)


def merge_states(states: Sequence[Any]) -> dict[str, Any]:
    """One state for any number of ranks and workers, from those of all ranks and workers of a job.

    Args:
        states: Of datasets, or of loaders of them, in any order.

    Raises:
        ConfigError: not all ranks and workers, one of them twice, of different jobs or epochs, in the middle of a group, or of a
            map-style dataset without the number of samples that was given out.
    """
    every = [Progress.from_state(found) for state in states for found in states_in(state)]
    if not every:
        raise ConfigError("no state of a dataset of shards among these", got=f"{len(states)} states")
    first = every[0]
    for one in every[1:]:
        for name in ("digest", "epoch", *SETTINGS, "world_size", "num_workers", "done"):
            if getattr(one, name) != getattr(first, name):
                raise ConfigError(
                    f"states of different {name.replace('_', ' ')}: they are not of one job at one moment",
                    where=f"rank {one.rank}, worker {one.worker}",
                    expected=getattr(first, name) if name != "done" else "the same units given out before",
                    got=getattr(one, name) if name != "done" else "others",
                )
    if first.world_size is None:
        raise ConfigError("a merged state need not be merged again", remedy="load it")
    workers = first.num_workers or 1
    places = [(one.rank, one.worker or 0) for one in every]
    wanted = {(rank, worker) for rank in range(first.world_size) for worker in range(workers)}
    if set(places) != wanted or len(places) != len(wanted):
        raise ConfigError(
            "the states of all ranks and workers are needed, each once: else samples would be given twice",
            expected=f"{first.world_size} ranks with {workers} workers each",
            got=sorted(places),
        )
    nobody: dict[str, Any] = {"world_size": None, "rank": None, "num_workers": None, "worker": None, "given": 0}
    for one in every:
        require_whole_group(one)
    if first.taken is not None:
        names = set(first.done_units()).union(*(one.taken or () for one in every))
        return replace(first, **nobody, done=pack(sorted(names)), taken=()).to_state()
    snapshot = Snapshot.unpack(first.snapshot)
    done = set(first.done_units())
    dealt = deal(
        [unit.name for unit in snapshot.units],
        [index for index in range(len(snapshot.units)) if index not in done],
        seed=first.seed,
        epoch=first.epoch,
        shuffle=first.shuffle,
        world_size=first.world_size,
        uneven=first.uneven,
    )
    for one in every:
        share = dealt.shares[one.rank or 0][one.worker or 0 :: workers]
        done.update(share[: (one.given or 0) // snapshot.unit_size])
    return replace(first, **nobody, done=pack(sorted(done))).to_state()


def require_whole_group(progress: Progress) -> None:
    """Raise unless this state is between two units."""
    where = f"rank {progress.rank}, worker {progress.worker}"
    if progress.given is None:
        raise ConfigError(
            "a map-style dataset does not know how many of its samples were given out",
            where=where,
            remedy="save dataset.state_dict(given=steps * batch_size) on each rank",
        )
    if progress.given % progress.unit_size:
        raise ConfigError(
            "this state is in the middle of a group, of which no other deal can give the second half",
            where=where,
            expected=f"a multiple of {progress.unit_size} samples",
            got=progress.given,
            remedy="save where groups end: choose a batch size that is a multiple of group_size",
        )
