"""Measure a rollout pool: memory under a slow consumer, what goes through Ray, and the driver's own cost per sample.

    python scripts/bench_ray.py slow-consumer --samples 2000 --budget-mb 200      # shards of 4 MB
    python scripts/bench_ray.py overhead --samples 5000                           # shards of a few KB: what the pool itself costs

The engine is a stand-in that answers at once with the same real wire bytes each time; everything after it is real: decoding,
checks, writing, Ray. Memory is that of the driver, of the workers and of Ray's own processes on this machine, by /proc (PSS,
in which shared memory counts once), with the object store in it; read twice a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from r3 import RoutingSpec, ShardStore
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Completion, Sampling
from r3.testing import random_rows
from r3.wire import encode_vllm

SPEC = RoutingSpec(num_layers=48, moe_layers=tuple(range(48)), num_experts=128, top_k=8, model_type="qwen3_moe")


class SameBytes:
    """An engine that answers at once."""

    def __init__(self, tokens: int, prompt: int) -> None:
        rng = np.random.default_rng(0)
        rows = np.tile(random_rows(rng, SPEC, 64), (-(-(tokens + prompt) // 64), 1, 1))[: tokens + prompt - 1]
        self.payload = encode_vllm(rows)
        self.prompt, self.tokens = np.arange(prompt), rng.integers(0, 1000, tokens)
        self.logprobs = -rng.random(tokens).astype(np.float32)

    async def __aenter__(self) -> SameBytes:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def sample(self, prompt: Prompt, *, seed: int | None = None) -> Completion:  # noqa: ARG002
        return Completion(self.prompt, self.tokens, self.logprobs, self.payload, "length", "stand-in")

    async def info(self) -> EngineInfo:
        return EngineInfo((), SPEC, "stand-in", engine_version="0.30.0", logprobs_mode="raw_logprobs")


def open_engine(sampling: Sampling, tokens: int, prompt: int = 16) -> SameBytes:  # noqa: ARG001
    return SameBytes(tokens, prompt)


def memory_mb() -> dict[str, float]:
    """PSS by role of this process and all that it started."""
    found = {"driver": 0.0, "workers": 0.0, "ray": 0.0}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            line, size = " ".join(process.cmdline()), process.memory_full_info().pss / 1e6
        except psutil.Error:
            continue
        role = "driver" if process.pid == os.getpid() else "workers" if "RolloutWorker" in line else "ray"
        found[role] += size
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("slow-consumer", "overhead"))
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--budget-mb", type=float, default=200)
    parser.add_argument("--tokens", type=int, default=0, help="0: 10,000 for slow-consumer, 16 for overhead")
    parser.add_argument("--pause-s", type=float, default=0.03, help="the slow consumer's pause after each sample")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    slow = arguments.what == "slow-consumer"
    tokens = arguments.tokens or (10_000 if slow else 16)
    import ray

    from r3.rollout.ray import Engine, RolloutPool

    environment = {"PYTHONPATH": str(Path(__file__).resolve().parent), "OMP_NUM_THREADS": "1"}
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        runtime_env={"env_vars": environment},
    )
    root = tempfile.mkdtemp(prefix="r3-bench-ray-", dir=os.environ.get("R3_BENCH_DIR"))
    prompts = [Prompt(f"p{i}", 0, "prompt_token_ids", list(range(16))) for i in range(arguments.samples)]
    curve: list[dict[str, float]] = []
    done = threading.Event()
    taken = 0

    def watch() -> None:
        while not done.wait(0.5):
            on_disk = (
                sum(entry.stat().st_size for entry in os.scandir(root) if entry.name.endswith(".safetensors")) / 1e6
            )
            curve.append({**memory_mb(), "unconsumed": on_disk, "samples": taken})

    try:
        with RolloutPool(
            Engine.custom("bench_ray:open_engine", tokens=tokens),
            root,
            workers=arguments.workers,
            slots=16,
            sampling=Sampling(max_tokens=tokens),
            budget_mb=arguments.budget_mb,
            fsync=False,
        ) as pool:
            pool.engine()
            while pool.workers and not all(pool.workers.values()):
                time.sleep(0.05)
            watcher = threading.Thread(target=watch)
            watcher.start()
            begin, processor = time.monotonic(), time.process_time()
            store, held = ShardStore(root), 0
            run = pool.run(prompts)
            for sample in run:
                taken += 1
                held = max(held, run._flow.held)
                if slow:
                    store.open(sample.sample_id)
                    time.sleep(arguments.pause_s)
                    store.discard(sample.sample_id)
            seconds, processor = time.monotonic() - begin, time.process_time() - processor
            done.set()
            watcher.join()
            result: dict[str, Any] = {
                "samples": taken,
                "shard_mb": sample.bytes / 1e6,
                "seconds": round(seconds, 2),
                "samples_per_s": round(taken / seconds, 1),
                "driver_cpu_ms_per_sample": round(processor / taken * 1e3, 3),
                "most_held_mb": round(held / 1e6, 1),
                "failures": len(run.failures),
            }
            if slow:
                result["most_unconsumed_on_disk_mb"] = round(max(point["unconsumed"] for point in curve), 1)
                for name in ("driver", "workers", "ray"):
                    series = [point[name] for point in curve]
                    parts = np.array_split(series, 5)
                    result[f"{name}_mb_by_fifth"] = [round(float(np.mean(part))) for part in parts]
            print(json.dumps(result, indent=2))
    finally:
        done.set()
        shutil.rmtree(root)
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
