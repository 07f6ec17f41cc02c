"""What shards cost: bytes per token, speed of writing and reading, bytes that a slice touches, a store of 100,000 samples.

    python scripts/bench_shard.py [--quick] [--directory DIR]

Ratios of two ways are taken in one run, the ways in turn, each with its own new files; the bars are those of the project.
Prints medians with the 10th and 90th percentile; exit status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from r3 import Provenance, RolloutSample, Routes, RoutingSpec, ShardStore, shard

SPEC = RoutingSpec(48, tuple(range(48)), 128, 8, "qwen3_moe")  # Qwen3-30B-A3B: 384 bytes of routes a token
VOCABULARY = 151936
PROVENANCE = Provenance(
    "vllm",
    "0.30.0",
    "Qwen/Qwen3-30B-A3B",
    "0" * 32,
    1.0,
    0.95,
    20,
    "raw_logprobs",
    "length",
    {"prompt_digest": "0" * 64},
)
missed: list[str] = []


def sample_of(num_tokens: int, prompt: int, spec: RoutingSpec = SPEC) -> RolloutSample:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, spec.num_experts, (spec.num_moe_layers, num_tokens, spec.top_k)).astype(spec.dtype)
    return RolloutSample.from_rollout(
        sample_id="prompt-0123456789abcdef.0",
        group_id="prompt-0123456789abcdef",
        spec=spec,
        prompt_tokens=rng.integers(0, VOCABULARY, prompt),
        response_tokens=rng.integers(0, VOCABULARY, num_tokens - prompt),
        response_logprobs=-rng.random(num_tokens - prompt),
        routes=Routes(ids, np.arange(num_tokens) < num_tokens - 1),
        weight_version=12,
        provenance=PROVENANCE,
    )


def bar(name: str, value: str, met: bool, limit: str) -> None:
    print(f"  {name:<66} {value:>26}   {'ok' if met else 'MISSED'} ({limit})")
    if not met:
        missed.append(name)


def note(name: str, value: str) -> None:
    print(f"  {name:<66} {value:>26}")


def spread(values: list[float], unit: float = 1e3) -> str:
    low, median, high = np.percentile(np.array(values) * unit, [10, 50, 90])
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def in_turn(ways: dict[str, Callable[[Path], object]], directory: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, and of the processor ("<way>, processor"), called in turn with the name of a new file."""
    seconds: dict[str, list[float]] = {name: [] for way in ways for name in (way, f"{way}, processor")}
    for turn in range(rounds + 3):
        names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in names:
            path = directory / f"{turn}.bin"
            begin, used = time.perf_counter(), time.thread_time()
            ways[name](path)
            took, used = time.perf_counter() - begin, time.thread_time() - used
            path.unlink(missing_ok=True)
            if turn >= 3:
                seconds[name].append(took)
                seconds[f"{name}, processor"].append(used)
    return seconds


def bytes_per_token() -> None:
    print("bytes per token on disk at 4,096 tokens, everything included (384 of routes; bar: 2 % more)")
    for name, prompt in {"512 prompt, 3,584 sampled": 512, "3,584 prompt, 512 sampled": 3584, "all sampled": 0}.items():
        size = len(shard.save(sample_of(4096, prompt))) / 4096
        bar(name, f"{size:.2f} (+{size / 384 - 1:.2%})", size <= 384 * 1.02, "<= 391.68")
    sample = sample_of(4096, 512)
    turns = replace(sample, loss_mask=sample.loss_mask & (np.arange(4096) // 32 % 2 == 0))
    size = len(shard.save(turns)) / 4096
    note("512 prompt, then 56 turns of 32 sampled and 32 tool tokens", f"{size:.2f} (+{size / 384 - 1:.2%})")
    wide = replace(SPEC, num_experts=512)
    size = len(shard.save(sample_of(4096, 512, wide))) / 4096
    bar("512 experts, 16-bit ids", f"{size:.2f} (+{size / 768 - 1:.2%})", size <= 768 * 1.02, "<= 783.36")


def writing(directory: Path, rounds: int) -> None:
    sample = sample_of(16384, 2048)
    data = shard.save(sample)

    def plain(path: Path, fsync: bool) -> None:
        with open(path, "wb") as file:
            file.write(data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())

    print(
        f"writing a shard of 16,384 tokens, 48 layers, top-8 ({len(data) / 1e6:.1f} MB), milliseconds, {rounds} rounds"
    )
    for fsync in (False, True):
        seconds = in_turn(
            {
                "plain": lambda path, fsync=fsync: plain(path, fsync),
                "save_file": lambda path, fsync=fsync: shard.save_file(sample, path, fsync=fsync),
            },
            directory,
            rounds,
        )
        how = "with fsync" if fsync else "without fsync"
        for name, values in seconds.items():
            note(f"{name}, {how}", spread(values))
        # Without fsync all is copying in memory: processor time is wall time on a machine that nobody else uses.
        clock = "" if fsync else ", processor"
        ratio = float(np.median(seconds[f"plain{clock}"]) / np.median(seconds[f"save_file{clock}"]))
        bar(f"speed of save_file to a plain write, {how}{clock} time", f"{ratio:.2f}", ratio >= 0.7, ">= 0.7")
    path = directory / "a.safetensors"
    path.write_bytes(data)
    seconds = in_turn(
        {
            "plain": lambda _: path.read_bytes(),
            "load": lambda _: shard.load_file(path),
            "unverified": lambda _: shard.load_file(path, verify=False),
        },
        directory,
        rounds,
    )
    for name, what in {"plain": "read_bytes", "load": "load_file", "unverified": "load_file, verify=False"}.items():
        note(f"{what} (cached)", spread(seconds[name]))


def slices(directory: Path, rounds: int) -> None:
    sample = sample_of(16384, 2048)
    path = directory / "b.safetensors"
    shard.save_file(sample, path)
    print("reading a part of it; bytes as the kernel counts them for this process")
    cases: dict[str, tuple[slice, slice]] = {
        "a pipeline stage: layers 12..23": (slice(12, 24), slice(None)),
        "one layer": (slice(7, 8), slice(None)),
        "a stage's layers, a context-parallel rank's 4,096 tokens": (slice(12, 24), slice(4096, 8192)),
    }
    for name, (layers, tokens) in cases.items():
        begin = _bytes_read()
        with shard.open_file(path) as file:
            part = file.routes(layers, tokens)
        read = _bytes_read() - begin - _OWN
        ratio = read / part.ids.nbytes
        bar(f"{name}: bytes read / needed", f"{ratio:.4f}", ratio <= 1.05, "<= 1.05")

        def take(_: Path, layers: slice = layers, tokens: slice = tokens) -> None:
            with shard.open_file(path) as file:
                file.routes(layers, tokens)

        note("  milliseconds", spread(in_turn({"slice": take}, directory, rounds)["slice"]))


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


_OWN = -(_bytes_read() - _bytes_read())  # what reading the counter itself adds


_OPEN = """
import sys, time
from pathlib import Path
from r3 import ShardStore

def peak_kb():  # of this program; ru_maxrss is no less than that of the process that started it
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

before = peak_kb()
begin = time.perf_counter()
store = ShardStore(sys.argv[1])
ids = store.sample_ids()
opened = time.perf_counter() - begin
sample = store.open(ids[len(ids) // 2])
assert sample.sample_id in store
first = time.perf_counter() - begin
peak = peak_kb()
print(len(ids), opened, first, before / 1024, peak / 1024)
"""


def many(directory: Path, count: int) -> None:
    print(f"a store of {count:,} samples in one directory, opened by a new process")
    store, sample = ShardStore(directory / "store", create=True), sample_of(64, 32, replace(SPEC, top_k=1))
    begin = time.perf_counter()
    for i in range(count):
        store.add(replace(sample, sample_id=f"prompt-{i // 8:06d}.{i % 8}"), fsync=False)
    note("written, samples a second", f"{count / (time.perf_counter() - begin):,.0f}")
    runs = []
    for _ in range(5):
        out = subprocess.run(
            [sys.executable, "-c", _OPEN, str(store.root)], capture_output=True, text=True, check=True
        ).stdout.split()
        assert int(out[0]) == count
        runs.append([float(value) for value in out[1:]])
    listed, first, before, peak = np.median(runs, axis=0)
    bar("opened and listed, one sample read: seconds", f"{first:.2f} (list {listed:.2f})", first < 2, "< 2")
    bar("peak memory of that process, MB (imports alone first)", f"{peak:.0f} ({before:.0f})", peak < 200, "< 200")
    begin = time.perf_counter()
    tokens = 0
    for sample_id in store.sample_ids():
        with store.open_file(sample_id) as file:
            tokens += file.num_tokens
    note("heads of all of them read and verified, seconds (what `inspect` does)", f"{time.perf_counter() - begin:.1f}")
    assert tokens == 64 * count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, 10,000 samples")
    parser.add_argument("--directory", help="where to write; about 1 GB; default: the temporary directory")
    arguments = parser.parse_args()
    rounds, count = (15, 10_000) if arguments.quick else (60, 100_000)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        bytes_per_token()
        writing(Path(directory), rounds)
        slices(Path(directory), rounds)
        many(Path(directory), count)
    print(f"{len(missed)} bars missed" if missed else "all bars met")
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
