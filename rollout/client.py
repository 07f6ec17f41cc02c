"""client: ask vLLM servers over HTTP for one sampled sequence with its routes, and outlive what servers do.

One request is one sample (`n` = 1): vLLM repeats the prompt's rows in every choice of `n` > 1, so nothing would be saved on
the wire, while the prefix cache already saves the prompt's computation and, since vLLM 0.22, keeps the rows of a cached
prompt.

Contract: a request goes to the server with the fewest requests in flight. Connection errors, timeouts, 408, 429, 500, 502,
503, 504 and aborted generations are retried with exponential backoff and jitter (Retry-After is honoured), a bounded number
of times, and the server that failed rests while others take over. Everything else is final: what the server said is in the
error.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from types import TracebackType

import aiohttp
import numpy as np
import orjson
import tenacity

from r3.errors import ConfigError, EngineError, PromptError
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Completion, Sampling, message_of, parse_completion, request_of

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_READ_BUFFER = 16 << 20  # bytes; a response is read whole: to pause the socket every 128 KB, as by default, only costs
_LARGEST = (32 << 20) - (64 << 10)  # bytes, less some for the allocator's own use
_MAX_RETRY_AFTER = 120.0  # seconds; no server is waited for longer at a time


@dataclass(frozen=True)
class Retry:
    """How long to try: with the defaults about two minutes, enough for a server to restart.

    Attributes:
        attempts: Tries of one request in all.
        first_s, longest_s: Bounds in seconds of the exponential waits, of a request (with full jitter) and of a server.
    """

    attempts: int = 9
    first_s: float = 0.5
    longest_s: float = 30.0


@dataclass
class _Server:
    url: str
    in_flight: int = 0
    failures: int = 0  # since its last success
    rests_until: float = 0.0  # time.monotonic()


class _Passing(Exception):
    """A failure that another try may not meet."""

    def __init__(self, url: str, what: str, retry_after: float | None = None) -> None:
        super().__init__(what)
        self.url, self.what, self.retry_after = url, what, retry_after


class VllmClient:
    """Asynchronous client of one or more servers that serve the same model; an async context manager.

    Args:
        urls: Base URLs, as `r3.rollout.preflight.preflight` returns them.
        model: The name under which they serve the model.
        sampling: How to sample.
        retry: How long to try.
        timeout_s: One request at most; a response comes whole, so this bounds its generation and its queueing.
        api_key: Sent as a bearer token.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        sampling: Sampling,
        *,
        retry: Retry | None = None,
        timeout_s: float = 1800.0,
        api_key: str | None = None,
    ) -> None:
        if not urls:
            raise ConfigError("no server to ask", expected="at least one URL")
        self.model, self.sampling, self.retry = model, sampling, retry or Retry()
        self._servers = [_Server(url) for url in urls]
        self._timeout_s, self._api_key = timeout_s, api_key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> VllmClient:
        self._session = new_session(self._timeout_s, self._api_key)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def sample(self, prompt: Prompt, *, seed: int | None = None) -> Completion:
        """One response to a prompt.

        Raises:
            PromptError: the server refuses this prompt (400, 413, 422), e.g. as longer than the model's context.
            EngineError: no server answered after all retries, or one answered with something else that is final.
        """
        path, body = request_of(prompt, self.model, self.sampling.body(seed))
        data = orjson.dumps(body)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_Passing),
            stop=tenacity.stop_after_attempt(self.retry.attempts),
            wait=tenacity.wait_random_exponential(multiplier=self.retry.first_s, max=self.retry.longest_s),
            reraise=True,
        )
        try:
            return await retrying(self._ask, path, data, prompt)
        except _Passing as error:
            raise EngineError(
                f"no answer after {self.retry.attempts} tries; the last: {error.what}",
                where=error.url,
                remedy="look at the server's log; when it is up again, run the same command to resume",
            ) from None

    async def _ask(self, path: str, data: bytes, prompt: Prompt) -> Completion:
        server = await self._choose()
        server.in_flight += 1
        try:
            completion = await self._post(server.url, path, data, prompt)
        except _Passing as error:
            self._rest(server, error.retry_after)
            raise
        finally:
            server.in_flight -= 1
        server.failures = 0
        return completion

    async def _choose(self) -> _Server:
        """The least busy server that does not rest; waits for one if all rest."""
        while True:
            now = time.monotonic()
            ready = [server for server in self._servers if server.rests_until <= now]
            if ready:
                return min(ready, key=lambda server: (server.in_flight, random.random()))
            await asyncio.sleep(min(server.rests_until for server in self._servers) - now)

    def _rest(self, server: _Server, retry_after: float | None) -> None:
        now = time.monotonic()
        if retry_after is not None:
            server.rests_until = max(server.rests_until, now + retry_after)
        elif server.rests_until <= now:  # requests that fail together are one failure
            server.failures += 1
            server.rests_until = now + min(self.retry.longest_s, self.retry.first_s * 2.0**server.failures)

    async def _post(self, url: str, path: str, data: bytes, prompt: Prompt) -> Completion:
        assert self._session is not None
        try:
            async with self._session.post(
                url + path, data=data, headers={"Content-Type": "application/json"}
            ) as response:
                status, headers, content = response.status, response.headers, await response.read()
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _Passing(url, describe(error)) from None
        if status in _RETRIED:
            raise _Passing(url, f"HTTP {status}: {message_of(content)}", _retry_after(headers.get("Retry-After")))
        if status in (400, 413, 422):
            raise _refused(prompt, url, message_of(content))
        if status != 200:
            raise EngineError(f"the server answered HTTP {status}: {message_of(content)}", where=url + path)
        completion = parse_completion(content, url)
        if completion.finish_reason in ("abort", "error"):
            raise _Passing(url, f"the server gave up the request (finish_reason {completion.finish_reason!r})")
        return completion


def keep_freed_memory() -> None:
    """Let this process keep the memory of a response that it is done with, for the next one.

    glibc gives the end of the heap back to the kernel when more is free there than twice the largest block that was ever freed,
    and the next 10 MB response faults each page in again: 13 of 19 ms of receiving it. To free a block of almost 32 MiB, the most
    that glibc learns from, ends that for as long as the process lives. The block is not cleared and never touched.

    It changes the allocator of the whole process (up to 64 MiB of free memory stay with it), so no class of r3 does it by
    itself: `r3 collect`, `r3 budget --measure` and Ray workers do, whose processes are r3's. Call it in one of your own that
    collects.
    """
    np.empty(_LARGEST, np.uint8)


def new_session(timeout_s: float, api_key: str | None) -> aiohttp.ClientSession:
    """A session without a limit on connections (the collector bounds what is in flight) and without proxies."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=_READ_BUFFER,
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(10.0, timeout_s)),
        headers=headers,
    )


def describe(error: BaseException) -> str:
    """One line for a transport error; asyncio's timeout has no text of its own."""
    if isinstance(error, asyncio.TimeoutError):
        return "timed out"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _refused(prompt: Prompt, url: str, message: str) -> PromptError:
    too_long = "maximum context length" in message or "maximum model length" in message
    return PromptError(
        f"the server refuses this prompt: {message}",
        where=prompt.where,
        remedy="shorten the prompt, lower max_tokens, or serve with a larger --max-model-len; or skip such prompts"
        if too_long
        else f"correct the prompt or the sampling parameters ({url} answered 400)",
    )


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return None
    if value.strip().isdigit():
        seconds = float(value)
    else:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER)
