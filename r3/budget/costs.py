"""What handling one sample costs a processor: measured, by stage, as seconds of one core per byte or token.

A cost is processor time, not time on a clock: it says how many cores are needed, and other work on the machine hardly moves it.
`DEFAULTS` are of two x86-64 cores (AVX-512); `measure` takes ten seconds and gives this machine's.

    receive   the response out of the socket: kernel, HTTP parser, one copy into one piece of memory   per byte on the wire
    parse     JSON of token ids, log-probs and texts into arrays                                       per sampled token
    decode    base64, all checks, rows into layer-major order                                          per byte of routes
    pack      the sample's parts, checksums, header                                                    per byte of the shard
    write     into the page cache, fsync's own work included                                           per byte of the shard
    commit    a file made, synchronised, renamed, its directory synchronised                           per sample
    read      out of the page cache and verified                                                       per byte read

`receive` and `parse` run on the event loop of a collector process, so one process does one sample's at a time; the others
run in its threads.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from r3 import shard, wire
from r3.budget.models import PRESETS, Model
from r3.budget.sizes import route_bytes, shard_bytes, wire_bytes
from r3.budget.standin import completion, routes_of, standins
from r3.errors import ConfigError
from r3.routes import Routes
from r3.sample import RolloutSample
from r3.shard.files import write_atomically

PROMPT, RESPONSE = 1024, 15360  # of the sample that is measured: 16k tokens, 8.4 MB of base64 for 48 layers of top-8


@dataclass(frozen=True)
class Costs:
    """Processor seconds of one core, see the module.

    Attributes:
        source: Where they were measured.
    """

    receive_s_per_byte: float
    parse_s_per_token: float
    decode_s_per_byte: float
    pack_s_per_byte: float
    write_s_per_byte: float
    commit_s: float
    read_s_per_byte: float
    source: str = ""

    def loop_s(self, model: Model, prompt: int, response: int) -> float:
        """Of one sample on the collector's event loop."""
        received = wire_bytes(model, prompt, response) * self.receive_s_per_byte
        return received + response * self.parse_s_per_token

    def threads_s(self, model: Model, prompt: int, response: int) -> float:
        """Of one sample in the collector's threads."""
        size = shard_bytes(model, prompt, response)
        decoded = route_bytes(model, prompt + response) * self.decode_s_per_byte
        return decoded + size * (self.pack_s_per_byte + self.write_s_per_byte) + self.commit_s

    def sample_s(self, model: Model, prompt: int, response: int) -> float:
        """Of one sample in all."""
        return self.loop_s(model, prompt, response) + self.threads_s(model, prompt, response)


DEFAULTS = Costs(
    receive_s_per_byte=6.5e-10,
    parse_s_per_token=2.9e-07,
    decode_s_per_byte=6.5e-10,
    pack_s_per_byte=5.5e-11,
    write_s_per_byte=3.1e-10,
    commit_s=3.9e-04,
    read_s_per_byte=1.7e-10,
    source="two x86-64 cores",
)


def measure(seconds: float = 10.0, directory: str | None = None, model: Model = PRESETS["qwen3-30b-a3b"]) -> Costs:
    """This machine's costs, of real payloads through the collector's own code.

    Args:
        seconds: About so long, all stages together.
        directory: Where to write shards; the temporary directory if None. Measure where the shards will be.

    Raises:
        ConfigError: no such directory.
    """
    from r3.rollout.protocol import parse_completion

    if directory is not None and not Path(directory).is_dir():
        raise ConfigError("no such directory", where=directory, remedy="make it, or name one where shards will be")
    spec, tokens = model.spec, PROMPT + RESPONSE
    payload = routes_of(spec, tokens, 0)
    plain = completion(model.vocabulary, PROMPT, RESPONSE, routes=None)
    routes = wire.decode_vllm(payload, spec, num_tokens=tokens)
    answer = parse_completion(plain, "measure")

    def sample() -> RolloutSample:
        return RolloutSample.from_rollout(
            sample_id="prompt-0123456789abcdef.0",
            spec=spec,
            prompt_tokens=answer.prompt_token_ids,
            response_tokens=answer.token_ids,
            response_logprobs=answer.logprobs,
            routes=Routes(routes.ids, routes.recorded),
            weight_version=0,
        )

    made = sample()
    pieces = shard.pieces(made)
    size = sum(piece.nbytes for piece in pieces)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        names = (Path(scratch) / f"{number}.safetensors" for number in itertools.count())
        path = Path(scratch) / "read.safetensors"
        write_atomically(path, list(pieces), fsync=False)

        def write(small: bool) -> None:
            name = next(names)
            write_atomically(name, pieces[:1] if small else list(pieces))
            name.unlink()

        each = seconds / 8
        small = _median(lambda: write(True), each)
        large = _median(lambda: write(False), each)
        parsed = _median(lambda: parse_completion(plain, "measure"), each)
        return Costs(
            receive_s_per_byte=_receive(model, parsed, 2 * each),
            parse_s_per_token=parsed / RESPONSE,
            decode_s_per_byte=_median(lambda: wire.decode_vllm(payload, spec, num_tokens=tokens), each)
            / route_bytes(model, tokens),
            pack_s_per_byte=_median(lambda: shard.pieces(sample()), each) / size,
            write_s_per_byte=max(0.0, large - small) / size,
            commit_s=small,
            read_s_per_byte=_median(lambda: shard.load_file(path), each) / size,
            source="measured on this machine",
        )


def _median(work: Callable[[], Any], seconds: float) -> float:
    """Processor seconds of one call in this thread."""
    work()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 3:
        begin = time.thread_time()
        work()
        taken.append(time.thread_time() - begin)
    return statistics.median(taken)


def _receive(model: Model, parsed: float, seconds: float) -> float:
    """Processor seconds for each byte that the client takes from a server in another process, parsing left out."""
    from r3.rollout.client import VllmClient
    from r3.rollout.prompts import Prompt
    from r3.rollout.protocol import Sampling

    async def ask(urls: tuple[str, ...]) -> float:
        async with VllmClient(urls, model.name, Sampling(max_tokens=RESPONSE)) as client:
            prompt = Prompt("p", 0, "prompt", "")
            await client.sample(prompt)
            taken: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(taken) < 3:
                begin = time.thread_time()
                await client.sample(prompt)
                taken.append(time.thread_time() - begin)
            return statistics.median(taken)

    with standins(1, model, prompt=PROMPT, response=RESPONSE) as servers:
        whole = asyncio.run(ask(servers.engine("routes").urls))
    return max(0.0, whole - parsed) / wire_bytes(model, PROMPT, RESPONSE)


def as_dict(costs: Costs) -> dict[str, Any]:
    return {field.name: getattr(costs, field.name) for field in fields(costs)}


def in_megabytes(costs: Costs) -> dict[str, float]:
    """MB/s of one core, for people."""
    rates = {"receive": costs.receive_s_per_byte, "decode": costs.decode_s_per_byte, "pack": costs.pack_s_per_byte}
    rates |= {"write": costs.write_s_per_byte, "read": costs.read_s_per_byte}
    return {name: float(np.inf) if not rate else 1e-6 / rate for name, rate in rates.items()}
