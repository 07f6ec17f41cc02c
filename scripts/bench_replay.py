"""What replay costs in the trainer: the replayed router's forward against the live one, and a whole training step.

    python scripts/bench_replay.py            # on a GPU if there is one

Pairs of runs, live and replayed in alternating order, in one process; the table shows the median of the ratios and their
quartiles, so that a machine that slows down halfway slows both. On a CPU one thread runs and its processor time counts, so
that neighbours do not. Weights and routes are random: neither changes the work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from timing import timed

from r3 import RolloutSample, Routes, RoutingSpec
from r3.microbatch import MicroBatch, TokenCheck
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
    if device.type == "cpu":
        torch.set_num_threads(1)
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

    gate, hidden_states = model.model.layers[0].mlp.gate, torch.randn(samples * tokens, hidden, device=device)

    def router() -> None:
        for _ in range(20):
            gate(hidden_states)

    replay = attach(model)

    def replayed_step() -> None:
        with replay.micro_batch(batch, layout, input_ids):
            step()

    def ratios(of: Callable[[], None], to: Callable[[], None]) -> np.ndarray:
        return paired(of, to, pairs, device)

    results = {}
    for name, least in (
        ("", 0.0),
        (", agreement compared", 1e-9),
    ):  # random routes agree by chance: compare, never raise
        replay.min_agreement = least
        results[f"router forward, replay / live{name}"] = replayed_router(
            replay.micro_batch(batch, layout, input_ids), router, step, pairs, device
        )
        results[f"training step, replay / live{name}"] = ratios(replayed_step, step)
    results["training step, live / live again"] = ratios(step, step)

    def set_up() -> None:
        MicroBatch(batch, layout, spec, device, min_agreement=1e-9)
        TokenCheck(batch, layout, input_ids)

    results["set-up of a micro-batch / training step"] = ratios(set_up, step)
    idle = []
    for i in range(pairs):
        for attached in (True, False) if i % 2 else (False, True):
            detach(model)
            if attached:
                attach(model)
            idle.append((attached, timed(step, device)))
    times = {attached: np.array([t for a, t in idle if a == attached]) for attached in (True, False)}
    results["training step, attached and idle / not attached"] = times[True] / times[False]
    detach(model)
    print_table(
        results, f"{device}, {samples} x {tokens} tokens, {layers} layers, top-{top_k} of {experts}, hidden {hidden}"
    )
    size = spec.num_moe_layers * layout.num_positions * spec.top_k * spec.dtype.itemsize
    print(
        f"routes on the device: {size:,} bytes a micro-batch; one layer widened: {layout.num_positions * spec.top_k * 8:,}"
    )


def replayed_router(
    block: AbstractContextManager[MicroBatch],
    router: Callable[[], None],
    step: Callable[[], None],
    pairs: int,
    device: torch.device,
) -> np.ndarray:
    """A router is live outside the block and replayed inside; they cannot alternate, so live runs before and after."""
    before = [timed(router, device) for _ in range(pairs)]
    block.__enter__()
    inside = [timed(router, device) for _ in range(pairs)]
    step()  # the forward that the block must see
    block.__exit__(None, None, None)
    after = [timed(router, device) for _ in range(pairs)]
    return np.array(inside) / (np.array(before) + np.array(after)) * 2


def paired(a: Callable[[], None], b: Callable[[], None], pairs: int, device: torch.device) -> np.ndarray:
    """Ratios of the times of a and b, alternating which goes first."""
    a()
    b()
    ratios = []
    for i in range(pairs):
        order = (a, b) if i % 2 else (b, a)
        first, second = (timed(run, device) for run in order)
        ratios.append(first / second if i % 2 else second / first)
    return np.array(ratios)


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
