"""Two tensor-parallel ranks want the same 12 of 48 layers of a sample: each reads its shard, or one reads and broadcasts?

    python scripts/bench_megatron_reads.py        # docs/megatron-example.md shows what it printed

Two processes over gloo on one machine, page cache warm. That favours neither by much: both the reads and the broadcast are memory
copies here. Over a network, reads go to a file system and broadcasts through the ranks' interconnect.
"""

from __future__ import annotations

import functools
import socket
import tempfile
import time

import numpy as np
import torch
import typer
from bench_megatron import random_sample, show

from r3 import RoutingSpec, ShardStore

TOKENS = (1024, 8192, 32768)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        spec = RoutingSpec(48, tuple(range(48)), 128, 8)
        store = ShardStore(folder)
        rng = np.random.default_rng(0)
        for tokens in TOKENS:
            store.add(random_sample(rng, spec, tokens, f"t{tokens}"))
        torch.multiprocessing.spawn(read_rank, args=(port, folder), nprocs=2)


def read_rank(rank: int, port: int, folder: str) -> None:
    import torch.distributed as dist

    from r3.partial import PartialSample

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    store, stage = ShardStore(folder), range(12, 24)

    def each(sample_id: str) -> None:
        PartialSample.read(store, sample_id, stage)

    def broadcast(sample_id: str, tokens: int) -> None:
        buffer = torch.empty(12, tokens, 8, dtype=torch.uint8)
        if rank == 0:
            buffer = torch.from_numpy(PartialSample.read(store, sample_id, stage).routes.ids)
        dist.broadcast(buffer, 0)

    rows = []
    for tokens in TOKENS:
        name = f"t{tokens}"
        times: dict[str, list[float]] = {"each": [], "broadcast": []}
        for _ in range(31):
            for kind, run in (
                ("each", functools.partial(each, name)),
                ("broadcast", functools.partial(broadcast, name, tokens)),
            ):
                dist.barrier()
                start = time.perf_counter()
                run()
                dist.barrier()
                times[kind].append(time.perf_counter() - start)
        own, sent = (np.median(times[kind][1:]) * 1e3 for kind in ("each", "broadcast"))
        rows.append([f"{tokens}", f"{own:.2f}", f"{sent:.2f}", f"{own / sent:.2f}"])
    if rank == 0:
        show(
            "ms until both of two TP ranks have the 12 layers of their stage",
            ["tokens", "each reads", "one reads, broadcast", "ratio"],
            rows,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
