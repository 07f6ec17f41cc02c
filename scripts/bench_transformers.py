"""What capture costs the transformers engine: the same requests with and without, in turn, in one process.

    python scripts/bench_transformers.py --model DIR

One model: two copies of the same weights differ by 5 % in speed, by where they lie in memory, whatever they run. The engine is
started on it anew for each measurement, with capture or without, in rounds of on, off, off, on (so that a machine that drifts
favours neither); only requests are timed. Reported: tokens per second by the clock; the ratio of throughputs (off's time over
on's) by the CPU time of the process, in which other programs count least, and by the clock: its median over the rounds with a
bootstrap interval of 95 %, and the ratio of the smallest CPU times, the least disturbed ones. Ids must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from r3.rollout.transformers.engine import TransformersEngine
from r3.rollout.transformers.loading import load
from r3.rollout.transformers.params import Params
from r3.rollout.transformers.requests import Output


def measure(engine: TransformersEngine, prompts: list[list[int]], params: Params) -> tuple[float, float, list[Output]]:
    """Wall seconds, CPU seconds and outputs of one set of requests, all there from the start."""
    wall, cpu = time.perf_counter(), time.process_time()
    runs = engine.between_two_steps(lambda: [engine.submit(each, params, seed=i) for i, each in enumerate(prompts)])
    outputs = [run.future.result() for run in runs]
    return time.perf_counter() - wall, time.process_time() - cpu, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rng = np.random.default_rng(0)
    params = Params(max_tokens=given.max_tokens)
    model, _ = load(given.model, given.dtype, given.device)
    engines = {capture: TransformersEngine(model, capture=capture, num_blocks=1024) for capture in (True, False)}
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [rng.integers(0, vocabulary, given.prompt).tolist() for _ in range(given.requests)]
    times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    known: list[list[int]] = []
    steps = 0
    for _ in range(given.rounds):
        for capture in (True, False, False, True):
            with engines[capture] as engine:
                measure(engine, prompts[:2], Params(max_tokens=2))
                engine.flush()
                begun = engine.counters["steps"]
                wall, cpu, outputs = measure(engine, prompts, params)
                steps = engine.counters["steps"] - begun
            times[capture].append((wall, cpu))
            ids = [output.token_ids for output in outputs]
            known = known or ids
            if ids != known:
                raise SystemExit("the ids differ: capture changes what is sampled, or batches were not the same")
    tokens = given.requests * given.max_tokens
    print(
        f"{given.model}, {given.dtype} on {given.device}: {given.requests} requests of {given.prompt} + "
        f"{given.max_tokens} tokens, {steps} steps"
    )
    for capture in (True, False):
        wall, cpu = (statistics.median(each) for each in zip(*times[capture], strict=True))
        print(
            f"capture {'on ' if capture else 'off'}: {tokens / wall:7.1f} tokens/s, {cpu:.3f} s of CPU, "
            f"{cpu / steps * 1e3:.2f} ms a step (medians)"
        )
    on, off = (np.array(times[capture]).reshape(given.rounds, 2, 2) for capture in (True, False))
    ratios = off.sum(1) / on.sum(1)  # [rounds, 2]
    for kind, column in (("CPU time", 1), ("clock", 0)):
        print(f"throughput on / off by {kind}: {interval(ratios[:, column])}")
    least = off[:, :, 1].min() / on[:, :, 1].min()
    print(f"least disturbed {least:.3f} by CPU time; {given.rounds} rounds, the same ids in all of them")


def interval(values: np.ndarray) -> str:
    """Median and its 95 % interval, by bootstrap over the rounds."""
    drawn = np.random.default_rng(0).choice(values, (2000, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return f"{np.median(values):.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
