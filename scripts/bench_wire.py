"""How fast payloads become checked Routes, against the least that anybody could do with the same bytes.

    python scripts/bench_wire.py [--tokens 16384] [--rounds 15]

One sample of 16k tokens, 48 layers, top-8 of 128 experts, as vLLM sends it (uint8 `.npy`, 8.4 MB of base64) and as SGLang does
(int32, 33.6 MB). Every round times all contestants once, in another order, and a ratio is the median of the rounds' ratios: other
load on the machine then meets all of them. Ratios above 1 mean that r3 is faster.

veRL's own function is called if veRL is installed (`AgentLoopOutput.as_dict`, which every sample of an agent loop passes). It
begins with the array, as vLLM in the same process gives it; over HTTP the base64 comes on top. slime's consumer is two calls of
numpy on SGLang's payload. Neither checks anything, and neither reorders to layers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import pybase64

from r3 import RoutingSpec, wire

LAYERS, TOP_K, EXPERTS = 48, 8, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: on a machine that does other work"
    )
    args = parser.parse_args()

    spec = RoutingSpec(LAYERS, tuple(range(LAYERS)), EXPERTS, TOP_K)
    rows = random_rows(args.tokens - 1)
    npy, int32 = wire.encode_vllm(rows), wire.encode_sglang(rows)
    print(
        f"{len(rows)} rows x {LAYERS} layers x top-{TOP_K} of {EXPERTS}; numpy {np.__version__}, pybase64 {version()}"
    )
    print(
        f"vLLM payload {len(npy) / 1e6:.1f} MB, SGLang payload {len(int32) / 1e6:.1f} MB, Routes {rows.nbytes / 1e6:.1f} MB\n"
    )

    ours = "r3.wire.decode, vLLM payload"
    ours_sglang = "r3.wire.decode, SGLang payload"
    contestants: dict[str, Callable[[], object]] = {
        ours: lambda: wire.decode(npy, spec, num_tokens=args.tokens),
        "b64decode + frombuffer": lambda: np.frombuffer(pybase64.b64decode(npy), np.uint8),
        "b64decode(validate=True) + frombuffer": lambda: np.frombuffer(
            pybase64.b64decode(npy, validate=True), np.uint8
        ),
        "frombuffer + one copy": lambda: np.frombuffer(pybase64.b64decode(npy, validate=True), np.uint8).copy(),
        ours_sglang: lambda: wire.decode(int32, spec, num_tokens=args.tokens),
        "slime: b64decode + frombuffer(int32)": lambda: slime(int32, args.tokens),
    }
    verl = verl_consumer(args.tokens)
    if verl is None:
        print("veRL is not installed: its path is left out\n")
    else:
        contestants["veRL: as_dict of the array"] = lambda: verl(rows)
        contestants["veRL: b64decode + np.load + as_dict"] = lambda: verl(wire.parse_npy(pybase64.b64decode(npy)))

    seconds = measure(contestants, args.rounds, time.perf_counter if args.clock == "wall" else time.process_time)
    print(f"{'':40} {'median':>9} {'range':>17}   r3 / this, vLLM   r3 / this, SGLang")
    for name, times in seconds.items():
        ratios = "".join(f"{ratio(times, seconds[base]):>20}" for base in (ours, ours_sglang))
        spread = f"{min(times) * 1e3:.2f}-{max(times) * 1e3:.2f}"
        print(f"{name:40} {statistics.median(times) * 1e3:6.2f} ms {spread:>17} {ratios}")
    print("\nratio: speed of r3 over speed of this, median of paired rounds (quartiles)")


def random_rows(num_rows: int) -> np.ndarray:
    """[R, L, K] distinct ids, 4,000 rows at a time to stay within some 200 MB."""
    rng = np.random.default_rng(0)
    parts = []
    for begin in range(0, num_rows, 1000):
        scores = rng.random((min(1000, num_rows - begin), LAYERS, EXPERTS), dtype=np.float32)
        parts.append(scores.argpartition(TOP_K, axis=2)[..., :TOP_K].astype(np.uint8))
    return np.concatenate(parts)


def slime(payload: str, num_tokens: int) -> np.ndarray:
    """The operations of slime's rollout on `meta_info["routed_experts"]`."""
    data = np.frombuffer(pybase64.b64decode(payload.encode("ascii")), dtype=np.int32)
    return data.reshape(num_tokens - 1, LAYERS, TOP_K)


def verl_consumer(num_tokens: int) -> Callable[[np.ndarray], object] | None:
    try:
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
    except ImportError:
        return None
    half = num_tokens // 2
    prompt, response = list(range(half)), list(range(num_tokens - half))
    metrics = AgentLoopMetrics()

    def consume(rows: np.ndarray) -> object:
        output = AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=response,
            response_mask=[1] * len(response),
            routed_experts=rows,
            metrics=metrics,
        )
        return output.as_dict()["routed_experts"]

    return consume


def measure(
    contestants: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for i in range(rounds + 2):
        for name in order[i % len(order) :] + order[: i % len(order)]:
            contestants[name]()  # its memory is then where it will be
            begin = clock()
            contestants[name]()
            if i >= 2:
                seconds[name].append(clock() - begin)
    return seconds


def ratio(theirs: list[float], ours: list[float]) -> str:
    ratios = [their / our for their, our in zip(theirs, ours, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def version() -> str:
    return str(pybase64.get_version())


if __name__ == "__main__":
    main()
