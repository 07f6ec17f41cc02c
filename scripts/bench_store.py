"""What a store costs where you have it: milliseconds, megabytes a second and cores of adding, reading, slicing and listing.

    python scripts/bench_store.py s3://bucket/scratch [--samples 64] [--tokens 16384]
    python scripts/bench_store.py /mnt/lustre/scratch

Writes into a new folder below the place, and deletes it. A sample is 48 layers, top-8: 6.3 MB at 16,384 tokens. docs/storage.md
says how to read the numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from r3 import RolloutSample, Routes, RoutingSpec, ShardStore

SPEC = RoutingSpec(48, tuple(range(48)), 128, 8)


def sample_of(num_tokens: int) -> RolloutSample:
    rng = np.random.default_rng(0)
    first = rng.integers(0, SPEC.num_experts, (SPEC.num_moe_layers, num_tokens, 1))
    ids = ((first + np.arange(SPEC.top_k)) % SPEC.num_experts).astype(np.uint8)
    recorded = np.arange(num_tokens) < num_tokens - 1
    ids[:, -1] = 0
    return RolloutSample.from_rollout(
        sample_id="s",
        group_id="g",
        spec=SPEC,
        prompt_tokens=rng.integers(0, 1000, num_tokens // 2),
        response_tokens=rng.integers(0, 1000, num_tokens - num_tokens // 2),
        response_logprobs=-rng.random(num_tokens - num_tokens // 2),
        routes=Routes(ids, recorded),
    )


def measure(label: str, work: Callable[[Any], Any], items: Iterable[Any], threads: int, size: int = 0) -> None:
    """Print what a call takes while `threads` are at it, and what of that is this process's own work."""
    items = list(items)
    with ThreadPoolExecutor(threads) as pool:
        begin, busy = time.perf_counter(), time.process_time()
        list(pool.map(work, items))
        taken, busy = time.perf_counter() - begin, time.process_time() - busy
    rate = f"{len(items) * size / taken / 1e6:8.0f} MB/s" if size else " " * 13
    each = 1e3 / len(items)
    print(
        f"{label:34}{threads:3} threads {each * taken * threads:9.2f} ms a call {rate} {each * busy:8.2f} ms of a core"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16384)
    options = parser.parse_args()
    run = ShardStore(f"{options.place.rstrip('/')}/bench-{uuid.uuid4().hex[:8]}", create=True)
    sample = sample_of(options.tokens)
    try:
        for number, threads in enumerate((1, 8, 32)):
            store, ids = run.step(number, create=True), [f"s{i}" for i in range(options.samples)]
            samples = [dataclasses.replace(sample, sample_id=name) for name in ids]
            store.add(dataclasses.replace(sample, sample_id="first"))  # connections are made
            size = store.open_file("first").size
            quarter = SPEC.num_moe_layers // 4

            def stage(
                name: str, tokens: slice = slice(None), store: ShardStore = store, quarter: int = quarter
            ) -> None:
                with store.open_file(name) as file:
                    file.routes(slice(quarter, 2 * quarter), tokens)

            def part(name: str, stage: Any = stage) -> None:
                stage(name, slice(0, options.tokens // 4))

            measure("add", store.add, samples, threads, size)
            measure("open", store.open, ids, threads, size)
            measure("open_file, 12 of 48 layers", stage, ids, threads, size // 4)
            measure("the same, a quarter of the tokens", part, ids, threads, size // 16)
            measure("metadata", store.metadata, ids, threads)
            measure("in", store.__contains__, ids, threads)
            measure("sample_ids", lambda _, store=store: store.sample_ids(), range(8), 1)
    finally:
        for store in run.stores():
            for name in store.sample_ids():
                store.discard(name)


if __name__ == "__main__":
    main()
