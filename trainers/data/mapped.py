"""ShardDataset: one data-parallel rank's share of the samples of some stores, by index. See `r3.trainers.data.iterating`
for the other kind, and for which to take."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset, get_worker_info

from r3.errors import ConfigError, ShardError, StoreError
from r3.trainers.data.lazy import LazySample
from r3.trainers.data.share import Share, substituted, warn
from r3.trainers.data.snapshot import Ref, pack


class ShardDataset(Share, Dataset[LazySample]):
    """Map-style: index i is the i-th sample of this rank's share of the epoch.

    Leave shuffling to it (`shuffle=False` in the loader, no sampler): its order is the epoch's.

    Args:
        sources: A Snapshot; or stores, paths or URLs, of which one is taken with `steps`, `versions`, `group_size`,
            `incomplete` and `bad` as `Snapshot.take` says. In a job of several ranks take one Snapshot for all
            (`Snapshot.shared`).
        rank, world_size: Of data parallelism: ranks that hold parts of one model have the same. Without torch.distributed,
            0 and 1.
        seed, shuffle: Of the order; groups stay together, their samples adjacent.
        uneven: What is done where units do not divide by `world_size`: `raise`, `drop` or `pad` (`r3.trainers.data.dealing`).
        layers, tokens: Global decoder layers, and a range of tokens, whose routes are wanted; all if not given.
        routes: `lazy`, or `read` with the sample (in the loader's worker, and sent from there).

    Raises:
        ConfigError: settings that cannot work; units that do not divide.
        StoreError, ShardError: as `Snapshot.take`; of an item, its shard is gone or damaged. With `bad="skip"` and without
            groups the next sample of the share that is whole stands in for it, and its `instead_of` names the damaged one.
    """

    def __len__(self) -> int:
        return len(self._deal(self.epoch, self._done).shares[self.rank]) * self._require_snapshot().unit_size

    def __getitem__(self, index: int) -> LazySample:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"sample {index} of a share of {count}")
        index %= count
        snapshot = self._require_snapshot()
        try:
            return self._read(self._ref(index))
        except (ShardError, StoreError) as error:
            if not snapshot.skip_bad or snapshot.grouped:
                raise
            for after in range(1, count):
                try:
                    sample = self._read(self._ref((index + after) % count))
                except (ShardError, StoreError):
                    continue
                substituted(sample, error)
                warn(error, f"sample {sample.sample_id!r} given in its place")
                return sample
            raise

    def _ref(self, index: int) -> Ref:
        snapshot = self._require_snapshot()
        share = self._deal(self.epoch, self._done).shares[self.rank]
        return snapshot.units[share[index // snapshot.unit_size]].refs[index % snapshot.unit_size]

    def set_epoch(self, epoch: int) -> None:
        """As above; what was given out before a merged state was saved is dealt again in another epoch."""
        if epoch != self.epoch:
            self._done = ()
        super().set_epoch(epoch)

    def state_dict(self, given: int | None = None) -> dict[str, Any]:
        """The snapshot and the epoch.

        Args:
            given: Samples of this rank's share that were given out (steps times batch size), for `merge_states`; the loader's own
                state has the position for the same number of ranks.
        """
        return self._progress(done=pack(list(self._done)) if self._done else "", given=given).to_state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the snapshot and the epoch of a state; load it before the loader is made: its sampler asks for the length.

        Raises:
            ConfigError: a state of other settings, of another rank or number of ranks, or in a worker of a loader whose
                dataset did not load it itself.
        """
        before = self._require_snapshot().digest
        progress = self._load(state)
        if get_worker_info() is not None and progress.digest != before:
            raise ConfigError(
                "the store has grown since the state was saved, and the loader's sampler has counted the new samples",
                remedy="dataset.load_state_dict(state of the dataset) first, then loader.load_state_dict(...)",
            )
        if progress.given:
            raise ConfigError(
                "a map-style dataset cannot begin in the middle of its share: the loader's sampler does that",
                got=f"{progress.given} samples given out",
                remedy="load the loader's state on the same ranks; on others, merge_states([... of all ranks])",
            )
        self._done = progress.done_units()
