"""What the datasets cost: samples a second against reading the same files with safetensors, with and without routes.

    python scripts/bench_data.py [--samples 64] [--tokens 4096] [--rounds 15] [--directory DIR]

48 layers, top-8 of 128 experts. The ways run in turn, over all samples each; medians of one run. Samples a second and ratios
are of processor time (all threads), which a busy machine disturbs least. The page cache is warm: there software costs most. One
process, without DataLoader workers. safetensors alone verifies nothing; r3 compares checksums and checks the ids.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import typer
from bench_shard import sample_of
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from safetensors.numpy import load_file

from r3 import ShardStore
from r3.trainers.data import LazySample, ShardDataset, ShardIterableDataset, Snapshot

STAGE = tuple(range(12, 24))


def main(samples: int = 64, tokens: int = 4096, rounds: int = 15, directory: str = "") -> None:
    with tempfile.TemporaryDirectory(dir=directory or None) as folder:
        store = ShardStore(Path(folder) / "shards", create=True)
        whole = sample_of(tokens, tokens // 8)
        for number in range(samples):
            object.__setattr__(whole, "sample_id", f"prompt-{number // 8}.{number % 8}")
            object.__setattr__(whole, "group_id", f"prompt-{number // 8}")
            store.add(whole, fsync=False)
        size = sum(path.stat().st_size for path in Path(store.url).iterdir()) / samples
        snapshot = Snapshot.take(store)
        paths = [ref.key for ref in snapshot.refs()]
        budget = int(8 * size)

        def routes(read: Any) -> int:
            return sum(int(sample.routes.ids[0, 0, 0]) for sample in read)

        ways: dict[str, tuple[Callable[[], Any], str]] = {
            "safetensors, all but the routes": (lambda: [without_routes(path) for path in paths], ""),
            "dataset, routes not read": (
                lambda: [sample.num_tokens for sample in ShardDataset(snapshot)],
                "safetensors, all but the routes",
            ),
            "safetensors.load_file": (lambda: [load_file(path)["routed_experts"][0, 0, 0] for path in paths], ""),
            "ShardStore.open": (lambda: routes(map(store.open, store.sample_ids())), "safetensors.load_file"),
            "dataset, routes read": (
                lambda: routes(ShardDataset(snapshot, routes="read")),
                "safetensors.load_file",
            ),
            "dataset, routes read late": (lambda: routes(ShardDataset(snapshot)), "safetensors.load_file"),
            "stream, 4 threads ahead": (
                lambda: routes(ShardIterableDataset(snapshot, prefetch_bytes=budget)),
                "safetensors.load_file",
            ),
            "safetensors, 12 of 48 layers": (lambda: [stage(path)[0, 0, 0] for path in paths], ""),
            "dataset, 12 of 48 layers": (
                lambda: routes(ShardDataset(snapshot, routes="read", layers=STAGE)),
                "safetensors, 12 of 48 layers",
            ),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}  # wall, processor
        for turn in range(rounds + 1):
            for name, (way, _) in ways.items():
                begin, used = time.perf_counter(), time.process_time()
                way()
                if turn:
                    seconds[name].append((time.perf_counter() - begin, time.process_time() - used))
        medians = {name: np.median(np.array(times), axis=0) / samples for name, times in seconds.items()}
        rows = []
        for name, (_, against) in ways.items():
            wall, processor = medians[name]
            ratio = f"{medians[against][1] / processor:.2f}" if against else "-"
            rows.append(
                [name, f"{1 / processor:,.0f}", f"{processor * 1e3:.2f}", f"{wall * 1e3:.2f}", against or "-", ratio]
            )
        title = f"{samples} samples of {tokens} tokens, {size / 1e6:.2f} MB each, {rounds} rounds"
        show(title, ["way", "samples/s", "processor ms", "wall ms", "against", "ratio"], rows)
        looks(store)
        slow_consumer(snapshot, budget)


def without_routes(path: str) -> int:
    with safe_open(path, "numpy") as file:
        return sum(len(file.get_tensor(name)) for name in ("tokens", "rollout_logprobs", "spans"))


def stage(path: str) -> Any:
    with safe_open(path, "numpy") as file:
        return file.get_slice("routed_experts")[STAGE[0] : STAGE[-1] + 1]


def looks(store: ShardStore) -> None:
    """Snapshots: a listing, and with the heads of all shards."""
    for what, options in (("listing", {}), ("with groups", {"group_size": 8})):
        begin, used = time.perf_counter(), time.process_time()
        snapshot = Snapshot.take(store, **options)
        took, used = time.perf_counter() - begin, time.process_time() - used
        each = 1e3 / snapshot.num_samples
        print(f"snapshot, {what}: {used * each:.3f} ms of processor, {took * each:.3f} ms in all for each sample")


def slow_consumer(snapshot: Snapshot, budget: int) -> None:
    """Resident memory over several passes behind a consumer that is ten times slower than reading."""
    LazySample.of_shard(snapshot.refs()[0].key, routes=True)
    before, most, read = resident(), 0, 0
    for _ in range(4):
        for sample in ShardIterableDataset(snapshot, prefetch_bytes=budget):
            read += sample.nbytes
            threading.Event().wait(0.005)
            most = max(most, resident() - before)
    print(f"{read / 1e6:,.0f} MB read behind a slow consumer, budget {budget / 1e6:.0f} MB: resident memory at most "
          f"{most / 1e6:.0f} MB above the start")  # fmt: skip


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    table = Table(title=title)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(width=130).print(table)


if __name__ == "__main__":
    typer.run(main)
