"""inprocess: a vLLM engine in this process as a Sampler; its weights can be changed while it runs.

vLLM's `AsyncLLM` (0.22 and later; tried with 0.30) batches by itself, so `sample` is called many times at once. Routes
come as the array that vLLM hands out, with no base64 in between. vLLM is imported when the engine is made.

Contract: a sample is made by one version of the weights. `load_weights` refuses while requests run, and it ends with an
empty prefix cache or in an EngineError: vLLM keeps the routes of cached blocks with the blocks, so a prompt that hits a
cache from before the update would return the experts of the old weights with the log-probs of the new ones, and nothing
in the sample would say so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors import safe_open

from r3.errors import ConfigError, EngineError, PromptError, first_line
from r3.fingerprint import model_fingerprint
from r3.rollout.offline import vllm_version
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Completion, Sampling
from r3.rollout.server import is_cpu_build, require_vllm
from r3.spec import RoutingSpec

_RESET_WITHIN = 5.0  # seconds
_OURS = {"model", "enable_return_routed_experts", "worker_extension_cls"}


class InProcessVllm:
    """`AsyncLLM` as an async context manager.

    Args:
        model: Model directory.
        sampling: How to sample.
        engine_args: More of vLLM's `AsyncEngineArgs`, e.g. `{"tensor_parallel_size": 4, "max_model_len": 32768}`.
        env: Environment variables for vLLM, set before it is imported. Unless set here or outside, `VLLM_LOGGING_LEVEL`
            is WARNING, and `VLLM_CPU_KVCACHE_SPACE` 1 (GiB) on a CPU build.

    Raises:
        ConfigError: an engine argument that r3 sets itself.
        EngineError: on entry: vLLM is not installed, or does not start with these arguments.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        sampling: Sampling,
        *,
        engine_args: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if clash := sorted(_OURS & set(engine_args or {})):
            raise ConfigError("engine arguments that r3 sets itself", where="engine_args", got=", ".join(clash))
        self.model, self.sampling = os.fspath(model), sampling
        self.engine_args, self.env = dict(engine_args or {}), dict(env or {})
        self._engine: Any = None
        self._params: Any = None
        self._running = self._asked = 0

    async def __aenter__(self) -> InProcessVllm:
        require_vllm()
        os.environ.update(self.env)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"  # see r3.rollout.ray.guard
        arguments: dict[str, Any] = {"disable_log_stats": True, **self.engine_args}
        if is_cpu_build():  # as r3.rollout.server does, for the same reasons
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            arguments = {"enforce_eager": True, "enable_chunked_prefill": False, **arguments}
        try:
            self._engine = await asyncio.to_thread(self._start, arguments)
        except Exception as error:  # whatever stops vLLM: no memory, a bad argument, an architecture it does not know
            raise EngineError(
                f"vLLM does not start ({type(error).__name__}: {first_line(error)})",
                where=self.model,
                remedy="read its log above this error (on Ray: in the logs of the session), "
                "or try the same arguments with `r3 serve`",
            ) from error
        return self

    def _start(self, arguments: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=self.model,
                enable_return_routed_experts=True,
                worker_extension_cls="r3.rollout.weights.ReloadExtension",
                **arguments,
            )
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    async def info(self) -> EngineInfo:
        """As a preflight of a server would find it; the routing is read from the model's config."""
        config = self._engine.model_config
        return EngineInfo(
            urls=(),
            spec=await asyncio.to_thread(RoutingSpec.from_config, self.model),
            model=str(config.served_model_name if isinstance(config.served_model_name, str) else config.model),
            engine_version=vllm_version(),
            model_root=self.model,
            model_fingerprint=await asyncio.to_thread(model_fingerprint, self.model),
            max_model_len=int(config.max_model_len),
            logprobs_mode=str(config.logprobs_mode),
        )

    async def sample(self, prompt: Prompt, *, seed: int | None = None) -> Completion:
        """One response to a prompt.

        Raises:
            PromptError: vLLM refuses this prompt, e.g. as longer than the model's context.
            EngineError: vLLM has ended, or returns something that is not a whole sample.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        given = self._input(prompt)
        self._asked += 1
        self._running += 1
        final = None
        try:
            params = SamplingParams(
                **self.sampling.body(seed), n=1, logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
            )
            async for output in self._engine.generate(given, params, f"r3-{self._asked}"):
                final = output
        except (VLLMClientError, ValueError, TypeError) as error:
            raise PromptError(
                f"vLLM refuses this prompt: {first_line(error)}",
                where=prompt.where,
                remedy="shorten the prompt, lower max_tokens, or raise max_model_len; or skip such prompts",
            ) from None
        except Exception as error:
            raise EngineError(
                f"vLLM failed ({type(error).__name__}: {first_line(error)})",
                where=prompt.where,
                remedy="its log, the worker's, says why",
            ) from error
        finally:
            self._running -= 1
        return completion_of(final, prompt, self.model)

    def _input(self, prompt: Prompt) -> Any:
        if prompt.kind == "prompt_token_ids":
            return {"prompt_token_ids": prompt.payload}
        tokenizer = self._engine.get_tokenizer()
        try:
            if prompt.kind == "messages":
                ids = tokenizer.apply_chat_template(prompt.payload, add_generation_prompt=True, return_dict=False)
            else:
                ids = tokenizer.encode(prompt.payload)
        except Exception as error:  # a template raises what it likes, and it is never the engine's fault
            raise PromptError(
                f"the tokenizer refuses this prompt ({type(error).__name__}: {first_line(error)})",
                where=prompt.where,
                remedy="correct its messages (roles, their order), or skip such prompts",
            ) from None
        return {"prompt_token_ids": list(ids)}

    @property
    def alive(self) -> bool:
        """Whether the engine core still answers."""
        return self._engine is not None and not self._engine.errored

    async def load_weights(self, directory: str) -> None:
        """Take the weights of another checkpoint of the same architecture, then forget the prefix cache.

        Raises:
            ConfigError: requests are running, or the directory has no weights; nothing was changed.
            EngineError: loading failed, or the cache was not reset: the engine may hold anything and must not sample again.
        """
        if self._running:
            raise ConfigError(
                "weights cannot change while requests run", where=self.model, got=f"{self._running} running"
            )
        if not await asyncio.to_thread(_has_weights, directory):
            raise ConfigError(
                "no weights to load", where=directory, expected="a directory with .safetensors that this node can read"
            )
        try:
            await self._engine.collective_rpc("r3_reload_weights", args=(directory,))
        except Exception as error:
            raise EngineError(
                f"vLLM did not take the weights ({type(error).__name__}: {first_line(error)})",
                where=directory,
                expected=f"a checkpoint of the architecture of {self.model}",
                remedy="the engine is between two versions: restart it",
            ) from error
        await self.reset_prefix_cache()

    async def reset_prefix_cache(self) -> None:
        """
        Raises:
            EngineError: vLLM did not.
        """
        deadline = asyncio.get_running_loop().time() + _RESET_WITHIN
        while await self._engine.reset_prefix_cache() is not True:
            if asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.05)  # blocks of the last request are freed a step after its answer
                continue
            raise EngineError(
                "vLLM did not reset its prefix cache: prompts that hit it would get the routes of the old weights",
                where=self.model,
                remedy="restart the engine, or run it with enable_prefix_caching=False",
            )


def _has_weights(directory: str) -> bool:
    """Whether there is a parameter in the `.safetensors` files of a directory: r3's own shards are such files, too."""
    for path in Path(directory).glob("*.safetensors"):
        with safe_open(path, "np") as file:
            return any(name.endswith(".weight") for name in file.keys())  # noqa: SIM118 - not a mapping
    return False


def completion_of(output: Any, prompt: Prompt, where: str) -> Completion:
    """A finished `vllm.RequestOutput` of one completion.

    Raises:
        EngineError: aborted, or without log-probs for each token.
    """
    completion = None if output is None else output.outputs[0]
    if completion is None or completion.finish_reason in (None, "abort", "error"):
        raise EngineError(
            "the engine ended this request before it was whole",
            where=prompt.where,
            expected="stop or length",
            got=None if completion is None else completion.finish_reason,
            remedy="it is asked again; if that repeats, look at the worker's log",
        )
    tokens = [int(token) for token in completion.token_ids]
    entries = completion.logprobs
    if entries is None or len(entries) != len(tokens):
        raise EngineError(
            "token ids and log-probs do not fit each other",
            where=prompt.where,
            expected=f"{len(tokens)} log-probs",
            got=None if entries is None else len(entries),
        )
    logprobs = [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]
    return Completion(
        prompt_token_ids=np.array(output.prompt_token_ids, np.int64),
        token_ids=np.array(tokens, np.int64),
        logprobs=np.array(logprobs, np.float32),
        routed_experts=completion.routed_experts,
        finish_reason=str(completion.finish_reason),
        url=where,
    )
