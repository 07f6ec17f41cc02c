"""Samples of a store for a trainer: torch datasets that are sharded by data-parallel rank and resumable, with routes read
lazily; a prefetcher with a budget of bytes; a source for Ray Data. How to use them: docs/data.md.

| name | what it is |
|---|---|
| `ShardDataset`, `ShardIterableDataset` | one rank's share of the samples, for a DataLoader or StatefulDataLoader |
| `Snapshot`, `Versions` | which samples a job goes through, decided once; which weight versions |
| `Follow` | how a store is followed while it is filled |
| `LazySample` | a sample whose routes are read when asked for |
| `PackedCollator`, `PackedBatch` | samples in one packed row, and their replay |
| `snapshot_in`, `merge_states`, `states_in` | of a checkpoint: its samples; the same for another number of ranks; its parts |
| `Prefetcher` | reads ahead in threads up to a budget of bytes |
| `read_store`, `sample_of_row` | Ray Data; imported from `r3.trainers.data.ray_source` |
"""

from r3.trainers.data.collate import PackedBatch as PackedBatch
from r3.trainers.data.collate import PackedCollator as PackedCollator
from r3.trainers.data.following import Follow as Follow
from r3.trainers.data.iterating import ShardIterableDataset as ShardIterableDataset
from r3.trainers.data.lazy import LazySample as LazySample
from r3.trainers.data.mapped import ShardDataset as ShardDataset
from r3.trainers.data.prefetch import Prefetcher as Prefetcher
from r3.trainers.data.progress import merge_states as merge_states
from r3.trainers.data.progress import snapshot_in as snapshot_in
from r3.trainers.data.progress import states_in as states_in
from r3.trainers.data.snapshot import Snapshot as Snapshot
from r3.trainers.data.snapshot import Versions as Versions
