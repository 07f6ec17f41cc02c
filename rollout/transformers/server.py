"""server: an OpenAI-compatible endpoint over the transformers engine, for `r3 collect --server URL` and whoever speaks vLLM.

    python -m r3.rollout.transformers.server --model DIR --port 8000 --dtype bfloat16

Routes: /health, /version, /v1/models, /v1/completions, /v1/chat/completions, /tokenize. `/version` says which engine answers, so
that samples are never taken for vLLM's. A client that goes away cancels its request. Contract: a response is whole, or an error
in OpenAI's form; an engine that failed ends the process with exit status 1, because it can answer nothing any more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import fastapi
import orjson
import transformers
import uvicorn
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response

from r3.errors import ConfigError, PromptError, R3Error
from r3.rollout.transformers.api import ChatRequest, CompletionRequest, Request, TokenizeRequest, error, response
from r3.rollout.transformers.engine import ENGINE, TransformersEngine
from r3.rollout.transformers.requests import Output

T = TypeVar("T")


def application(
    engine: TransformersEngine, *, name: str | None = None, on_failure: Callable[[], None] | None = None
) -> fastapi.FastAPI:
    """The endpoint over a running engine.

    Args:
        name: The name under which the model is served; None is the engine's own.
        on_failure: Called when the engine turns out to have failed.
    """
    app = fastapi.FastAPI(title="r3: transformers engine", openapi_url=None)
    served = name or engine.name

    @app.get("/health")
    async def health() -> Response:
        if engine.failure is not None:
            return _json(error(str(engine.failure), 503, "EngineError"), 503)
        return _json(engine.counters)

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": transformers.__version__, "engine": ENGINE})

    @app.get("/v1/models")
    async def models() -> Response:
        card = {
            "id": served,
            "object": "model",
            "created": 0,
            "owned_by": "r3",
            "root": engine.name,
            "parent": None,
            "max_model_len": engine.max_model_len,
            "weight_version": engine.weight_version,
        }
        return _json({"object": "list", "data": [card]})

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, http: fastapi.Request) -> Response:
        return await answer(body, http)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: fastapi.Request) -> Response:
        return await answer(body, http)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        tokens = engine.text.tokens_of(body.prompt_of())
        return _json({"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens})

    async def answer(body: Request, http: fastapi.Request) -> Response:
        if body.model not in (None, served):
            return _json(error(f"The model `{body.model}` does not exist.", 404, "NotFoundError", "model"), 404)
        tokens = engine.text.tokens_of(body.prompt_of())
        params = body.params(engine.eos, engine.max_model_len - len(tokens))
        seeds = [None if body.seed is None else body.seed + k for k in range(body.n)]
        each = [engine.generate(tokens, params, seed=seed, where="this request") for seed in seeds]
        outputs: list[Output] | None = await _unless_gone(asyncio.gather(*each), http)
        if outputs is None:
            return Response(status_code=499)  # nobody reads it
        return _json(response(body, outputs, served, engine.text, engine.hidden_layers))

    @app.exception_handler(R3Error)
    async def refused(_request: fastapi.Request, exception: Any) -> Response:
        if isinstance(exception, (PromptError, ConfigError)):
            return _json(error(str(exception), 400, "BadRequestError"), 400)
        if engine.failure is not None and on_failure is not None:
            on_failure()
        return _json(error(str(exception), 500, "InternalServerError"), 500)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: fastapi.Request, exception: Any) -> Response:
        first = exception.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return _json(error(f"{place}: {first['msg']}", 400, "BadRequestError", place or None), 400)

    return app


async def _unless_gone(work: Awaitable[T], http: fastapi.Request) -> T | None:
    """The result of some work, or None as soon as the client has gone; the work is then cancelled and waited for."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(http))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(http: fastapi.Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m r3.rollout.transformers.server", description=__doc__.partition("\n")[0]
    )
    out.add_argument("--model", required=True, help="model directory or hub id")
    out.add_argument("--host", default="127.0.0.1")
    out.add_argument("--port", type=int, default=8000)
    out.add_argument("--dtype", default="auto", help="of the weights; auto is the checkpoint's own")
    out.add_argument("--device", help="e.g. cuda:0; default: cuda where there is one, else cpu")
    out.add_argument("--served-model-name")
    out.add_argument("--seed", type=int, default=0, help="of requests that bring none")
    out.add_argument("--num-blocks", type=int, help="KV cache blocks; default: see TransformersEngine")
    out.add_argument("--block-size", type=int, default=16, help="tokens a block")
    out.add_argument("--max-batch-tokens", type=int, default=512, help="tokens in one forward")
    out.add_argument("--no-prefix-sharing", action="store_true")
    out.add_argument("--no-routes", action="store_true", help="run without capture")
    return out


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT (0), or until the engine fails (1)."""
    import torch

    given = parser().parse_args(arguments)
    engine = TransformersEngine(
        given.model,
        dtype=given.dtype,
        device=given.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        num_blocks=given.num_blocks,
        block_size=given.block_size,
        max_batch_tokens=given.max_batch_tokens,
        prefix_sharing=not given.no_prefix_sharing,
        capture=not given.no_routes,
        seed=given.seed,
    )
    with engine:
        app = application(engine, name=given.served_model_name, on_failure=lambda: setattr(server, "should_exit", True))
        server = uvicorn.Server(
            uvicorn.Config(app, host=given.host, port=given.port, log_level="info", access_log=False)
        )
        server.run()
    if engine.failure is not None:
        print(f"r3: {engine.failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except R3Error as failure:
        print(f"r3: {failure}", file=sys.stderr)
        sys.exit(1)
