"""Following: units of a store that is still being filled, as they arrive, until somebody says that the step is complete.

Ranks see samples arrive at different moments, so who gets a unit cannot depend on arrival. It depends on its name: with
`expected` (the group or sample ids that were asked for, which the job knows) units are dealt by their places in that list,
evenly; without, by a hash of the name, which is even only on average. When the step is complete every rank lists the whole
of it, knows how many units each share has got, and those that have fewer are filled up (`uneven="pad"`) or all ranks
raise. What was given out cannot be taken back, so `drop` is refused.

Order: as they arrive, and within one look at the store by the hash of (seed, epoch, name).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from r3.errors import ConfigError, StoreError
from r3.trainers.data.dealing import hashed
from r3.trainers.data.snapshot import Ref, Report, Selection, Unit, id_of


@dataclass(frozen=True)
class Follow:
    """How a store is followed.

    Attributes:
        complete: Says whether nothing more will come: a function (that can be pickled, with DataLoader workers), or the number of
            samples in the stores at which they are complete, those that are filtered out included.
        expected: Ids of the groups (with `group_size`) or samples that were asked for, for an even deal.
        poll_s: Seconds between two looks.
        timeout_s: Give up after so many seconds without a new sample; None waits for ever.
    """

    complete: Callable[[], bool] | int
    expected: Sequence[str] | None = None
    poll_s: float = 1.0
    timeout_s: float | None = None


class Follower:
    """The units of one share, as they arrive.

    Args:
        selection: Which samples; see `Snapshot.take`.
        follow: How to look, and how long.
        slot, slots: This share, of so many (ranks times workers).
        seed, epoch: Of the order and of the deal.
        uneven: `raise` or `pad`.
        done: Names of units that were given out before these shares were made: every share must know the same.
        taken: Names of this share's units that were given out since, with repetition where padded.

    Attributes:
        report: What was left out so far.
        padded: Units that were given a second time.
    """

    def __init__(
        self,
        selection: Selection,
        follow: Follow,
        *,
        slot: int,
        slots: int,
        seed: int,
        epoch: int,
        uneven: str,
        done: Sequence[str] = (),
        taken: Sequence[str] = (),
    ) -> None:
        if uneven == "drop":
            raise ConfigError(
                "what was given out while a store was followed cannot be left out afterwards",
                expected='uneven="pad" or uneven="raise"',
                got='uneven="drop"',
            )
        self.selection, self.follow, self.slot, self.slots = selection, follow, slot, slots
        self.seed, self.epoch, self.uneven = seed, epoch, uneven
        self.done, self.taken = frozenset(done), frozenset(taken)
        self._num_taken = len(taken)
        self.report, self.padded = Report(), 0
        self._slot_of: dict[str, int] | None = None
        self._rest: dict[str, list[Ref]] = {}  # groups that are not complete yet
        self._units: dict[str, Unit] = {}  # all that are left to give out, to whomever

    def units(self, stop: threading.Event) -> Iterator[Unit]:
        """Until the step is complete, or `stop` is set.

        Raises:
            StoreError: nothing arrived for `timeout_s`, a unit that was not expected, or what the selection raises.
            ConfigError: the shares have not the same number of units, and `uneven="raise"`.
        """
        seen: set[str] = set()
        last = time.monotonic()
        while not stop.is_set():
            whole = self._complete()  # asked before the look, so that nothing slips in between
            listed = self.selection.listing()
            if isinstance(self.follow.complete, int):
                whole = len(listed) >= self.follow.complete
            new = {name: value for name, value in listed.items() if name not in seen}
            seen.update(new)
            yield from self._arrived(new)
            if whole:
                yield from self._end()
                return
            last = time.monotonic() if new else last
            if self.follow.timeout_s is not None and time.monotonic() - last > self.follow.timeout_s:
                raise StoreError(
                    f"no new sample for {self.follow.timeout_s:g} s, and nobody says that the step is complete",
                    where=", ".join(self.selection.roots),
                    expected=self.follow.complete if isinstance(self.follow.complete, int) else "complete() to be true",
                    got=f"{len(seen)} samples",
                    remedy="is the rollout side still running? Else raise timeout_s, or pass what complete() waits for",
                )
            stop.wait(self.follow.poll_s)

    def _complete(self) -> bool:
        return callable(self.follow.complete) and self.follow.complete()

    def _arrived(self, new: dict[str, tuple[str, Ref]]) -> list[Unit]:
        """The units of this share that became whole by these samples, in order."""
        for name, refs in self.selection.gather(new, self.report).items():
            self._rest.setdefault(name, []).extend(refs)
        size = self.selection.group_size or 1
        names = [name for name, refs in self._rest.items() if len(refs) >= size]
        ready = []
        for name in sorted(names, key=lambda name: (hashed(self.seed, self.epoch, name), name)):
            refs = self._rest.pop(name)
            if len(refs) > size or name in self._units:
                raise StoreError(
                    "a group has more samples than it should", where=f"group {name!r}", expected=size, got=len(refs)
                )
            if name in self.done:
                continue
            unit = Unit(name, tuple(sorted(refs)))
            self.report.kept += size
            self._units[name] = unit
            if self._slot(name) == self.slot and name not in self.taken:
                ready.append(unit)
        return ready

    def _end(self) -> list[Unit]:
        """What this share needs to have as many units as the others."""
        self.selection.settle(self._rest, Report())  # raises where groups are not complete and shall be
        if self._rest:
            self.report.incomplete.update({name: len(refs) for name, refs in self._rest.items()})
            self.report.count("incomplete group", sum(self.report.incomplete.values()))
        counts = Counter(self._slot(name) for name in self._units)
        most, mine = max(counts.values(), default=0), counts[self.slot]
        if self.uneven == "raise" and any(counts[slot] != most for slot in range(self.slots)):
            raise ConfigError(
                "the shares of the data-parallel ranks and workers are not of one length",
                expected=f"{most} samples or groups each",
                got=[counts[slot] for slot in range(self.slots)],
                remedy='uneven="pad" gives some a second time; tell `expected` for an even deal',
            )
        own = [unit for name, unit in self._units.items() if self._slot(name) == self.slot]
        spare = own or [self._units[name] for name in sorted(self._units)]
        self.padded = most - mine
        # A share that has no unit is filled up with those of others, so not every name that was given out is its own.
        pads_given = self._num_taken - sum(unit.name in self.taken for unit in own)
        return [spare[i % len(spare)] for i in range(pads_given, self.padded)]

    def _slot(self, name: str) -> int:
        if self.follow.expected is None:
            return hashed(self.seed, 0, name) % self.slots
        if self._slot_of is None:
            given = {id_of(name) for name in self.done}
            left = [one for one in self.follow.expected if one not in given]
            self._slot_of = {one: place % self.slots for place, one in enumerate(left)}
        one = id_of(name)
        if one not in self._slot_of:
            raise StoreError(
                "a sample or group arrived that was not expected",
                where=name,
                remedy="give all ids in `expected`, or leave it out",
            )
        return self._slot_of[one]
