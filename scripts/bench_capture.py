"""What capture costs in a forward: on, off (paused), and unbound, each against a model that was never bound.

    python scripts/bench_capture.py                   # on a GPU if there is one
    python scripts/bench_capture.py --model .r3/tiny  # a model of yours

Runs of a state and of the never-bound model alternate in one process; the table shows the ratio of the quickest run of each,
which a busy machine disturbs least, and the median of the ratios with its quartiles. On a CPU one thread runs and its processor
time counts. "On" is everything an engine adds to a step: begin, all
layers, snapshot, copy to the host, rows into the pool. A small model shows the most: its layers leave the least to hide in.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from timing import timed

from r3 import RoutingSpec
from r3.rollout.capture import RoutePool, RoutingCapturer, bind

Times = np.ndarray


def main(
    model: Annotated[str, typer.Option(help="Directory of a MoE model; a random tiny Qwen3-MoE if empty.")] = "",
    rows: Annotated[list[int] | None, typer.Option(help="Tokens of a step.")] = None,
    pairs: Annotated[int, typer.Option(help="Paired runs of each measurement.")] = 41,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)
    never = load(model).to(device).eval()
    bound = copy.deepcopy(never)
    spec = RoutingSpec.from_config(never.config)
    for num_rows in rows or [8, 32, 512]:
        with torch.no_grad():
            results = measure(never, bound, spec, num_rows, pairs, device)
        print_table(results, f"{device}, a step of {num_rows} tokens, {spec.brief()}, {pairs} pairs")
    print(f"off in an engine's own layer: one None check, {none_check() * 1e9:.0f} ns")


def load(path: str) -> torch.nn.Module:
    if path:
        return transformers.AutoModelForCausalLM.from_pretrained(path)
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=256,
            moe_intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=32,
            num_experts_per_tok=4,
        )
    )


def measure(
    never: torch.nn.Module, bound: torch.nn.Module, spec: RoutingSpec, num_rows: int, pairs: int, device: torch.device
) -> dict[str, Times]:
    """Times of a step, by state. A step is `num_rows` sequences of one token: decoding without attention's share."""
    tokens = torch.randint(0, 256, (num_rows, 1), device=device)
    slots = torch.arange(1, num_rows + 1, device=device)
    pool, capturer = RoutePool(num_rows, spec), RoutingCapturer(spec, max_tokens=num_rows, device=device)
    tags = torch.from_numpy(pool.allocate(slots)).to(device)

    def plain() -> torch.Tensor:
        return never(tokens, use_cache=False).logits

    def idle() -> torch.Tensor:
        return bound(tokens, use_cache=False).logits

    def captured() -> torch.Tensor:
        capturer.begin_step(num_rows)
        logits = idle()
        pool.commit(capturer.snapshot(slots, generations=tags))
        return logits

    results = {"never bound": paired(plain, plain, pairs, device)}

    def state(name: str, run: Callable[[], torch.Tensor]) -> None:
        if not torch.equal(run(), plain()):
            raise SystemExit(f"{name}: other outputs than the model that was never bound")
        results[name] = paired(run, plain, pairs, device)

    for way in (None, "selection"):
        with bind(bound, capturer, way=way) as binding:
            name = "top-k interception" if way else "the router's own output"
            state(f"on, {name}", captured)
            binding.pause()
            state(f"off (paused), {name}", idle)
    state("unbound", idle)
    return results


def paired(run: Callable[[], object], base: Callable[[], object], pairs: int, device: torch.device) -> Times:
    """Seconds [pairs, 2] of both, alternating which goes first."""
    run(), base()
    times = np.empty((pairs, 2))
    for i in range(pairs):
        for which in (0, 1) if i % 2 else (1, 0):
            times[i, which] = timed((run, base)[which], device)
    return times


def print_table(results: dict[str, Times], title: str) -> None:
    table = Table("state / never bound", "quickest", "median", "quartiles", title=title, title_justify="left")
    for name, times in results.items():
        quickest = times.min(0)
        low, median, high = np.quantile(times[:, 0] / times[:, 1], (0.25, 0.5, 0.75))
        table.add_row(
            name,
            f"{quickest[0] / quickest[1]:.3f} ({quickest[0] * 1e3:.2f} ms / {quickest[1] * 1e3:.2f} ms)",
            f"{median:.3f}",
            f"{low:.3f} to {high:.3f}",
        )
    Console(width=110).print(table)


def none_check() -> float:
    """Seconds of `if self.capture_fn is not None`, by a loop with it and one without."""

    class Layer:
        capture_fn = None

    layer, n = Layer(), 1_000_000
    best = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(n):
            if layer.capture_fn is not None:
                raise AssertionError
        middle = time.process_time()
        for _ in range(n):
            pass
        best.append((middle - start) - (time.process_time() - middle))
    return min(best) / n


if __name__ == "__main__":
    typer.run(main)
