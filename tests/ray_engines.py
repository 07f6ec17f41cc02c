"""Engines for rollout workers that can be made to fail: Samplers whose answers are real wire bytes (base64 of a `.npy`).

Imported by Ray workers, as `ray_engines:open_engine`. What they sample follows from prompt and seed, so that two tries of a
sample give the same; each request is noted in a journal, a file per process, before and after it is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from helpers import SPEC

from r3 import RoutingSpec
from r3.errors import EngineError, PromptError
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Completion, Sampling
from r3.rollout.ray.inprocess import InProcessVllm
from r3.testing import random_rows
from r3.wire import encode_vllm


class WireEngine:
    """A stand-in engine.

    Args:
        info: Facts of EngineInfo that it claims; `spec` as a JSON of RoutingSpec.
        delay_s: A sample takes so long.
        slow: Ids of prompts, and the seconds that they take at their first request (by the marker files in `journal`).
        deadly: Ids of prompts that end the worker's process at once.
        sick: Ids of prompts that raise an EngineError each time.
        bad: Ids of prompts whose payload is damaged.
        refused: Ids of prompts that are refused.
        journal: Directory of the journal.
        die_on_start: The engine does not start.
        stuck: While this file exists, loading weights does not end.
        versions: File that holds the version of the weights, for an engine that tells it itself.
    """

    def __init__(self, sampling: Sampling, **options: Any) -> None:
        self.sampling = sampling
        self.options = options
        self.journal = Path(options["journal"]) if options.get("journal") else None
        self.alive = True
        if options.get("versions"):
            self.weight_version = self._published

    async def __aenter__(self) -> WireEngine:
        if self.options.get("die_on_start"):
            raise EngineError("there is no such accelerator", where="stand-in")
        await asyncio.sleep(self.options.get("start_s", 0))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._note("closed", "")

    async def info(self) -> EngineInfo:
        facts = dict(self.options.get("info") or {})
        spec = RoutingSpec.from_json(facts.pop("spec")) if "spec" in facts else SPEC
        defaults = {"model": "stand-in", "engine_version": "0.30.0", "logprobs_mode": "raw_logprobs", "urls": ()}
        self.spec = spec
        return EngineInfo(**{**defaults, **facts, "spec": spec})

    async def _published(self) -> int:
        return int(Path(self.options["versions"]).read_text())

    async def load_weights(self, directory: str) -> None:
        """Any are as good."""
        while self.options.get("stuck") and Path(self.options["stuck"]).exists():
            await asyncio.sleep(0.05)
        self._note("loaded", directory)

    def _note(self, event: str, prompt_id: str) -> None:
        if self.journal is not None:
            with open(self.journal / f"{os.getpid()}", "a") as file:
                file.write(json.dumps([event, prompt_id, os.getpid()]) + "\n")

    async def sample(self, prompt: Prompt, *, seed: int | None = None) -> Completion:
        self._note("asked", prompt.prompt_id)
        name = prompt.prompt_id
        if name in self.options.get("deadly", ()):
            os.kill(os.getpid(), signal.SIGKILL)
        if name in self.options.get("sick", ()):
            raise EngineError("the engine has failed", where=prompt.where)
        if name in self.options.get("refused", ()):
            raise PromptError("too long", where=prompt.where)
        await asyncio.sleep(self.options.get("delay_s", 0) + self._first(name))
        if name in self.options.get("lost", ()):
            self.alive = False
            raise EngineError("engine core died", where=prompt.where)
        completion = self._completion(prompt, seed)
        self._note("answered", name)
        return completion

    def _first(self, name: str) -> float:
        """Seconds that the first request of a slow prompt takes, over all workers."""
        seconds = self.options.get("slow", {}).get(name, 0)
        if not seconds:
            return 0.0
        assert self.journal is not None
        try:
            (self.journal / f"slow-{name}").touch(exist_ok=False)
        except FileExistsError:
            return 0.0
        return float(seconds)

    def _completion(self, prompt: Prompt, seed: int | None) -> Completion:
        digest = hashlib.sha256(json.dumps([seed, prompt.payload]).encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        ids, count = np.array(prompt.payload, np.int64), self.sampling.max_tokens
        rows = random_rows(rng, self.spec, len(ids) + count - 1, hidden=True)
        payload = encode_vllm(rows)
        if prompt.prompt_id in self.options.get("bad", ()):
            payload = encode_vllm(np.zeros_like(rows))
        return Completion(
            ids,
            rng.integers(0, 256, count),
            -rng.random(count).astype(np.float32),
            payload,
            "length",
            "stand-in",
        )


def open_engine(sampling: Sampling, **options: Any) -> WireEngine:
    return WireEngine(sampling, **options)


def journal(directory: Path) -> list[tuple[str, str, int]]:
    """(event, prompt id, process) of every request."""
    lines = [
        line for path in sorted(directory.iterdir()) if path.name.isdigit() for line in path.read_text().splitlines()
    ]
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


class ForgetfulVllm(InProcessVllm):
    """Real vLLM that does not reset the prefix cache while the file `no_reset` exists: the defect that a test must see."""

    def __init__(self, model: str, sampling: Sampling, *, no_reset: str, **options: Any) -> None:
        super().__init__(model, sampling, **options)
        self.no_reset = Path(no_reset)

    async def reset_prefix_cache(self) -> None:
        if not self.no_reset.exists():
            await super().reset_prefix_cache()


def open_vllm(sampling: Sampling, *, model: str, no_reset: str, **engine_args: Any) -> ForgetfulVllm:
    return ForgetfulVllm(model, sampling, no_reset=no_reset, engine_args=engine_args)
