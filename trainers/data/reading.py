"""UnitReader: the samples of units, in order; read ahead if wanted; and what stands in the place of those that cannot be read.

A rank that leaves a damaged shard out has one sample less than the others, which then wait for it. So on a single rank a
unit that cannot be read is left out; with several, another unit of the share is given again in its place, and its samples say so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from r3.errors import ShardError, StoreError
from r3.trainers.data.lazy import LazySample
from r3.trainers.data.prefetch import Prefetcher
from r3.trainers.data.share import substituted, warn
from r3.trainers.data.snapshot import Ref, Unit


class UnitReader:
    """
    Args:
        layers, tokens, routes: As of a dataset.
        skip_bad: Go on where a shard cannot be read; else raise.
        alone: There is one rank: leave such units out, rather than give others again.
        budget: Bytes to read ahead, routes included; 0 for not.
        threads: Of reading ahead.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int] | None,
        tokens: slice,
        routes: bool,
        skip_bad: bool,
        alone: bool,
        budget: int = 0,
        threads: int = 4,
    ) -> None:
        self.layers, self.tokens, self.routes = layers, tokens, routes
        self.skip_bad, self.alone, self.budget, self.threads = skip_bad, alone, budget, threads

    def read(
        self, units: Iterable[Unit], earlier: Iterable[Unit] = ()
    ) -> Generator[tuple[str, list[LazySample]], None, None]:
        """Name and samples of each unit; no samples of one that is left out.

        Args:
            earlier: Units of the share that were given out before it was gone on with: one of them may have to stand in.

        Raises:
            ShardError, StoreError: a shard cannot be read, and bad ones are not skipped; or with several ranks, none of a
                share can.
        """
        if not self.budget:
            yield from self._whole(map(self._open, units), earlier)
            return
        with Prefetcher(
            units, self._stage, budget=self.budget, threads=self.threads, name=lambda unit: repr(unit.name)
        ) as ahead:
            yield from self._whole(ahead, earlier)

    def _sample(self, ref: Ref, routes: bool) -> LazySample:
        return LazySample.of_shard(
            ref.key, layers=self.layers, tokens=self.tokens, routes=routes, sample_id=ref.sample_id
        )

    def _samples(self, unit: Unit) -> list[LazySample]:
        return [self._sample(ref, self.routes or self.budget > 0) for ref in unit.refs]

    def _open(self, unit: Unit) -> _Read:
        try:
            return _Read(unit, self._samples(unit))
        except (ShardError, StoreError) as error:
            return self._unreadable(unit, error)

    def _stage(self, unit: Unit) -> tuple[int, Callable[[], _Read]]:
        """For the prefetcher: all but the routes now, which are a few percent, and the routes when there is room."""
        try:
            samples = [self._sample(ref, False) for ref in unit.refs]
        except (ShardError, StoreError) as error:
            unreadable = self._unreadable(unit, error)
            return 0, lambda: unreadable

        def read() -> _Read:
            try:
                for sample in samples:
                    _ = sample.routes
            except (ShardError, StoreError) as error:
                return self._unreadable(unit, error)
            return _Read(unit, samples)

        return sum(sample.nbytes for sample in samples), read

    def _unreadable(self, unit: Unit, error: ShardError | StoreError) -> _Read:
        if not self.skip_bad:
            raise error
        return _Read(unit, [], error)

    def _whole(self, reads: Iterable[_Read], earlier: Iterable[Unit]) -> Iterator[tuple[str, list[LazySample]]]:
        """Units whose samples could all be read, by name. One that could not is empty on a single rank; with several,
        another one's samples stand in its place, so that no rank has fewer than the others."""
        spare: Unit | None = None
        owed: list[_Read] = []
        for read in reads:
            if read.error is None:
                spare = read.unit
                yield read.unit.name, read.samples
            elif self.alone:
                warn(read.error, "left out")
                yield read.unit.name, []
            else:
                owed.append(read)
                spare = spare or next((unit for unit in earlier if self._open(unit).error is None), None)
            while owed and spare is not None:
                bad = owed.pop(0)
                again = self._samples(spare)
                assert bad.error is not None
                for sample in again:
                    substituted(sample, bad.error)
                warn(bad.error, f"unit {spare.name!r} given again in its place")
                yield bad.unit.name, again
        if owed:
            raise StoreError(
                "no shard of a rank's share can be read", where=str(owed[0].unit.refs[0].key), got=str(owed[0].error)
            )


@dataclass(frozen=True)
class _Read:
    unit: Unit
    samples: list[LazySample]
    error: ShardError | StoreError | None = None
