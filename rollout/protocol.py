"""protocol: what goes to a vLLM server and what comes back, as plain structs. Pure: no connection is made here.

`/v1/completions` takes text and token ids, `/v1/chat/completions` chat messages; streaming never carries routes. Contract: a
Completion has its token ids, log-probs and prompt ids, of lengths that agree, or it is an EngineError that names what is
missing; its routes are still the payload that came, for `r3.wire` to judge.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from r3.errors import ConfigError, EngineError
from r3.rollout.prompts import Prompt
from r3.sample import UNKNOWN_VERSION

_ROUTES, _STRING = b'"routed_experts"', re.compile(rb'\s*:\s*"')
_TAKEN = secrets.token_hex(16)  # stands in the JSON where routes were; what comes from outside cannot be equal to it

_RESERVED = {
    *("model", "prompt", "messages", "prompt_token_ids", "prompt_embeds"),
    *("n", "best_of", "use_beam_search", "stream", "echo", "include_reasoning", "routed_experts_prompt_start"),
    *("logprobs", "top_logprobs", "return_token_ids"),
    *("temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "seed"),
}

# Sent with every request, because vLLM otherwise takes them from the model's generation_config.json, and a repetition
# penalty there makes the rollout policy another one than the trainer computes.
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        temperature: 0 is greedy.
        top_p: In (0, 1].
        top_k: 0 is off.
        max_tokens: At most so many tokens a response.
        seed: Each sample gets its own seed, derived from this and its id; None leaves it to the engine.
        extra: More fields of the request body, e.g. `{"stop": ["\\n\\n"]}`.

    Raises:
        ConfigError: a value out of its range, or a field in `extra` that r3 sets itself.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a number from 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0, up to 1"),
            ("top_k", self.top_k >= 0, "a count, or 0 for off"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
        )
        for name, fits, expected in checks:
            if not fits:
                raise ConfigError(
                    f"{name} is out of range", where="sampling", expected=expected, got=getattr(self, name)
                )
        clash = sorted(_RESERVED & set(self.extra))
        if clash:
            raise ConfigError(
                "extra request fields that r3 sets itself",
                where="sampling",
                got=", ".join(clash),
                remedy="leave them out; temperature, top_p, top_k, max_tokens and seed have arguments of their own",
            )

    def body(self, seed: int | None) -> dict[str, Any]:
        """The fields of a request that say how to sample."""
        body = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            **_NEUTRAL,
            **self.extra,
        }
        return body if seed is None else {**body, "seed": seed}


@dataclass(frozen=True, eq=False)
class Completion:
    """One sampled sequence as it came, lengths checked, routes not yet decoded.

    Attributes:
        prompt_token_ids: [P] int64.
        token_ids: [G] int64, the sampled tokens.
        logprobs: [G] float32, of the sampled tokens, natural log.
        routed_experts: base64 of a `.npy` (of a large response a view of its bytes), None if the server sent null; from an
            engine in this process an integer array [rows, layers, K].
        finish_reason: `stop`, `length`, ...
        url: The server that sampled.
        weight_version: Of the weights that sampled, where the engine knows it.
    """

    prompt_token_ids: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]
    routed_experts: str | memoryview | npt.NDArray[Any] | None
    finish_reason: str
    url: str
    weight_version: int = UNKNOWN_VERSION


class Sampler(Protocol):
    """What can be asked for samples: servers (`r3.rollout.client.VllmClient`) or an engine in this process.

    An async context manager; `sample` is called many times at once inside it.
    """

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def sample(self, prompt: Prompt, *, seed: int | None = None) -> Completion:
        """One response to a prompt.

        Raises:
            PromptError: this prompt cannot be sampled, now or later; others can.
            EngineError: nothing can be sampled any more.
        """
        ...


def request_of(prompt: Prompt, model: str, sampling: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Path and body of the request that samples one response with its log-probs, token ids and routes."""
    body = {**sampling, "model": model, "n": 1, "stream": False, "return_token_ids": True}
    if prompt.kind == "messages":
        return "/v1/chat/completions", {**body, "messages": prompt.payload, "logprobs": True, "top_logprobs": 0}
    return "/v1/completions", {**body, "prompt": prompt.payload, "logprobs": 0}


def parse_completion(content: bytes, url: str) -> Completion:
    """The one choice of a `/v1/completions` or `/v1/chat/completions` response.

    Raises:
        EngineError: a part is missing or the parts do not fit each other.
    """
    try:
        response, routes = _load(content)
        (choice,) = response["choices"]
        # Where vLLM puts the prompt's ids: in the choice for completions, at the top for chat.
        prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        tokens, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if logprobs is not None:
            content_of = logprobs.get("content")
            logprobs = (
                logprobs.get("token_logprobs") if content_of is None else [item["logprob"] for item in content_of]
            )
        finish_reason, version = choice.get("finish_reason"), response.get("weight_version")
    except (orjson.JSONDecodeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise EngineError(
            f"not a completion in vLLM's format ({type(error).__name__}: {error})",
            where=url,
            expected="a JSON object with one choice",
            got=f"{len(content)} bytes that begin {content[:80]!r}",
            remedy="give the URL of the vLLM server itself; a gateway may rewrite responses",
        ) from None
    for name, value in (("prompt_token_ids", prompt), ("token_ids", tokens), ("logprobs", logprobs)):
        if not isinstance(value, list):
            raise EngineError(
                f"the response has no {name}",
                where=url,
                expected="a list, as asked for with return_token_ids and logprobs",
                got="null" if value is None else type(value).__name__,
                remedy="call vLLM (0.22 or later) without a gateway that drops fields",
            )
    try:
        arrays = _ids(prompt), _ids(tokens), np.array(logprobs, np.float32)
    except (ValueError, TypeError, OverflowError) as error:
        raise EngineError(f"token ids or log-probs that are not numbers ({error})", where=url) from None
    if arrays[1].shape != arrays[2].shape or not np.isfinite(arrays[2]).all():
        raise EngineError(
            "token ids and log-probs do not fit each other",
            where=url,
            expected=f"{len(tokens)} finite log-probs",
            got=f"{int(np.isfinite(arrays[2]).sum())} finite of {len(logprobs)}",
            remedy="update the engine; a sampled token without its log-prob cannot be trained on",
        )
    payload = choice.get("routed_experts") if routes is None else routes
    weights = version if isinstance(version, int) else UNKNOWN_VERSION  # r3's own server says it, vLLM does not
    return Completion(*arrays, payload, str(finish_reason), url, weights)


def _load(content: bytes) -> tuple[Any, memoryview | None]:
    """The JSON of a response, and its routes as a view of `content` if they could be taken out before it was parsed.

    Seven eighths of a response are one string of base64. A parser checks and copies it as text (9 of 14 ms for 8.4 MB, with
    the interpreter's lock), and then `r3.wire` checks each character again. What is taken out is the choice's own if what stands
    in its place is found there after parsing. If not (the key was another object's, or comes again), or if the string has JSON
    escapes, the whole is parsed.
    """
    key = content.find(_ROUTES)
    value = _STRING.match(content, key + len(_ROUTES)) if key >= 0 else None
    if value is not None:
        view, begin, end = memoryview(content), value.end(), content.find(b'"', value.end())
        if end >= 0 and content.find(b"\\", begin, end) < 0:
            response = orjson.loads(b"".join((view[:begin], _TAKEN.encode(), view[end:])))
            choices = response.get("choices") if isinstance(response, dict) else None
            first = choices[0] if isinstance(choices, list) and choices else None
            if isinstance(first, dict) and first.get("routed_experts") == _TAKEN:
                return response, view[begin:end]
    return orjson.loads(content), None


def _ids(values: list[Any]) -> npt.NDArray[np.int64]:
    array = np.array(values)
    if array.ndim != 1 or (array.size and array.dtype.kind != "i"):  # astype alone would cut 1.5 to 1
        raise ValueError(f"token ids of shape {array.shape} and {array.dtype}")
    return array.astype(np.int64)


def message_of(content: bytes) -> str:
    """What the server said, from an OpenAI-style error or any other body, in one line."""
    try:
        error = orjson.loads(content)
        error = error.get("error", error.get("message", error.get("detail", error)))
        text = error["message"] if isinstance(error, dict) and "message" in error else error
    except (orjson.JSONDecodeError, AttributeError):
        text = content.decode("utf-8", "replace")
    text = " ".join(str(text).split())
    return text[:500] or "(empty body)"
