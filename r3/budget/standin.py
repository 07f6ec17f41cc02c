"""A server process that answers as vLLM does, as fast as is asked, with bytes that were encoded beforehand.

It is the other end when a collector's own speed is measured: `r3 budget --measure`, the benchmark, the test of the model. What is
sent is real wire format (random tokens, distinct random experts), so the collector decodes, checks and stores it as it would a
real server's; what it does not have is a GPU, so 16k tokens need not take minutes. `/routes/v1/completions` sends routes,
`/plain/v1/completions` sends none.

    with standins(2, model, prompt=1024, response=15360, slots=8, rate=1.0) as servers:
        engine = servers.engine("routes")

A server has `slots` sequences at a time, each of which takes slots / rate seconds, give or take a fifth. Rate 0 is at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from r3.budget.models import Model
from r3.errors import EngineError
from r3.spec import RoutingSpec

if TYPE_CHECKING:
    from r3.rollout.preflight import EngineInfo

_BODIES = 4  # different samples that a server sends, by chance


def completion(vocabulary: int, prompt: int, response: int, *, routes: str | None, seed: int = 0) -> bytes:
    """The body of one completion with the fields that vLLM 0.30 sends for log-probs, token ids and routes."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(vocabulary // 2, vocabulary, prompt + response).tolist()
    texts = [f"tok{token % 100:02d}" for token in ids[prompt:]]
    logprobs = (-rng.exponential(1.0, response)).tolist()
    choice = {
        "index": 0,
        "text": "".join(texts),
        "logprobs": {
            "text_offset": list(range(0, 5 * response, 5)),
            "token_logprobs": logprobs,
            "tokens": texts,
            "top_logprobs": [{text: logprob} for text, logprob in zip(texts, logprobs, strict=True)],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids[prompt:],
        "prompt_logprobs": None,
        "prompt_token_ids": ids[:prompt],
        "routed_experts": routes,
    }
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + response, "completion_tokens": response}
    return orjson.dumps({"id": f"cmpl-{seed:016x}", "object": "text_completion", "choices": [choice], "usage": usage})


def routes_of(spec: RoutingSpec, tokens: int, seed: int) -> str:
    """A payload of T - 1 rows: experts of each token and layer distinct, dense layers zero; quick, not uniform."""
    from r3.wire import encode_vllm

    rng = np.random.default_rng(seed)
    rows = np.zeros((max(0, tokens - 1), spec.num_layers, spec.top_k), spec.dtype)
    first = rng.integers(0, spec.num_experts, (len(rows), spec.num_moe_layers, 1))
    stride = 1 + rng.integers(0, spec.num_experts // spec.top_k, first.shape)
    rows[:, list(spec.moe_layers)] = (first + stride * np.arange(spec.top_k)) % spec.num_experts
    return encode_vllm(rows)


@dataclass(frozen=True)
class Standins:
    """Running stand-ins: base URLs and process ids."""

    model: Model
    urls: tuple[str, ...]
    pids: tuple[int, ...]

    def engine(self, way: str) -> EngineInfo:
        """What a preflight would say of them; `way` is `routes` or `plain`."""
        from r3.rollout.preflight import EngineInfo

        urls = tuple(f"{url}/{way}" for url in self.urls)
        return EngineInfo(urls, self.model.spec, self.model.name, "vllm", "0.30.0")

    def processor_seconds(self) -> float:
        """What they have used of the processor so far (Linux)."""
        return sum(_processor_of(pid) for pid in self.pids)


@contextlib.contextmanager
def standins(
    count: int, model: Model, *, prompt: int, response: int, slots: int = 8, rate: float = 0.0
) -> Iterator[Standins]:
    """So many servers, for the length of the block; `rate` is samples a second of each.

    Raises:
        EngineError: one did not start.
    """
    spec = model.spec
    shape = [spec.num_layers, spec.moe_layers[0], spec.num_experts, spec.top_k, model.vocabulary]
    program = "import sys; from r3.budget.standin import run; run(sys.argv[1:])"
    command = [sys.executable, "-c", program, *map(str, [*shape, prompt, response, slots, rate])]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        ports = [process.stdout.readline().strip() if process.stdout else "" for process in processes]
        if not all(ports):
            raise EngineError("a stand-in server did not start", where=" ".join(command))
        yield Standins(
            model, tuple(f"http://127.0.0.1:{port}" for port in ports), tuple(each.pid for each in processes)
        )
    finally:
        for process in processes:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            process.wait(10)


class Pace:
    """A server's slots: how many seconds a request that comes now waits for its answer."""

    def __init__(self, slots: int, rate: float) -> None:
        self._free_at = [0.0] * slots
        self._service = slots / rate if rate else 0.0
        self._count = 0

    def wait(self) -> float:
        if not self._service:
            return 0.0
        now = time.monotonic()
        self._count += 1
        share = self._count * 0.6180339887 % 1  # spread evenly over 0..1 in any run of requests, so that turns compare
        done = max(now, heapq.heappop(self._free_at)) + self._service * (0.8 + 0.4 * share)
        heapq.heappush(self._free_at, done)
        return done - now


class _Connection(asyncio.Protocol):
    def __init__(self, bodies: dict[str, list[bytes]], pace: Pace) -> None:
        self._bodies, self._pace, self._buffer = bodies, pace, b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if not found or len(rest) < length:
            return
        self._buffer = rest[length:]
        way = head.split(b" ")[1].split(b"/")[1].decode()
        body = random.choice(self._bodies[way])
        asyncio.get_running_loop().call_later(self._pace.wait(), self._answer, body)

    def _answer(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            self._transport.write(head.encode())
            self._transport.write(body)


async def _serve(spec: RoutingSpec, vocabulary: int, prompt: int, response: int, slots: int, rate: float) -> None:
    tokens, seeds = prompt + response, range(_BODIES)
    bodies = {
        "plain": [completion(vocabulary, prompt, response, routes=None, seed=seed) for seed in seeds],
        "routes": [
            completion(vocabulary, prompt, response, routes=routes_of(spec, tokens, seed), seed=seed) for seed in seeds
        ],
    }
    pace = Pace(slots, rate)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(bodies, pace), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it closes the pipe, or dies


def _processor_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(arguments: Sequence[str]) -> None:
    """The process of one stand-in: prints its port, serves until its standard input closes."""
    layers, dense, experts, top_k, vocabulary, prompt, response, slots = map(int, arguments[:8])
    spec = RoutingSpec(layers, tuple(range(dense, layers)), experts, top_k)
    asyncio.run(_serve(spec, vocabulary, prompt, response, slots, float(arguments[8])))
