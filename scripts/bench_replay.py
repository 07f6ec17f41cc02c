"""What replay costs in the trainer: the replayed router's forward against the live one, and a whole training step.

    python scripts/bench_replay.py            # on a GPU if there is one

Pairs of runs, live and replayed in alternating order, in one process; the table shows the median of the ratios and their
quartiles, so that a machine that slows down halfway slows both. Weights and routes are random: neither changes the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from r3 import RolloutSample, Routes, RoutingSpec
from r3.trainers.transformers import attach, detach, right_padded


def main(
    layers: int = 4,
    hidden: int = 512,
    experts: int = 64,
    top_k: int = 8,
    samples: int = 4,
    tokens: int = 512,
    pairs: Annotated[int, typer.Option(help="Paired runs of each measurement.")] = 15,
    checkpointing: bool = True,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 8,
        num_experts=experts,
        num_experts_per_tok=top_k,
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(device).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    spec = RoutingSpec.from_config(config)
    rng = np.random.default_rng(0)
    batch = [random_sample(rng, spec, tokens, f"s{i}") for i in range(samples)]
    layout, input_ids, mask = right_padded(batch)
    input_ids, mask = input_ids.to(device), mask.to(device)

    def step() -> None:
        model(input_ids, attention_mask=mask, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        model.zero_grad()

    replay = attach(model)
    gate, hidden_states = model.model.layers[0].mlp.gate, torch.randn(samples * tokens, hidden, device=device)

    def router() -> None:
        for _ in range(20):
            gate(hidden_states)

    def replayed_step() -> None:
        with replay.micro_batch(batch, layout, input_ids):
            step()

    router_ratios, setup_ratios = [], []
    for _ in range(pairs):
        live_step = timed(step, device)
        live_router = timed(router, device)
        block = replay.micro_batch(batch, layout, input_ids)
        setup_ratios.append(timed(block.__enter__, device) / live_step)
        router_ratios.append(timed(router, device) / live_router)
        step()  # the forward that the block must see
        block.__exit__(None, None, None)
    results = {
        "router forward, replay / live": np.array(router_ratios),
        "micro-batch set-up / live training step": np.array(setup_ratios),
        "training step, replay / live": paired(replayed_step, step, pairs, device),
    }
    detach(model)
    print_table(
        results, f"{device}, {samples} x {tokens} tokens, {layers} layers, top-{top_k} of {experts}, hidden {hidden}"
    )


def paired(a: Callable[[], None], b: Callable[[], None], pairs: int, device: torch.device) -> np.ndarray:
    """Ratios of the times of a and b, alternating which goes first."""
    a()
    b()
    ratios = []
    for i in range(pairs):
        order = (a, b) if i % 2 else (b, a)
        times = {run: timed(run, device) for run in order}
        ratios.append(times[a] / times[b])
    return np.array(ratios)


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of one call, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def random_sample(rng: np.random.Generator, spec: RoutingSpec, tokens: int, sample_id: str) -> RolloutSample:
    ids = rng.random((spec.num_moe_layers, tokens, spec.num_experts)).argsort(-1)[..., : spec.top_k].astype(spec.dtype)
    return RolloutSample.from_rollout(
        sample_id=sample_id,
        spec=spec,
        prompt_tokens=rng.integers(0, 500, 8),
        response_tokens=rng.integers(0, 500, tokens - 8),
        response_logprobs=np.full(tokens - 8, -1.0),
        routes=Routes(ids, np.arange(tokens) < tokens - 1),
    )


def print_table(results: dict[str, np.ndarray], title: str) -> None:
    table = Table("ratio", "median", "quartiles", "pairs", title=title, title_justify="left")
    for name, ratios in results.items():
        low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75))
        table.add_row(name, f"{median:.3f}", f"{low:.3f} to {high:.3f}", str(len(ratios)))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
