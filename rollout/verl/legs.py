"""legs: every request that an agent loop makes, and the sample that they make together.

veRL's loops hand on one array of routes: of the last turn, or of resumed requests glued by their lengths. Rows that were lost
on the way, or that a later turn computed again under other weights, cannot be told from it. So the requests themselves are
tapped, below the client that resumes interrupted ones: what each sent, and what it got.

Contract of `sample_of`: the tokens are those of the loop's output, cut as the loop cut them. Row t is that of the first leg that
computed it, for the same tokens 0..t: the experts that were used when token t + 1 was sampled. A later turn's prefill may compute
it again under newer weights (verl issue 6054); that row is not taken. Rows of tokens that the output does not have, because a
response was cut or a context edited, are dropped with them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from r3 import wire
from r3.errors import SampleError
from r3.routes import Mask, Routes
from r3.sample import UNKNOWN_VERSION, Provenance, RolloutSample, narrow_tokens
from r3.spec import RoutingSpec
from r3.stitch import Leg, stitch
from r3.wire.checks import STRICT, Policy
from r3.wire.engines import Context


@dataclass(frozen=True, eq=False)
class Request:
    """One request to a rollout server and its answer (veRL's `TokenOutput`).

    Attributes:
        prompt_ids: [P] token ids of the whole context.
        token_ids: [G] sampled ids.
        log_probs: [G], None if not asked for.
        routed_experts: As the engine gave it; None if it gave nothing.
        weight_version: The server's `global_steps`; -1 unknown.
        stop_reason: veRL's word: `completed`, `aborted`.
        cached_tokens: Prompt tokens from the prefix cache, None unknown.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float] | None
    routed_experts: Any
    weight_version: int
    stop_reason: str
    cached_tokens: int | None

    @classmethod
    def of(cls, prompt_ids: Sequence[int], output: Any) -> Request:
        version = output.extra_fields.get("global_steps")
        return cls(
            prompt_ids=list(prompt_ids),
            token_ids=list(output.token_ids),
            log_probs=None if not output.log_probs else list(output.log_probs),
            routed_experts=output.routed_experts,
            weight_version=UNKNOWN_VERSION if version is None else int(version),
            stop_reason=str(output.stop_reason or ""),
            cached_tokens=output.extra_fields.get("num_cached_tokens"),
        )


def tapped(client: Any, requests: list[Request]) -> Any:
    """The client, as one that appends each request that reaches a server to `requests`.

    veRL's clients take a server per attempt (`_acquire_server`), the resuming one several times for one `generate`; the
    copy of the client that is returned hands out servers that are watched. Of another client, `generate` is watched.
    """
    if not hasattr(client, "_acquire_server"):
        return _Watched(client, requests)
    ours = copy.copy(client)

    async def acquire(*args: Any, **kwargs: Any) -> tuple[str, Any]:
        server_id, server = await client._acquire_server(*args, **kwargs)
        return server_id, _WatchedServer(server, requests)

    ours._acquire_server = acquire
    ours._release_server = client._release_server  # the fields that it declares are learnt when a server is acquired
    return ours


class _Watched:
    def __init__(self, inner: Any, requests: list[Request]) -> None:
        self._inner, self._requests = inner, requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        output = await self._inner.generate(*args, **kwargs)
        self._requests.append(Request.of(kwargs["prompt_ids"], output))
        return output


class _WatchedServer:
    """A server handle (a Ray actor) of which `generate.remote(...)` is watched."""

    def __init__(self, server: Any, requests: list[Request]) -> None:
        self._server, self._requests = server, requests

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    @property
    def generate(self) -> _WatchedServer:
        return self

    async def remote(self, *args: Any, **kwargs: Any) -> Any:
        prompt_ids = list(kwargs["prompt_ids"])  # the client goes on with the list
        output = await self._server.generate.remote(*args, **kwargs)
        self._requests.append(Request.of(prompt_ids, output))
        return output


def sample_of(
    output: Any,
    requests: Sequence[Request],
    spec: RoutingSpec,
    *,
    sample_id: str,
    group_id: str = "",
    provenance: Provenance | None = None,
    policy: Policy = STRICT,
) -> RolloutSample:
    """The sample of an agent loop's output, its rows and weight versions by leg.

    Args:
        output: veRL's `AgentLoopOutput`: `prompt_ids`, `response_ids`, `response_mask`, `response_logprobs`.
        requests: All of its requests, in order.
        policy: What is done about rows that cannot be trusted (`r3.wire`).

    Raises:
        WireError: an engine's routes that cannot be trusted, or none.
        SampleError: the loop trains on tokens that no request sampled.
    """
    where = f"sample {sample_id!r}"
    tokens = np.asarray([*output.prompt_ids, *output.response_ids], np.int64)
    covered: Mask = np.zeros(len(tokens), np.bool_)
    legs = [_leg(request, tokens, covered, spec, f"{where}: leg {i}", provenance or Provenance(), policy)
            for i, request in enumerate(requests)]  # fmt: skip
    sample = stitch(legs, spec, sample_id=sample_id, group_id=group_id, provenance=provenance)
    sample = _with_tail(sample, tokens[sample.num_tokens :])
    prompt_length = len(output.prompt_ids)
    trained = np.concatenate([np.zeros(prompt_length, np.bool_), np.asarray(output.response_mask, np.bool_)])
    _require_sampled(trained, sample, where)
    logprobs = np.full(len(tokens), np.nan, np.float32)
    if output.response_logprobs:
        logprobs[prompt_length:] = output.response_logprobs
    return replace(
        sample,
        prompt_length=prompt_length,
        loss_mask=trained,
        rollout_logprobs=np.where(trained, logprobs, np.float32(np.nan)).astype(np.float32),
    )


def _leg(
    request: Request,
    tokens: np.ndarray[Any, Any],
    covered: Mask,
    spec: RoutingSpec,
    where: str,
    provenance: Provenance,
    policy: Policy,
) -> Leg:
    """What of a request is in the output, and of its rows those that no earlier leg computed; marks them in `covered`."""
    own = np.asarray([*request.prompt_ids, *request.token_ids], np.int64)
    common = _common_prefix(own, tokens)
    prompt = min(len(request.prompt_ids), common)
    sampled = np.arange(common) >= prompt
    leg = Leg(
        tokens=own[:common],
        sampled=sampled,
        logprobs=None if request.log_probs is None else request.log_probs[: common - prompt],
        weight_version=request.weight_version,
    )
    if not len(request.token_ids):  # aborted before it began: the engine gives nothing, and nothing is lost
        return leg
    routes = wire.routes_from_rows(
        request.routed_experts,
        spec,
        num_tokens=len(own),
        where=where,
        policy=policy,
        context=Context(
            engine=provenance.engine,
            version=provenance.engine_version,
            channel="offline",
            finish_reason={"aborted": "abort"}.get(request.stop_reason, request.stop_reason),
            prompt_tokens=len(request.prompt_ids),
            cached_tokens=request.cached_tokens,
        ),
    )
    mine = routes.recorded[:common] & ~covered[:common]
    covered[:common] |= mine
    return replace(leg, routes=replace(routes.tokens(0, common), recorded=mine), routes_start=0)


def _with_tail(sample: RolloutSample, tokens: np.ndarray[Any, Any]) -> RolloutSample:
    """The sample with tokens after its last request, a tool's answer that nobody read: they have no rows, by nature."""
    count = len(tokens)
    more = Routes.empty(count, sample.spec)
    return replace(
        sample,
        tokens=narrow_tokens(np.concatenate([sample.tokens, tokens])),
        routes=Routes(
            np.concatenate([sample.routes.ids, more.ids], axis=1),
            np.concatenate([sample.routes.recorded, more.recorded]),
        ),
        rollout_logprobs=np.pad(sample.rollout_logprobs, (0, count), constant_values=np.nan),
        loss_mask=np.pad(sample.loss_mask, (0, count)),
        weight_version=np.pad(sample.weight_version, (0, count), constant_values=UNKNOWN_VERSION),
    )


def _common_prefix(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> int:
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def _require_sampled(trained: Mask, sample: RolloutSample, where: str) -> None:
    wrong = np.flatnonzero(trained & ~sample.loss_mask)
    if len(wrong):
        raise SampleError(
            f"the response mask has {len(wrong)} tokens that no request sampled",
            where=f"{where}, token {int(wrong[0])}",
            expected="tokens of a response to one of this loop's requests, at the same position after the same context",
            got=f"token id {int(sample.tokens[wrong[0]])}",
            remedy="the loop changed what was sampled (decoded and encoded it again, or edited the context): pass token ids "
            "from turn to turn, or mask those tokens",
        )


def dense_rows(sample: RolloutSample, *, may_have_holes: bool) -> npt.NDArray[Any]:
    """[T, L, K] uint8 or int16 as veRL's batch carries it: MoE layers only, zeros where there is no record.

    Args:
        may_have_holes: Whether who replays it knows which rows are recorded. veRL itself takes zeros for expert 0.

    Raises:
        SampleError: a row without a record before the last one with, for one who cannot know.
    """
    recorded = sample.routes.recorded
    last = int(np.flatnonzero(recorded)[-1]) + 1 if recorded.any() else 0
    if not may_have_holes and not recorded[:last].all():
        raise SampleError(
            "veRL's own replay cannot tell a missing row from expert 0",
            where=f"sample {sample.sample_id!r}, token {int(np.flatnonzero(~recorded)[0])}",
            expected="a record of every row up to the last one",
            got=f"{int((~recorded[:last]).sum())} rows without",
            remedy="let r3's engine replay (trainer: r3), or refuse such samples (policy: strict)",
        )
    rows = np.where(recorded[:, None, None], sample.routes.ids.transpose(1, 0, 2), 0)
    return np.ascontiguousarray(rows, np.uint8 if sample.spec.num_experts <= 256 else np.int16)
