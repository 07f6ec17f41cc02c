"""What replay costs in Megatron-core, beside Megatron's own routing, Megatron's own RouterReplay and veRL's.

    python scripts/bench_megatron.py            # docs/megatron-example.md shows what it printed

One real GPTModel with random weights and routes: neither changes the work. Times are ratios of paired runs in alternating order;
on a CPU one thread runs and its processor time counts, so that neighbours do not.

- router: `TopKRouter.forward` with r3's seam, and with Megatron's RouterReplay, against the router's own top-k;
- waiting: operations that a replayed router call issues and a live one does not, and those of them that would wait for a GPU;
- memory: bytes of index tensors that each replay holds, on the same work: micro-batches in flight, after their backward, and
  after forward-only passes.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from timing import timed
from torch.utils._python_dispatch import TorchDispatchMode

from r3 import Layout, RolloutSample, Routes, RoutingSpec

VOCABULARY = 512
# On a GPU these bring a number to the host: the rest of the program waits for the device.
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "item",
    "masked_select",
    "unique",
    "is_nonzero",
    "equal",
    "repeat_interleave.Tensor",
)


def main(
    layers: int = 4,
    hidden: int = 512,
    experts: int = 128,
    top_k: int = 8,
    tokens: Annotated[int, typer.Option(help="Of a micro-batch, in 4 samples.")] = 2048,
    in_flight: Annotated[int, typer.Option(help="Micro-batches in flight, for memory.")] = 4,
    pairs: Annotated[int, typer.Option(help="Paired runs of each measurement.")] = 21,
) -> None:
    warnings.filterwarnings("ignore")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    model, spec = build(layers, hidden, experts, top_k)
    device = next(model.parameters()).device
    work = Work(model, spec, tokens)
    title = f"{device}, {tokens} tokens, {layers} layers, top-{top_k} of {experts}, hidden {hidden}"
    rows = [
        [
            name,
            f"{np.median(r):.3f}",
            f"{np.quantile(r, 0.25):.3f} to {np.quantile(r, 0.75):.3f}",
            f"{r.min():.3f} to {r.max():.3f}",
        ]
        for name, r in router_times(work, pairs, device).items()
    ]
    show(f"router forward, ratio of times ({title})", ["", "median", "quartiles", "range"], rows)
    added = waiting(work)
    print(
        f"operations that replay adds to a router call: {added['added'] or 'none'}; it leaves out: {added['left out']}"
    )
    print(f"of those added, operations that wait for a GPU: {added['wait'] or 'none'}\n")
    rows = [[name, *(f"{value:,}" for value in values)] for name, values in memory(work, in_flight).items()]
    show(
        f"bytes of index tensors held ({in_flight} micro-batches; {title})",
        ["", "in flight", "after backward", "after forward-only"],
        rows,
    )


def build(layers: int, hidden: int, experts: int, top_k: int) -> tuple[Any, RoutingSpec]:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from r3.trainers.megatron.attention import local_block_spec
    from r3.trainers.megatron.model import initialize

    initialize()
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=8,
        num_query_groups=2,
        ffn_hidden_size=hidden,
        moe_ffn_hidden_size=64,
        num_moe_experts=experts,
        moe_router_topk=top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        params_dtype=torch.float32,
    )
    model = GPTModel(config, local_block_spec(config), VOCABULARY, 4096, position_embedding_type="rope")
    return model.train(), RoutingSpec.from_config(config)


class Work:
    """One micro-batch of four samples, and the model that replays it."""

    def __init__(self, model: Any, spec: RoutingSpec, tokens: int) -> None:
        self.model, self.spec = model, spec
        rng = np.random.default_rng(0)
        self.samples = [random_sample(rng, spec, tokens // 4, f"s{i}") for i in range(4)]
        self.layout = Layout.padded([s.num_tokens for s in self.samples])
        total = np.concatenate([s.tokens for s in self.samples]).astype(np.int64)
        device = next(model.parameters()).device
        self.tokens = torch.from_numpy(self.layout.gather(total, fill=0)).reshape(4, -1).to(device)
        self.router = model.decoder.layers[0].mlp.router
        self.hidden = torch.randn(tokens // 4, 4, model.config.hidden_size, device=device)

    def forward(self) -> torch.Tensor:
        output: torch.Tensor = self.model(self.tokens, None, None)
        return output

    def route(self) -> None:
        self.router(self.hidden)

    def targets(self) -> list[torch.Tensor]:
        """[rows, K] int64 of each layer in the router's order, [s, b]: what the other replays are given."""
        rows = self.layout.transpose(4).rows
        ids = np.concatenate([s.routes.ids for s in self.samples], axis=1)[:, rows]
        return [torch.from_numpy(layer.astype(np.int64)).to(self.tokens.device) for layer in ids]


# Time ---------------------------------------------------------------------------------------------------------------------


def router_times(work: Work, pairs: int, device: torch.device) -> dict[str, np.ndarray]:
    """Ratios of a router's forward under each replay to its own; a router is live outside a block and replayed inside."""
    from r3.trainers.megatron import attach, detach

    out = {}
    for name, agreement in (("r3 replay / live", 0.0), ("r3 replay, agreement compared / live", 1e-9)):
        replay = attach(work.model, work.spec, min_agreement=agreement)
        with contextlib.ExitStack() as block:
            batch = contextlib.ExitStack()

            def inside(on: bool, replay: Any = replay, batch: contextlib.ExitStack = batch) -> None:
                if on:
                    batch.enter_context(replay.micro_batch(work.model, work.samples, work.layout, work.tokens))
                else:
                    with torch.no_grad():
                        work.forward()  # the forward that a block must see
                    batch.close()

            block.callback(batch.close)
            out[name] = switched(work.route, inside, pairs, device)
        detach(work.model)
    with other_replay(work, "Megatron") as (replays, actions):

        def act(on: bool) -> None:
            for one, target in zip(replays, work.targets(), strict=True):
                one.set_target_indices(target)
                one.set_router_replay_action(actions.REPLAY_FORWARD if on else None)

        out["Megatron's RouterReplay / live"] = switched(work.route, act, pairs, device)
    out["live / live again"] = switched(work.route, lambda _: None, pairs, device)
    return out


def switched(run: Callable[[], None], switch: Callable[[bool], None], pairs: int, device: torch.device) -> np.ndarray:
    """time(on) / time(off), of runs of 10 that alternate."""
    ratios = []
    for pair in range(pairs + 1):
        times = {}
        for on in (True, False) if pair % 2 else (False, True):
            if on:
                switch(True)
            times[on] = timed(lambda: [run() for _ in range(10)], device)
            if on:
                switch(False)
        ratios.append(times[True] / times[False])
    return np.array(ratios[1:])  # the first pair warms up


class Operations(TorchDispatchMode):
    """Counts what is issued to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name == "index.Tensor" and any(i is not None and i.dtype == torch.bool for i in args[1]):
            name = "nonzero (index by a mask)"
        self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def waiting(work: Work) -> dict[str, str]:
    """Operations of one router call inside a forward, replayed against live."""
    from r3.trainers.megatron import attach, detach

    live = of_one_router(work)
    replay = attach(work.model, work.spec, min_agreement=1e-9)
    with replay.micro_batch(work.model, work.samples, work.layout, work.tokens):
        replayed = of_one_router(work)
    detach(work.model)
    added, gone = replayed - live, live - replayed
    waits = Counter({name: n for name, n in added.items() if name.startswith(WAITS)})
    return {name: as_text(counts) for name, counts in (("added", added), ("left out", gone), ("wait", waits))}


@torch.no_grad()
def of_one_router(work: Work) -> Counter[str]:
    mode = Operations()
    hooks = [
        work.router.register_forward_pre_hook(lambda *_: mode.__enter__() and None),
        work.router.register_forward_hook(lambda *_: mode.__exit__(None, None, None)),
    ]
    work.forward()
    for hook in hooks:
        hook.remove()
    return mode.seen


def as_text(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"


# Memory -------------------------------------------------------------------------------------------------------------------


def memory(work: Work, in_flight: int) -> dict[str, list[int]]:
    """Bytes of integer tensors: in flight, after backward, after as many forward-only passes; of a replay, beyond live."""
    from r3.trainers.megatron import attach, detach

    out = {"live (what the model itself holds)": measure(work.forward, in_flight, lambda: None)}
    replay = attach(work.model, work.spec, min_agreement=1e-9)  # random routes agree by chance: compare, never raise

    def ours() -> torch.Tensor:
        with replay.micro_batch(work.model, work.samples, work.layout, work.tokens):
            return work.forward()

    out["r3"] = measure(ours, in_flight, lambda: None)
    detach(work.model)
    for whose in ("Megatron", "veRL"):
        with other_replay(work, whose) as (replays, actions):

            def theirs(replays: Any = replays, actions: Any = actions, whose: str = whose) -> torch.Tensor:
                for one, target in zip(replays, work.targets(), strict=True):
                    mask = {"replay_mask": torch.from_numpy(work.layout.rows >= 0)} if whose == "veRL" else {}
                    one.set_target_indices(target, **mask)
                    one.set_router_replay_action(actions.REPLAY_FORWARD)
                output = work.forward()
                for one in replays:
                    one.set_router_replay_action(actions.REPLAY_BACKWARD)
                return output

            def clear(replays: Any = replays) -> None:
                for one in replays:  # what a step's end does
                    one.clear_indices()

            out[f"{whose}'s RouterReplay"] = measure(theirs, in_flight, clear)
    name, live = next(iter(out.items()))
    return {
        name: live,
        **{n: [a - b for a, b in zip(values, live, strict=True)] for n, values in out.items() if n != name},
    }


def measure(forward: Callable[[], torch.Tensor], count: int, clear: Callable[[], None]) -> list[int]:
    before = held_bytes()
    outputs = [forward() for _ in range(count)]
    flying = held_bytes() - before
    for output in outputs:
        output.float().logsumexp(-1).mean().backward()
    del outputs, output
    after = held_bytes() - before
    clear()
    with torch.no_grad():
        for _ in range(count):
            forward()
    return [flying, after, held_bytes() - before]


def held_bytes() -> int:
    """Of the storages of all integer and boolean tensors that Python can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and not thing.is_floating_point():
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@contextlib.contextmanager
def other_replay(work: Work, whose: str) -> Iterator[tuple[list[Any], Any]]:
    """One RouterReplay of Megatron's or veRL's in each router; (they, their actions)."""
    if whose == "veRL":
        from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction
    else:
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    routers = [layer.mlp.router for layer in work.model.decoder.layers]
    replays = [RouterReplay() for _ in routers]
    for router, replay in zip(routers, replays, strict=True):
        router.router_replay = replay
    try:
        yield replays, RouterReplayAction
    finally:
        for router in routers:
            router.router_replay = None


def random_sample(rng: np.random.Generator, spec: RoutingSpec, tokens: int, sample_id: str) -> RolloutSample:
    first = rng.integers(0, spec.num_experts, (spec.num_moe_layers, tokens, 1))
    ids = ((first + np.arange(spec.top_k) * (spec.num_experts // spec.top_k)) % spec.num_experts).astype(spec.dtype)
    return RolloutSample.from_rollout(
        sample_id=sample_id,
        spec=spec,
        prompt_tokens=rng.integers(0, VOCABULARY, 8),
        response_tokens=rng.integers(0, VOCABULARY, tokens - 8),
        response_logprobs=np.full(tokens - 8, -1.0),
        routes=Routes(ids, np.arange(tokens) < tokens - 1),
    )


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
