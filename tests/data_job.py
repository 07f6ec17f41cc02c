"""A training job for tests: consumes a store with torchdata's StatefulDataLoader, and may be killed in the middle.

After each step it replaces DIRECTORY/rank-<rank>-of-<world>.pkl at once by what it has consumed so far and the loader's state:
that is its checkpoint, from which it goes on when it is started again; or from those of a job of `merged_from` ranks. In
the step after `hang_at` samples it waits to be killed.
"""

from __future__ import annotations

import os
import pickle
import time
import warnings
from pathlib import Path
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from r3.trainers.data import ShardIterableDataset, merge_states, snapshot_in

SIZE = 4
warnings.filterwarnings("ignore", "'set_vital' is deprecated")


def main(store: str, directory: str, rank: int, world_size: int, workers: int, merged_from: int, hang_at: int) -> None:
    os.setsid()  # so that it is killed with its workers
    checkpoint = Path(directory) / f"rank-{rank}-of-{world_size}.pkl"
    consumed: list[str] = []
    state: Any = None
    options: dict[str, Any] = {"rank": rank, "world_size": world_size, "uneven": "pad"}
    if checkpoint.exists():
        consumed, state = pickle.loads(checkpoint.read_bytes())
        dataset = ShardIterableDataset(snapshot_in(state), **options)
    elif merged_from:
        names = [Path(directory) / f"rank-{i}-of-{merged_from}.pkl" for i in range(merged_from)]
        merged = merge_states([pickle.loads(name.read_bytes())[1] for name in names])
        dataset = ShardIterableDataset(snapshot_in(merged), **options)
        dataset.load_state_dict(merged)
    else:
        dataset = ShardIterableDataset(store, group_size=SIZE, **options)
    loader = StatefulDataLoader(dataset, batch_size=SIZE, num_workers=workers, collate_fn=list)
    if state is not None:
        loader.load_state_dict(state)
    for batch in loader:
        if len(consumed) == hang_at:
            time.sleep(600)  # in the middle of a step, to be killed there
        consumed += [sample.sample_id for sample in batch]
        temporary = checkpoint.with_suffix(".tmp")
        temporary.write_bytes(pickle.dumps((consumed, loader.state_dict())))
        os.replace(temporary, checkpoint)
