"""engines: which engine a rollout worker drives, as a value that travels, and how it is opened where the worker runs.

Three kinds behind one protocol, `r3.rollout.protocol.Sampler`:

    Engine.vllm("/models/qwen3", tensor_parallel_size=4)        vLLM in the worker's process
    Engine.server(["http://node7:8000"])                        servers that run already, after a preflight
    Engine.custom("my_package.engine:open_engine", ...)         anything: a function that is given Sampling and the options

A custom function returns a Sampler, or (Sampler, EngineInfo); a Sampler alone must have `async def info() -> EngineInfo`.
What a Sampler may have besides: `alive` (False ends the worker, and Ray starts it again), `load_weights(directory)` and
`weight_version()`, see `r3.rollout.ray.worker`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from r3.errors import ConfigError, EngineError
from r3.rollout.client import VllmClient, keep_freed_memory
from r3.rollout.preflight import EngineInfo, preflight
from r3.rollout.protocol import Sampler, Sampling


@dataclass(frozen=True)
class Engine:
    """What a worker is told of its engine.

    Attributes:
        kind: `vllm`, `server` or `custom`.
        target: Model directory, or the function as `module:name`; "" for servers.
        options: Of the kind; see the constructors.
    """

    kind: Literal["vllm", "server", "custom"]
    target: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def vllm(cls, model: str, *, env: Mapping[str, str] | None = None, **engine_args: Any) -> Engine:
        """vLLM in the worker's process; the arguments are those of vLLM's `AsyncEngineArgs`."""
        return cls("vllm", str(model), {"engine_args": engine_args, "env": dict(env or {})})

    @classmethod
    def server(
        cls,
        urls: str | Sequence[str],
        *,
        model_path: str | None = None,
        model_name: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 1800.0,
        weight_version_url: str | None = None,
    ) -> Engine:
        """vLLM servers that run already.

        Args:
            model_path, model_name, api_key: As in `r3.rollout.preflight.preflight`.
            timeout_s: As in `VllmClient`.
            weight_version_url: Answers a GET with the version of the weights that the servers hold now: a JSON integer,
                or an object with an integer `weight_version`. vLLM itself does not say; whoever updates the servers can.
        """
        options = {
            "urls": [urls] if isinstance(urls, str) else list(urls),
            "model_path": None if model_path is None else str(model_path),
            "model_name": model_name,
            "api_key": api_key,
            "timeout_s": timeout_s,
            "weight_version_url": weight_version_url,
        }
        return cls("server", "", options)

    @classmethod
    def custom(cls, function: str, **options: Any) -> Engine:
        """An engine that `module:name` makes: called as `name(sampling, **options)` in the worker, awaited if it is a
        coroutine."""
        return cls("custom", function, options)

    async def open(self, sampling: Sampling, stack: AsyncExitStack) -> tuple[Sampler, EngineInfo]:
        """The engine, ready; it is closed when the stack is.

        Raises:
            EngineError: it does not start, or is not what it should be.
            ConfigError: no such function, or it returns something else.
        """
        if self.kind == "vllm":
            from r3.rollout.ray.inprocess import InProcessVllm

            vllm = await stack.enter_async_context(InProcessVllm(self.target, sampling, **self.options))
            return vllm, await vllm.info()
        if self.kind == "server":
            return await self._open_servers(sampling, stack)
        made = _function(self.target)(sampling, **self.options)
        made = await made if hasattr(made, "__await__") else made
        sampler, info = made if isinstance(made, tuple) else (made, None)
        if not hasattr(sampler, "sample") or (info is None and not hasattr(sampler, "info")):
            raise ConfigError(
                "this function does not make an engine",
                where=self.target,
                expected="a Sampler with `info`, or (Sampler, EngineInfo)",
                got=type(made).__name__,
            )
        await stack.enter_async_context(sampler)
        return sampler, await sampler.info() if info is None else info

    async def _open_servers(self, sampling: Sampling, stack: AsyncExitStack) -> tuple[Sampler, EngineInfo]:
        given = dict(self.options)
        url, timeout_s = given.pop("weight_version_url"), given.pop("timeout_s")
        info = await preflight(**given)
        keep_freed_memory()
        client = VllmClient(info.urls, info.model, sampling, timeout_s=timeout_s, api_key=given["api_key"])
        await stack.enter_async_context(client)
        return client if url is None else VersionedClient(client, url), info


class VersionedClient:
    """A client of servers whose weights somebody else updates, with the version that he publishes."""

    def __init__(self, client: VllmClient, url: str) -> None:
        self.sample, self._url = client.sample, url

    async def __aenter__(self) -> VersionedClient:
        return self  # the client is entered already

    async def __aexit__(self, *_: object) -> None:
        pass

    async def weight_version(self) -> int:
        """
        Raises:
            EngineError: no answer, or not a version.
        """
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
                session.get(self._url) as response,
            ):
                response.raise_for_status()
                answer = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
            raise EngineError(
                f"the version of the weights cannot be told ({type(error).__name__}: {error})",
                where=self._url,
                remedy="whoever updates the servers must answer there, or leave weight_version_url out",
            ) from None
        version = answer.get("weight_version") if isinstance(answer, dict) else answer
        if type(version) is not int:
            raise EngineError("not a version of weights", where=self._url, expected="an integer", got=repr(answer)[:80])
        return version


def _function(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"no such engine ({error})",
            where=path,
            expected="module:function that the workers can import",
            remedy="ship it with runtime_env={'working_dir': ...} or PYTHONPATH",
        ) from None
