"""Jobs of several processes: killed and resumed, on other ranks, over a process group, with workers that are spawned."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import data_job
import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import SPEC, random_sample
from torch.utils.data import DataLoader

from r3 import ShardStore
from r3.errors import ConfigError, StoreError
from r3.trainers.data import ShardDataset, ShardIterableDataset, Snapshot

pytestmark = pytest.mark.engine
SIZE = 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """36 groups of 4."""
    store = ShardStore(tmp_path_factory.mktemp("jobs"))
    rng = np.random.default_rng(0)
    for group in range(36):
        for number in range(SIZE):
            sample = random_sample(rng, SPEC, 12, sample_id=f"p{group}.{number}", group_id=f"p{group}")
            store.add(sample, fsync=False)
    return store


def start(store: ShardStore, out: Path, rank: int, world_size: int, merged_from: int = 0, hang_at: int = -1) -> Any:
    arguments = (store.url, str(out), rank, world_size, 2, merged_from, hang_at)
    job = torch.multiprocessing.get_context("fork").Process(target=data_job.main, args=arguments)
    job.start()
    return job


def consumed(out: Path, world_size: int) -> list[list[str]]:
    return [pickle.loads((out / f"rank-{rank}-of-{world_size}.pkl").read_bytes())[0] for rank in range(world_size)]


def kill_after(jobs: list[Any], out: Path, world_size: int, samples: int) -> None:
    """Kill -9 each job, workers included, in the step after so many samples."""
    for rank, job in enumerate(jobs):
        deadline = time.monotonic() + 60
        path = out / f"rank-{rank}-of-{world_size}.pkl"
        while not path.exists() or len(pickle.loads(path.read_bytes())[0]) < samples:
            assert job.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(job.pid, signal.SIGKILL)
        job.join()


def test_a_job_that_is_killed_goes_on_and_then_on_other_ranks(store: ShardStore, tmp_path: Path) -> None:
    """Killed on 2 ranks, resumed on the same, killed again, and finished on 3: every sample once."""
    for target in (12, 24):
        kill_after([start(store, tmp_path, rank, 2, hang_at=target) for rank in range(2)], tmp_path, 2, target)
    before = consumed(tmp_path, 2)
    assert [len(share) for share in before] == [24, 24]
    left = len(store) - sum(len(share) for share in before)
    jobs = [start(store, tmp_path, rank, 3, merged_from=2) for rank in range(3)]
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    after = consumed(tmp_path, 3)
    assert len({len(share) for share in after}) == 1
    times = Counter(name for share in before + after for name in share)
    assert sorted(times) == store.sample_ids()
    padded = -(left // SIZE) % 3 * SIZE
    assert sum(times.values()) - len(times) == padded


def work(rank: int, port: int, root: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results: dict[str, Any] = {"taken": 0}

    def take(path: str) -> Snapshot:
        results["taken"] += 1
        return Snapshot.take(path, group_size=SIZE)

    snapshot = Snapshot.shared(lambda: take(root))
    dataset = ShardIterableDataset(snapshot, rank=rank, world_size=2)
    results["ids"] = [sample.sample_id for sample in dataset]
    with pytest.raises(StoreError, match="no such store"):  # on both
        Snapshot.shared(lambda: take(f"{root}/absent"))
    with pytest.raises(FileNotFoundError if rank == 0 else StoreError, match="No such file"):  # nobody waits for ever
        Snapshot.shared(lambda: take(os.listdir(f"{root}/absent")[0]))
    with pytest.raises(ConfigError, match="which share of the samples is this one's"):
        ShardDataset(snapshot)
    torch.save(results, Path(out) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_one_rank_looks_for_all(store: ShardStore, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(work, (port, store.url, str(tmp_path)), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert (first["taken"], second["taken"]) == (2, 0)
    assert sorted(first["ids"] + second["ids"]) == store.sample_ids()


def test_workers_that_are_spawned(store: ShardStore) -> None:
    loader = DataLoader(
        ShardIterableDataset(store, routes="read"),
        batch_size=16,
        num_workers=1,
        collate_fn=list,
        multiprocessing_context="spawn",
    )
    samples = [sample for batch in loader for sample in batch]
    assert sorted(sample.sample_id for sample in samples) == store.sample_ids()
    assert samples[0].routes_read
