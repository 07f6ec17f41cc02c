"""Snapshot: which samples of one or more stores a training job goes through, decided once and the same on every rank.

A store may be filled while it is read. Ranks that list it at different moments see different samples, deal them differently,
and one of them waits for ever in a collective for a batch that another does not have. So a job lists once and keeps the
list: it is what is dealt out, what a checkpoint holds, and what a resumed job goes on with. In a distributed job take it
on one rank and send it to the others, `Snapshot.shared(lambda: Snapshot.take(...))`: 512 ranks that each open 32,000
shards would be a storm.

What is decided here, and counted in `report`: samples of weights that are too old or too new, groups that are not
complete, shards that cannot be read. Nothing is left out without a count.

A *unit* is what is dealt out whole: a sample, or with `group_size` the samples of one prompt, which GRPO needs together.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from r3.errors import ConfigError, R3Error, ShardError, StoreError
from r3.shard.files import is_url
from r3.store import ShardStore, require_named
from r3.trainers.data.lazy import key_of, version_range

Source = ShardStore | str | os.PathLike[str]
POLICIES = ("raise", "drop")
BAD = ("raise", "skip")
_OPENERS = 16  # threads that read heads of shards: they wait for disks and object stores, not for a processor


class Ref(NamedTuple):
    """A sample by its key (path or URL of its shard) and id."""

    key: str
    sample_id: str


class Unit(NamedTuple):
    """What is dealt out whole: one sample, or a group."""

    name: str  # <store>|<sample or group id>; the store by its place among the sources
    refs: tuple[Ref, ...]


@dataclass(frozen=True)
class Versions:
    """Which weight versions a sample may have been sampled with; a sample counts by its tokens in the loss.

    Attributes:
        oldest, newest: Bounds, inclusive; None for none.
    """

    oldest: int | None = None
    newest: int | None = None

    @classmethod
    def within(cls, current: int, staleness: int) -> Versions:
        """At most `staleness` updates older than the version that is being trained, and none newer."""
        return cls(current - staleness, current)

    def verdict(self, low: int, high: int) -> str:
        """ "" where a sample of these versions is used, else why not."""
        if low < 0:
            return "unknown version"
        if self.oldest is not None and low < self.oldest:
            return "too old"
        return "too new" if self.newest is not None and high > self.newest else ""


@dataclass
class Report:
    """What was left out, and why.

    Attributes:
        kept: Samples that are used.
        left_out: Samples by reason: `too old`, `too new`, `unknown version`, `incomplete group`.
        incomplete: Samples of each group that has not as many as a group must have.
        bad: Message by key, of shards that cannot be read.
    """

    kept: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    incomplete: dict[str, int] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"{self.kept} samples", *(f"{count} left out: {why}" for why, count in sorted(self.left_out.items()))]
        return ", ".join([*parts, f"{len(self.bad)} unreadable: {', '.join(self.bad)}"] if self.bad else parts)

    def count(self, why: str, number: int = 1) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + number


class Head(NamedTuple):
    """What is known of a sample from the first bytes of its shard."""

    ref: Ref
    group_id: str
    verdict: str


@dataclass(frozen=True)
class Selection:
    """Where samples are, and which of them are wanted; see `Snapshot.take` for the arguments."""

    roots: tuple[str, ...]  # paths or URLs: a client of an object store does not survive a fork, or a pickle
    steps: tuple[int, ...] | None = None
    versions: Versions | None = None
    group_size: int | None = None
    incomplete: str = "raise"
    bad: str = "raise"

    def __post_init__(self) -> None:
        for name, value, allowed in (("incomplete", self.incomplete, POLICIES), ("bad", self.bad, BAD)):
            if value not in allowed:
                raise ConfigError(f"unknown value of {name}", expected=" or ".join(allowed), got=value)
        if self.group_size is not None and self.group_size < 1:
            raise ConfigError("a group has at least one sample", got=self.group_size)

    @property
    def needs_heads(self) -> bool:
        """Whether shards are opened to decide; else a listing is enough."""
        return self.versions is not None or self.group_size is not None or self.bad == "skip"

    def listing(self) -> dict[str, tuple[str, Ref]]:
        """Each sample that is there now by its name in this selection, with its store's name; sorted within each store.

        Names do not hold the stores' own paths, so a job that finds its stores elsewhere deals alike.
        """
        found = {}
        for number, root in enumerate(map(ShardStore, self.roots)):
            below = root.stores() if self.steps is None else [root.step(step) for step in self.steps]
            for store in below:
                place = f"{number}{store.url[len(root.url) :]}"
                for sample_id in store.sample_ids():
                    found[f"{place}|{sample_id}"] = (place, Ref(key_of(store, sample_id), sample_id))
        return found

    def heads(self, refs: Sequence[Ref], report: Report) -> list[Head | None]:
        """The head of each; None of one that cannot be read, if `bad="skip"`.

        Raises:
            ShardError, StoreError: one cannot be read, and `bad="raise"`.
        """
        if not refs:
            return []
        with ThreadPoolExecutor(min(_OPENERS, len(refs)), thread_name_prefix="r3-heads") as pool:
            heads = list(pool.map(self._head, refs))
        for head in heads:
            if isinstance(head, R3Error) and self.bad == "raise":
                raise head
        for ref, head in zip(refs, heads, strict=True):
            if isinstance(head, R3Error):
                report.bad[ref.key] = str(head)
        return [None if isinstance(head, R3Error) else head for head in heads]

    def _head(self, ref: Ref) -> Head | R3Error:
        from r3 import shard

        try:
            with shard.open_file(ref.key) as file:
                require_named(ref.key, ref.sample_id, file.metadata.get("sample_id", ""))
                low, high = version_range(file.weight_version, file.loss_mask)
                verdict = "" if self.versions is None else self.versions.verdict(low, high)
                return Head(ref, file.metadata.get("group_id", ""), verdict)
        except (ShardError, StoreError) as error:
            return error

    def gather(self, listed: dict[str, tuple[str, Ref]], report: Report) -> dict[str, list[Ref]]:
        """The samples that are wanted, by unit; groups may not be complete. Those left out are counted in `report`."""
        if not self.needs_heads:
            return {name: [ref] for name, (_, ref) in listed.items()}
        units: dict[str, list[Ref]] = {}
        heads = self.heads([ref for _, ref in listed.values()], report)
        for (name, (place, ref)), head in zip(listed.items(), heads, strict=True):
            if head is None:
                continue
            if head.verdict:
                report.count(head.verdict)
            elif self.group_size is None:
                units[name] = [ref]
            elif not head.group_id:
                raise StoreError(
                    "a sample that belongs to no group, where whole groups are wanted",
                    where=ref.key,
                    remedy="leave group_size out, or collect with a group id (r3 collect gives the prompt's)",
                )
            else:
                units.setdefault(f"{place}|{head.group_id}", []).append(ref)
        return units

    def settle(self, units: dict[str, list[Ref]], report: Report) -> list[Unit]:
        """The units that are complete; the others are left out or raised.

        Raises:
            StoreError: a group has not `group_size` samples, and `incomplete="raise"`.
        """
        size = self.group_size or 1
        wrong = {name: len(refs) for name, refs in units.items() if len(refs) != size}
        if wrong and self.incomplete == "raise":
            name, count = next(iter(wrong.items()))
            raise StoreError(
                f"{len(wrong)} of {len(units)} groups do not have {size} samples that can be used",
                where=f"group {name!r}",
                expected=size,
                got=count,
                remedy='wait for the rest, correct group_size, or leave such groups out with incomplete="drop"',
            )
        report.incomplete.update(wrong)
        if wrong:
            report.count("incomplete group", sum(wrong.values()))
        whole = [Unit(name, tuple(refs)) for name, refs in units.items() if name not in wrong]
        report.kept += sum(len(unit.refs) for unit in whole)
        return whole


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The samples of a job, in units of `unit_size`.

    Attributes:
        units: All of them, in the order of the stores.
        unit_size: Samples of each unit: 1, or the size of a group.
        grouped: Whether units are groups.
        report: What was left out.
        skip_bad: Whether a shard that turns out to be damaged when it is read is skipped as well, by name.
    """

    units: tuple[Unit, ...]
    unit_size: int
    grouped: bool
    report: Report
    skip_bad: bool = False

    @classmethod
    def take(
        cls,
        sources: Source | Sequence[Source],
        *,
        steps: Iterable[int] | None = None,
        versions: Versions | None = None,
        group_size: int | None = None,
        incomplete: str = "raise",
        bad: str = "raise",
    ) -> Snapshot:
        """What is in the stores now.

        Args:
            sources: Stores, paths or URLs; of a run of steps, its root: the samples of all of its steps.
            steps: Only these steps of each source.
            versions: Weight versions to use.
            group_size: Keep the samples of a prompt together, n each; None deals sample by sample.
            incomplete: Groups of another size `raise` or are left out (`drop`) and counted.
            bad: A shard that cannot be read raises, or is skipped (`skip`) and reported by name.

        Raises:
            StoreError: no such store, or nothing of it can be used.
            ShardError: a shard cannot be read.
        """
        return cls.of(select(sources, steps, versions, group_size, incomplete, bad))

    @classmethod
    def of(cls, selection: Selection) -> Snapshot:
        """As `take`, of a Selection."""
        report = Report()
        units = selection.settle(selection.gather(selection.listing(), report), report)
        if not units:
            raise StoreError(
                "no sample that can be used",
                where=", ".join(selection.roots),
                got=str(report),
                remedy="`r3 inspect` lists what is there; check steps, versions and group_size",
            )
        size = selection.group_size
        return cls(tuple(units), size or 1, size is not None, report, selection.bad == "skip")

    @classmethod
    def shared(cls, take: Callable[[], Snapshot], *, group: Any = None) -> Snapshot:
        """The snapshot that rank 0 takes, on every rank of the process group.

        Args:
            take: Called on rank 0 of the group only.
            group: A torch process group; the default one if None.

        Raises:
            R3Error: what rank 0 raises, all raise; where it is of another kind, a StoreError on the other ranks.
        """
        import torch.distributed as dist

        box: list[Any] = [None]
        failed: Exception | None = None
        first = dist.get_global_rank(group, 0) if group is not None else 0
        if dist.get_rank() == first:
            try:
                box = [take()]
            except Exception as error:  # of any kind: the others wait for an answer
                failed = error
                told = f"the first rank cannot take the snapshot ({type(error).__name__}: {error})"
                box = [error if isinstance(error, R3Error) else StoreError(told)]
        dist.broadcast_object_list(box, src=first, group=group)
        if failed is not None:
            raise failed
        if isinstance(box[0], R3Error):
            raise box[0]
        snapshot: Snapshot = box[0]
        return snapshot

    @property
    def num_samples(self) -> int:
        return len(self.units) * self.unit_size

    def refs(self) -> list[Ref]:
        """All samples, in the order of the units."""
        return [ref for unit in self.units for ref in unit.refs]

    @cached_property
    def packed(self) -> str:
        """Text of it for a checkpoint, without the report."""
        units = [[unit.name, [list(ref) for ref in unit.refs]] for unit in self.units]
        return pack([units, self.unit_size, self.grouped, self.skip_bad])

    @cached_property
    def digest(self) -> str:
        """Equal where the units are."""
        return xxhash.xxh3_128_hexdigest("\n".join([*(unit.name for unit in self.units), str(self.unit_size)]).encode())

    @classmethod
    def unpack(cls, text: str) -> Snapshot:
        units, unit_size, grouped, skip_bad = unpack(text)
        made = tuple(Unit(name, tuple(Ref(*ref) for ref in refs)) for name, refs in units)
        return cls(made, unit_size, grouped, Report(kept=len(made) * unit_size), skip_bad)


def select(
    sources: Source | Sequence[Source],
    steps: Iterable[int] | None,
    versions: Versions | None,
    group_size: int | None,
    incomplete: str,
    bad: str,
) -> Selection:
    """A Selection of what a user gave."""
    many = [sources] if isinstance(sources, (ShardStore, str, os.PathLike)) else list(sources)
    urls = [one.url if isinstance(one, ShardStore) else ShardStore(one).url for one in many]
    roots = tuple(url if is_url(url) else os.path.abspath(url) for url in urls)
    return Selection(roots, None if steps is None else tuple(steps), versions, group_size, incomplete, bad)


def id_of(name: str) -> str:
    """The sample's or the group's id in the name of a unit, which is `<store>|<id>`."""
    return name.partition("|")[2]


def pack(value: Any) -> str:
    return base64.b85encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 3)).decode()


def unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b85decode(text)))
