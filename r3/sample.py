"""RolloutSample: one sampled sequence with everything that a replay and an honest comparison need.

Tokens, routes, log-probs, mask and weight versions are one row per token and are cut together (`truncate`), never apart:
cutting tokens and not rows shifts every later route (verl issue 6089, miles issue 861).

Alignment: `rollout_logprobs[t]` is log p(token t | tokens before t) under the rollout policy, NaN where the engine gave
none (prompt tokens). `loss_mask[t]` marks the tokens that the rollout sampled and the loss uses.
`weight_version[t]` is the version of the weights that produced token t, -1 if nobody said.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from r3.errors import SampleError
from r3.routes import Mask, Routes
from r3.spec import RoutingSpec

UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class Provenance:
    """Where a sample came from: enough to refuse a comparison that would mean nothing.

    Attributes:
        engine, engine_version: `vllm`, `0.30.0`.
        model: Name or path under which the engine served the model.
        model_fingerprint: `r3.fingerprint.model_fingerprint` of the weights that sampled, "" if not known.
        temperature, top_p, top_k: Sampling parameters (top_k 0 = off).
        logprobs_mode: vLLM's term: `raw_logprobs` (before temperature and truncation) or `processed_logprobs`.
        finish_reason: `length`, `stop`, ...
        extra: Anything else, strings, kept as it is.
    """

    engine: str = ""
    engine_version: str = ""
    model: str = ""
    model_fingerprint: str = ""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    logprobs_mode: str = ""
    finish_reason: str = ""
    extra: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RolloutSample:
    """One sampled sequence of T tokens. One sample is one shard.

    Attributes:
        sample_id: Unique in its store; also the shard's file name.
        group_id: The prompt that the sample answers; samples of a group share it.
        spec: The routing of the model that sampled.
        tokens: [T] int32 or int64, prompt then response.
        routes: Expert ids [L, T, K] and the mask of recorded rows.
        prompt_length: Tokens of the prompt.
        rollout_logprobs: [T] float32, natural log, NaN where there is none.
        loss_mask: [T] bool.
        weight_version: [T] int32.
        provenance: Engine, model, sampling parameters.

    Raises:
        SampleError: if the parts do not fit each other.
    """

    sample_id: str
    group_id: str
    spec: RoutingSpec
    tokens: npt.NDArray[Any]
    routes: Routes
    prompt_length: int
    rollout_logprobs: npt.NDArray[np.float32]
    loss_mask: Mask
    weight_version: npt.NDArray[np.int32]
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        where = f"sample {self.sample_id!r}"
        if self.tokens.ndim != 1 or self.tokens.dtype not in (np.int32, np.int64):
            raise SampleError(
                "tokens must be one row of ids",
                where=where,
                expected="[T] int32 or int64",
                got=f"{list(self.tokens.shape)} {self.tokens.dtype}",
            )
        if self.tokens.min(initial=0) < 0:
            raise SampleError(
                "a token id is negative",
                where=f"{where}: token {int(self.tokens.argmin())}",
                expected="ids of the vocabulary, from 0",
                got=int(self.tokens.min()),
                remedy="give the ids that the engine read, also at the places of images and padding",
            )
        num_tokens = len(self.tokens)
        for name, dtype in (("rollout_logprobs", np.float32), ("loss_mask", np.bool_), ("weight_version", np.int32)):
            array = getattr(self, name)
            if array.shape != (num_tokens,) or array.dtype != dtype:
                raise SampleError(
                    f"{name} does not fit the tokens",
                    where=where,
                    expected=f"[{num_tokens}] {np.dtype(dtype)}",
                    got=f"{list(array.shape)} {array.dtype}",
                )
        if self.routes.num_tokens != num_tokens:
            raise SampleError(
                "routes do not fit the tokens", where=where, expected=num_tokens, got=self.routes.num_tokens
            )
        if not 0 <= self.prompt_length <= num_tokens:
            raise SampleError(
                "the prompt is longer than the sample", where=where, expected=f"0..{num_tokens}", got=self.prompt_length
            )
        self.routes.check(self.spec, where)

    @classmethod
    def from_rollout(
        cls,
        *,
        sample_id: str,
        spec: RoutingSpec,
        prompt_tokens: npt.ArrayLike,
        response_tokens: npt.ArrayLike,
        response_logprobs: npt.ArrayLike,
        routes: Routes,
        group_id: str = "",
        weight_version: int = UNKNOWN_VERSION,
        provenance: Provenance | None = None,
    ) -> RolloutSample:
        """A single-turn sample from what an engine returns: P prompt tokens, G sampled tokens with G log-probs."""
        prompt, response = np.asarray(prompt_tokens, np.int64).ravel(), np.asarray(response_tokens, np.int64).ravel()
        logprobs = np.asarray(response_logprobs, np.float32).ravel()
        if len(logprobs) != len(response):
            raise SampleError(
                "every sampled token needs its log-prob",
                where=f"sample {sample_id!r}",
                expected=f"{len(response)} log-probs",
                got=len(logprobs),
            )
        tokens = np.concatenate([prompt, response])
        is_response = np.arange(len(tokens)) >= len(prompt)
        return cls(
            sample_id=sample_id,
            group_id=group_id,
            spec=spec,
            tokens=narrow_tokens(tokens),
            routes=routes,
            prompt_length=len(prompt),
            rollout_logprobs=np.concatenate([np.full(len(prompt), np.nan, np.float32), logprobs]),
            loss_mask=is_response,
            weight_version=np.where(is_response, weight_version, UNKNOWN_VERSION).astype(np.int32),
            provenance=provenance or Provenance(),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def token_digest(self) -> str:
        return token_digest(self.tokens)

    def truncate(self, num_tokens: int) -> RolloutSample:
        """The first `num_tokens` tokens with their rows: tokens and routes are cut here and nowhere else."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise SampleError(
                "cannot cut a sample to more than it has",
                where=f"sample {self.sample_id!r}",
                expected=f"0..{self.num_tokens}",
                got=num_tokens,
            )
        return replace(
            self,
            tokens=self.tokens[:num_tokens],
            routes=self.routes.tokens(0, num_tokens),
            prompt_length=min(self.prompt_length, num_tokens),
            rollout_logprobs=self.rollout_logprobs[:num_tokens],
            loss_mask=self.loss_mask[:num_tokens],
            weight_version=self.weight_version[:num_tokens],
        )


def narrow_tokens(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """int32 where the ids fit (every vocabulary today), else int64."""
    fits = len(tokens) == 0 or (tokens.min() >= -(2**31) and tokens.max() < 2**31)
    return tokens.astype(np.int32 if fits else np.int64)


def token_digest(tokens: npt.NDArray[Any]) -> str:
    """XXH3 (128 bit, seed 0) of the ids as little-endian int64: the same whatever dtype they were stored in.

    Tells which tokens a record belongs to, against mistakes and not against an adversary; SHA-256 took 30 times as long,
    a twentieth of the time of writing a shard.
    """
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tokens, "<i8").data)
