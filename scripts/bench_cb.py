"""What capture costs the transformers engine: the same requests with and without, in turn, in one process.

    python scripts/bench_cb.py --model DIR

Two engines, each with its own copy of the model; rounds of on, off, off, on (so that a machine that drifts favours neither), and
before each the prefix cache is emptied. Reported: tokens per second by the clock, and the ratio of throughputs (off's time over
on's) by the CPU time of the process, in which other programs count least: its median and spread over the rounds, and the ratio
of the smallest times, the least disturbed ones. Ids must be the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from r3.rollout.cb.engine import TransformersEngine
from r3.rollout.cb.params import Params
from r3.rollout.cb.requests import Output


def measure(engine: TransformersEngine, prompts: list[list[int]], params: Params) -> tuple[float, float, list[Output]]:
    """Wall seconds, CPU seconds and outputs of one set of requests, all there from the start."""
    engine.flush()
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rng = np.random.default_rng(0)
    params = Params(max_tokens=given.max_tokens)
    engines = [
        TransformersEngine(given.model, dtype=given.dtype, device=given.device, capture=capture, num_blocks=1024)
        for capture in (True, False)
    ]
    with engines[0] as on, engines[1] as off:
        vocabulary = on.model.config.get_text_config().vocab_size
        prompts = [rng.integers(0, vocabulary, given.prompt).tolist() for _ in range(given.requests)]
        for engine in engines:
            measure(engine, prompts[:4], Params(max_tokens=8))
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        ratios = []
        for _ in range(given.rounds):
            found: dict[bool, list[list[int]]] = {}
            for engine in (on, off, off, on):
                wall, cpu, outputs = measure(engine, prompts, params)
                times[engine.capture].append((wall, cpu))
                ids = [output.token_ids for output in outputs]
                if found.setdefault(engine.capture, ids) != ids or found.get(not engine.capture, ids) != ids:
                    raise SystemExit("the ids differ: capture changes what is sampled, or batches were not the same")
            ratios.append(sum(cpu for _, cpu in times[False][-2:]) / sum(cpu for _, cpu in times[True][-2:]))
    least = {capture: min(cpu for _, cpu in times[capture]) for capture in times}
    tokens = given.requests * given.max_tokens
    print(
        f"{given.model}, {given.dtype} on {given.device}: {given.requests} requests of {given.prompt} + {given.max_tokens} tokens"
    )
    for capture in (True, False):
        wall = statistics.median(wall for wall, _ in times[capture])
        cpu = statistics.median(cpu for _, cpu in times[capture])
        print(f"capture {'on ' if capture else 'off'}: {tokens / wall:7.1f} tokens/s, {cpu:.3f} s of CPU (medians)")
    print(
        f"throughput on / off by CPU time: median of {given.rounds} rounds {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
        f"{max(ratios):.3f}), least disturbed {least[False] / least[True]:.3f}; the same ids in all rounds"
    )


if __name__ == "__main__":
    main()
