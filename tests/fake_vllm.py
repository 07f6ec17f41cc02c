"""A server that speaks vLLM's HTTP protocol, for the faults that a real one cannot be made to have.

It stands in a thread with an event loop of its own; what it "samples" follows from the request, so that two servers, or two
tries, give one sequence. `answer` is asked first for every POST and may return a response, sleep, or break the connection.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from aiohttp import web
from helpers import SPEC

from r3 import RoutingSpec
from r3.rollout.preflight import EngineInfo
from r3.testing import random_rows
from r3.wire import encode_vllm

MODEL = "fake/moe"
VOCABULARY = 100


@dataclass
class FakeVllm:
    """Context manager; attributes may be changed while it runs."""

    spec: RoutingSpec = SPEC
    version: str | None = "0.30.0"
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": MODEL, "owned_by": "vllm", "root": MODEL, "parent": None, "max_model_len": 256}]
    )
    routes: str = "on"  # "null": the server's flag is off; "absent": a gateway drops the field
    mode: str = "raw_logprobs"
    delay_s: float = 0.0
    api_key: str | None = None
    answer: Callable[[FakeVllm, web.Request], Awaitable[web.StreamResponse | None]] | None = None
    edit: Callable[[dict[str, Any]], None] | None = None  # changes the choice before it is sent
    requests: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def info(self, **changes: Any) -> EngineInfo:
        """What a preflight would find."""
        facts = {
            "urls": (self.url,),
            "spec": self.spec,
            "model": MODEL,
            "engine_version": "0.30.0",
            "max_model_len": 256,
            "logprobs_mode": self.mode,
        }
        return EngineInfo(**{**facts, **changes})

    def __enter__(self) -> FakeVllm:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def start() -> None:
            app = web.Application()
            app.router.add_get("/version", self._version)
            app.router.add_get("/v1/models", self._models)
            app.router.add_post("/v1/completions", self._complete)
            app.router.add_post("/v1/chat/completions", self._complete)
            self._runner = web.AppRunner(app, shutdown_timeout=0.1)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]
            started.set()

        def serve() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.create_task(start())
            self._loop.run_forever()

        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop listening and drop every connection, as a server that dies."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)

    async def _version(self, _: web.Request) -> web.Response:
        if self.version is None:
            raise web.HTTPNotFound
        return web.json_response({"version": self.version})

    async def _models(self, request: web.Request) -> web.Response:
        self._authenticate(request)
        return web.json_response({"object": "list", "data": self.models})

    def _authenticate(self, request: web.Request) -> None:
        """As vLLM: everything under /v1, and only that, wants the key."""
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            raise web.HTTPUnauthorized(text='{"error": "Unauthorized"}', content_type="application/json")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._authenticate(request)
        body = await request.json()
        self.requests.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = None if self.answer is None else await self.answer(self, request)
            await asyncio.sleep(self.delay_s)
            return answer if answer is not None else self.respond(body)
        finally:
            self.in_flight -= 1

    def respond(self, body: dict[str, Any]) -> web.Response:
        chat = "messages" in body
        prompt = body["messages"] if chat else body["prompt"]
        ids = (
            prompt if isinstance(prompt, list) and not chat else [3 + byte % 90 for byte in json.dumps(prompt).encode()]
        )
        limit, count = self.models[0]["max_model_len"], body["max_tokens"]
        if len(ids) + count > limit:
            return web.json_response({"error": {"message": too_long(limit, len(ids), count), "code": 400}}, status=400)
        digest = hashlib.sha256(json.dumps([body.get("seed"), prompt]).encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        tokens = rng.integers(0, VOCABULARY, count).tolist()
        logits = np.sort(rng.normal(0, 3, VOCABULARY))[::-1]
        top = self._values(logits, body["temperature"])[:8].tolist()
        choice: dict[str, Any] = {"index": 0, "token_ids": tokens, "finish_reason": "length", "stop_reason": None}
        if chat:
            choice["logprobs"] = {"content": [{"token": "x", "logprob": top[0], "top_logprobs": []} for _ in tokens]}
        else:
            alternatives = {f"token_id:{i}": value for i, value in enumerate(top)}
            choice["logprobs"] = {"token_logprobs": [top[0]] * count, "top_logprobs": [alternatives] * count}
            choice["prompt_token_ids"] = ids
        if self.routes != "absent":
            rows = random_rows(rng, self.spec, len(ids) + count - 1, hidden=True)
            choice["routed_experts"] = encode_vllm(rows) if self.routes == "on" else None
        if self.edit is not None:
            self.edit(choice)
        return web.json_response({"choices": [choice], **({"prompt_token_ids": ids} if chat else {})})

    def _values(self, logits: np.ndarray, temperature: float) -> np.ndarray:
        if self.mode.startswith("processed"):
            logits = logits / temperature
        return logits if self.mode.endswith("logits") else logits - np.log(np.exp(logits).sum())


def too_long(limit: int, prompt: int, count: int) -> str:
    """vLLM 0.30's words."""
    return (
        f"This model's maximum context length is {limit} tokens. However, you requested {count} output tokens and your "
        f"prompt contains {prompt} input tokens, for a total of {prompt + count} tokens."
    )


def status(code: int, times: int, **headers: str) -> Callable[..., Awaitable[web.StreamResponse | None]]:
    """An `answer` that fails the first requests."""
    left = [times]

    async def answer(_: FakeVllm, __: web.Request) -> web.StreamResponse | None:
        if left[0] == 0:
            return None
        left[0] -= 1
        return web.json_response({"error": {"message": "busy", "code": code}}, status=code, headers=headers)

    return answer


def cut_in_the_middle(times: int) -> Callable[..., Awaitable[web.StreamResponse | None]]:
    """An `answer` that announces a body, sends a part and resets the connection."""
    left = [times]

    async def answer(_: FakeVllm, request: web.Request) -> web.StreamResponse | None:
        if left[0] == 0:
            return None
        left[0] -= 1
        response = web.StreamResponse(headers={"Content-Length": "100000", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        assert request.transport is not None
        request.transport.abort()
        return response

    return answer
