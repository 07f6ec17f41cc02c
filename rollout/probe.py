"""probe: two tokens sampled from a vLLM server, to prove that its routes and log-probs can be used.

The routes must be there and decode against the model's RoutingSpec. The same distribution is asked for at two temperatures,
which tells whether log-probs are raw or processed: `--logprobs-mode` decides that and is in no API, and log-probs that were
taken for the other kind shift every comparison with the trainer's.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from r3 import wire
from r3.errors import EngineError, WireError
from r3.rollout.client import describe
from r3.rollout.protocol import message_of
from r3.spec import RoutingSpec

_PROMPT = list(range(1, 17))  # token ids that every vocabulary has
_TEMPERATURES = (0.5, 2.0)
_TOP = 8  # alternatives per token, within vLLM's default --max-logprobs of 20


async def probe(
    session: aiohttp.ClientSession, url: str, model: str, spec: RoutingSpec, max_model_len: int | None
) -> str:
    """Prove that one server's routes come and fit the spec; returns its log-probs mode.

    Raises:
        EngineError: no routes, routes of another model, no token ids or log-probs, or logits in their place.
    """
    prompt = _PROMPT[: max(1, min(len(_PROMPT), (max_model_len or 64) - 2))]
    choices = [await _sample(session, url, model, prompt, temperature) for temperature in _TEMPERATURES]
    for choice in choices:
        _check_routes(choice, spec, url, len(prompt))
    return logprobs_mode([_top_logprobs(choice, url) for choice in choices], url)


async def call(
    session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any] | None = None
) -> tuple[int, Any]:
    """Status and JSON (or bytes, if it is not JSON) of one request."""
    method = "GET" if body is None else "POST"
    headers = {} if body is None else {"Content-Type": "application/json"}
    try:
        async with session.request(
            method, url + path, data=None if body is None else orjson.dumps(body), headers=headers
        ) as response:
            status, content = response.status, await response.read()
    except aiohttp.ClientConnectorError as error:
        code = error.os_error.errno or 0  # negative for a host name that cannot be resolved
        reason = os.strerror(code) if code > 0 else error.os_error.strerror or error.os_error
        raise EngineError(
            f"no server can be reached ({reason})",
            where=url,
            remedy="start the server, wait until it is up, or correct host and port",
        ) from None
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        raise EngineError(
            f"no usable answer to {method} {path} ({describe(error)})",
            where=url,
            remedy="check that this is the port of vLLM's HTTP server, and that it is up",
        ) from None
    try:
        return status, orjson.loads(content)
    except orjson.JSONDecodeError:
        return status, content


async def _sample(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], temperature: float
) -> dict[str, Any]:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": _TOP,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # keys of top_logprobs: two tokens may have the same text
    }
    status, response = await call(session, url, "/v1/completions", body)
    if status != 200:
        said = message_of(orjson.dumps(response) if isinstance(response, dict) else response)
        raise EngineError(f"the server fails a request of two tokens (HTTP {status}: {said})", where=url)
    try:
        (choice,) = response["choices"]
    except (KeyError, TypeError, ValueError):
        choice = None
    if not isinstance(choice, dict):
        raise EngineError("not a completion in vLLM's format", where=url, got=str(response)[:200])
    return choice


def _check_routes(choice: dict[str, Any], spec: RoutingSpec, url: str, prompt_length: int) -> None:
    tokens = choice.get("token_ids")
    if "routed_experts" not in choice or not isinstance(tokens, list):
        missing = "routed_experts" if "routed_experts" not in choice else "token_ids"
        raise EngineError(
            f"responses have no field {missing}",
            where=url,
            expected="routed_experts and token_ids in choices[0]",
            got=", ".join(sorted(choice)),
            remedy="a gateway drops fields that it does not know: give the URL of the vLLM server itself",
        )
    if choice["routed_experts"] is None:
        raise EngineError(
            "the server does not return routed experts (routed_experts is null)",
            where=url,
            remedy="restart it with --enable-return-routed-experts (vLLM), or without --no-routes (r3's own)",
        )
    try:
        num_tokens = prompt_length + len(tokens)
        wire.decode_vllm(choice["routed_experts"], spec, num_tokens=num_tokens, where=f"{url}: routed_experts")
    except WireError as error:
        raise EngineError(
            f"the server's routes cannot be used: {error.what}",
            where=error.where,
            expected=error.expected,
            got=error.got,
            remedy=f"{error.remedy or 'check that the spec is that of the served model'}\n  (checked against: {spec.brief()})",
        ) from None


def _top_logprobs(choice: dict[str, Any], url: str) -> dict[str, float]:
    """Alternatives of the first sampled token and their log-probs."""
    try:
        top = choice["logprobs"]["top_logprobs"][0]
        return {str(token): float(value) for token, value in top.items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise EngineError(
            "the server returns no log-probs",
            where=url,
            expected="logprobs.top_logprobs in choices[0]",
            got=str(choice.get("logprobs"))[:200],
            remedy="call vLLM without a gateway, and without --max-logprobs 0",
        ) from None


def logprobs_mode(tops: Sequence[dict[str, float]], url: str) -> str:
    """`raw_logprobs` or `processed_logprobs`, from one distribution's largest log-probs at temperatures 0.5 and 2.

    The difference between two tokens' log-probs is that of their logits, over the temperature if it was applied: at the two
    temperatures it is the same (raw) or in a ratio of 4 (processed), whatever the normaliser.

    Raises:
        EngineError: the numbers are logits, which r3 cannot use, or do not tell.
    """
    for top in tops:
        values = sorted(top.values(), reverse=True)
        # A distribution sums to at most 1, and its largest entry is at least 1 / vocabulary (here: 2^20 tokens).
        if sum(math.exp(min(v, 1.0)) for v in values) > 1.01 or values[0] < -20 * math.log(2):
            raise EngineError(
                "the server returns logits in place of log-probs",
                where=url,
                expected="natural logarithms of probabilities",
                got=", ".join(f"{v:.3f}" for v in values[:3]),
                remedy="start vLLM with --logprobs-mode raw_logprobs (its default) or processed_logprobs",
            )
    common = sorted(set(tops[0]) & set(tops[1]), key=lambda token: tops[0][token])
    spreads = [top[common[-1]] - top[common[0]] if common else 0.0 for top in tops]
    if min(spreads) < 0.05:
        raise EngineError(
            "cannot tell whether the server's log-probs are raw or processed",
            where=url,
            expected=f"at least two tokens of different probability among the {_TOP} most likely",
            got=tops,
            remedy="check that the model has trained weights",
        )
    return "processed_logprobs" if spreads[0] / spreads[1] > 2.0 else "raw_logprobs"
