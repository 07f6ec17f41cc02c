"""What routes cost a collection: the real collector, with routes and without, against the same servers, in one run.

    python scripts/bench_collect.py payload                 # stand-in servers, 16k tokens x 48 layers x top-8, by rate
    python scripts/bench_collect.py vllm MODEL              # real vLLM: a server without routes, one with them
    python scripts/bench_collect.py model                   # the simulation of r3.budget against real runs at saturation

Three ways of collecting are compared. `plain`: a client that asks for log-probs and token ids and keeps nothing, on a server
without routes. `fetched`: the same client on a server that sends routes, which it drops. `routes`: the collector, checks,
shards and fsync included. They run in turns, A B C, C B A, so that a drift of the machine falls on all alike; a ratio is
that of one turn, and what is printed is the median and the range of the turns. docs/sizing.md has what it printed.

Stand-ins (`r3.budget.standin`) are processes of their own. What they do not have is a GPU: an asked rate stands for one.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from r3 import ShardStore
from r3.budget import PRESETS, Model, Step, measure, shard_bytes, simulate, standins, wire_bytes
from r3.budget.standin import Standins
from r3.rollout.client import VllmClient, keep_freed_memory
from r3.rollout.collector import collect
from r3.rollout.preflight import EngineInfo, preflight
from r3.rollout.prompts import Prompt, read_prompts
from r3.rollout.protocol import Sampling

app = typer.Typer(add_completion=False, help=__doc__, rich_markup_mode=None)
QWEN = PRESETS["qwen3-30b-a3b"]
HEADER = f"{'rate asked':>10} {'way':>8} {'samples/s':>9} {'tokens/s':>11} {'collector ms':>12} {'servers ms':>10}   of plain"


@dataclass(frozen=True)
class Turn:
    """One collection: its seconds, and the processor's seconds of the collector's process and of the stand-ins."""

    samples: int
    tokens: int
    seconds: float
    processor: float
    servers: float

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


async def fetch(engine: EngineInfo, prompts: Sequence[Prompt], sampling: Sampling, concurrency: int) -> int:
    """Ask for every prompt and keep nothing; returns the sampled tokens."""
    queue, tokens = iter(prompts), [0]

    async def worker(client: VllmClient) -> None:
        for prompt in queue:
            completion = await client.sample(prompt, seed=0)
            tokens[0] += len(completion.token_ids)

    async with VllmClient(engine.urls, engine.model, sampling) as client:
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
    return tokens[0]


async def keep(
    engine: EngineInfo, prompts: Sequence[Prompt], sampling: Sampling, concurrency: int, directory: str
) -> int:
    """The same by the collector, into shards; returns the sampled tokens."""
    store = ShardStore(directory, create=True)
    report = await collect(prompts, store, engine, sampling=sampling, concurrency=concurrency)
    assert report.written == len(prompts), report
    return report.tokens


def timed(work: Callable[[], Coroutine[Any, Any, int]], samples: int, servers: Standins | None = None) -> Turn:
    """Run one collection on a fresh event loop."""
    theirs = servers.processor_seconds() if servers else 0.0
    used, begin = processor_seconds(), time.perf_counter()
    tokens = asyncio.run(work())
    took, used = time.perf_counter() - begin, processor_seconds() - used
    return Turn(samples, tokens, took, used, servers.processor_seconds() - theirs if servers else 0.0)


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def in_turns(ways: dict[str, Callable[[], Turn]], turns: int) -> dict[str, list[Turn]]:
    """A B C, C B A, ...; the first round is not counted: imports, connections and memory are then there."""
    found: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(turns + 1):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            turn = ways[name]()
            if number:
                found[name].append(turn)
    return found


def ratio(theirs: Sequence[Turn], ours: Sequence[Turn]) -> str:
    """Throughput of ours over theirs: median of the turns and their range."""
    ratios = [our.rate / their.rate for their, our in zip(theirs, ours, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def median(turns: Sequence[Turn], of: Callable[[Turn], float]) -> float:
    return statistics.median(map(of, turns))


def show(turns: dict[str, list[Turn]], label: str) -> None:
    for name, found in turns.items():
        rate = median(found, lambda turn: turn.rate)
        collector = median(found, lambda turn: turn.processor / turn.samples * 1e3)
        servers = median(found, lambda turn: turn.servers / turn.samples * 1e3)
        tokens = median(found, lambda turn: turn.tokens / turn.seconds)
        print(
            f"{label:>10} {name:>8} {rate:9.2f} {tokens:11,.0f} {collector:12.1f} {servers:10.1f}   "
            f"{ratio(turns['plain'], found)}",
            flush=True,
        )


@dataclass(frozen=True)
class Case:
    """One payload, its servers, and how much is asked of them."""

    model: Model = QWEN
    prompt: int = 1024
    response: int = 15360
    servers: int = 2
    concurrency: int = 16
    rate: float = 0.0  # samples a second, all servers together; 0 is as fast as can be

    @contextlib.contextmanager
    def running(self) -> Iterator[Standins]:
        with standins(
            self.servers,
            self.model,
            prompt=self.prompt,
            response=self.response,
            slots=self.concurrency // self.servers,
            rate=self.rate / self.servers,
        ) as servers:
            yield servers

    def once(self, servers: Standins, way: str, count: int, directory: Path | None) -> Turn:
        """Collect so many samples in one of the three ways."""
        prompts = [Prompt(f"p{i:05d}", 0, "prompt", f"number {i}") for i in range(count)]
        sampling = Sampling(max_tokens=self.response)
        engine = servers.engine("plain" if way == "plain" else "routes")
        if way != "routes":
            return timed(lambda: fetch(engine, prompts, sampling, self.concurrency), count, servers)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            return timed(lambda: keep(engine, prompts, sampling, self.concurrency, scratch), count, servers)


Directory = Annotated[Path | None, typer.Option(help="Where shards are written; default: temporary.")]


@app.command()
def payload(
    rates: Annotated[str, typer.Option(help="Samples a second, all servers together; 0: unbounded.")] = "1,4,16,0",
    tokens: int = 16384,
    prompt: int = 1024,
    servers: int = 2,
    concurrency: int = 16,
    seconds: Annotated[float, typer.Option(help="About so long each turn.")] = 15.0,
    turns: int = 4,
    directory: Directory = None,
) -> None:
    """Stand-in servers that send real wire bytes, at several rates."""
    base = Case(QWEN, prompt, tokens - prompt, servers, concurrency)
    sizes = wire_bytes(QWEN, prompt, tokens - prompt) / 1e6, shard_bytes(QWEN, prompt, tokens - prompt) / 1e6
    print(f"{QWEN.name}, {tokens} tokens ({prompt} prompt): response {sizes[0]:.1f} MB, shard {sizes[1]:.1f} MB")
    print(f"{servers} servers, {concurrency} in flight, {turns} turns of each way\n{HEADER}")
    for case in (replace(base, rate=float(rate)) for rate in rates.split(",")):
        count = max(2 * concurrency, round(seconds * (case.rate or 15.0)))
        with case.running() as running:
            ways = {way: partial(case.once, running, way, count, directory) for way in ("plain", "fetched", "routes")}
            show(in_turns(ways, turns), f"{case.rate:g}" if case.rate else "unbounded")


@app.command()
def vllm(
    model: Path,
    count: int = 256,
    max_tokens: int = 128,
    concurrency: int = 32,
    turns: int = 6,
    dtype: str = "bfloat16",
) -> None:
    """Real vLLM: a server without --enable-return-routed-experts, one with it."""
    from r3.rollout.server import VllmServer

    prompts = read_prompts(model / "prompts.jsonl")[:count]
    sampling = Sampling(max_tokens=max_tokens, seed=0)
    with VllmServer(model, dtype=dtype) as on, VllmServer(model, dtype=dtype, routed_experts=False) as off:
        info = asyncio.run(preflight(on.url))
        plain = replace(info, urls=(off.url,))

        def kept() -> Turn:
            with tempfile.TemporaryDirectory() as scratch:
                return timed(lambda: keep(info, prompts, sampling, concurrency, scratch), len(prompts))

        print(f"vLLM {info.engine_version}, {info.spec.brief()}, {len(prompts)} prompts, {concurrency} in flight")
        print(HEADER)
        ways: dict[str, Callable[[], Turn]] = {
            "plain": lambda: timed(lambda: fetch(plain, prompts, sampling, concurrency), len(prompts)),
            "fetched": lambda: timed(lambda: fetch(info, prompts, sampling, concurrency), len(prompts)),
            "routes": kept,
        }
        found = in_turns(ways, turns)
        show(found, "as it can")
        print(f"collector to a bare client on the same server: {ratio(found['fetched'], found['routes'])}")


@app.command()
def model(cores: int = 2, count: int = 200, turns: int = 3, seconds: float = 10.0, directory: Directory = None) -> None:
    """Saturation as `r3.budget.simulate` foresees it from measured costs, and as it is."""
    costs = measure(seconds, None if directory is None else str(directory))
    print(f"{costs}\n{'case':>44} {'foreseen /s':>12} {'real /s':>9} {'foreseen / real':>16}  busiest, foreseen")
    cases = {
        "16k tokens x 48 x 8, 2 servers": Case(),
        "16k tokens x 48 x 8, 1 server": Case(servers=1),
        "4k tokens x 48 x 8, 2 servers": Case(prompt=256, response=3840),
        "16k tokens x 61 x 8 (16 bit), 2 servers": Case(PRESETS["kimi-k2"], concurrency=8),
        "16k tokens x 48 x 8, 2 servers at 8/s": Case(rate=8.0),
    }
    for name, case in cases.items():
        with case.running() as running:
            found = [case.once(running, "routes", count, directory) for _ in range(turns + 1)][1:]
        foreseen = simulate(
            step_of_case(case, costs, count, cores, median(found, lambda turn: turn.servers / turn.samples))
        )
        real = max(turn.rate for turn in found)  # the turn that other work on the machine disturbed least
        print(
            f"{name:>44} {foreseen.rate:12.1f} {real:9.1f} {foreseen.rate / real:16.2f}  {foreseen.first}", flush=True
        )


def step_of_case(case: Case, costs: Any, count: int, cores: int, server_s: float) -> Step:
    """The simulation's view of a case on one machine, whose cores the stand-ins share."""
    shape = (case.model, case.prompt, case.response)
    return Step(
        samples=count,
        servers=case.servers,
        slots=case.concurrency // case.servers,
        generate_s=case.concurrency / case.rate if case.rate else 0.0,
        processes=1,
        hosts=1,
        concurrency=case.concurrency,
        cores=cores,
        loop_s=costs.loop_s(*shape),
        threads_s=costs.threads_s(*shape),
        wire_bytes=wire_bytes(*shape),
        shard_bytes=shard_bytes(*shape),
        nic_bytes_s=1e12,  # loopback: its copies are in the processor's time
        storage_bytes_s=1e12,  # the page cache: likewise
        server_s=server_s,
        spread=0.0,
    )


if __name__ == "__main__":
    keep_freed_memory()  # as in the process of `r3 collect`
    app()
