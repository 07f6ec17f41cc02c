"""stitch: one sample from the legs of a conversation: multi-turn, tool use, partial rollouts that were interrupted.

A leg is one request to the engine, or tokens that nobody sampled (a tool's answer, a user's turn). Legs come in order.

    leg 0   |--- prompt ---|--- sampled ---|                     rows of all its tokens but the last
    leg 1                                  |- tool -|            no rows: nobody computed any
    leg 2   |--- prompt ------- sampled ------ tool -|- sampled -|    rows from `routes_start` on: all, or only new ones

Contract, per token position:

- Tokens: a leg may repeat what came before (its context) and must then repeat it exactly. Another token at the same
  position is retokenisation drift (the text was decoded and encoded again) and an error: rows belong to tokens.
- Rows: the latest leg that has a record of a row wins. So a full array replaces (verl issue 6029 appended it, and
  shifted every later row), a part with an offset appends, and the row of a leg's last token, which that leg never
  computed, comes from the next leg's prefill. A row that no leg recorded is unrecorded; rows never move.
- Loss mask, log-prob and weight version are those of the leg that sampled the token.
- Tokens and rows are cut together (`max_tokens`).

Rows that are missing are counted in an R3Warning, by leg; the last row of the sample is not missed, it cannot be there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import R3Warning, SampleError
from r3.routes import Mask, Routes
from r3.sample import UNKNOWN_VERSION, Provenance, RolloutSample, narrow_tokens
from r3.spec import RoutingSpec


@dataclass(frozen=True, eq=False)
class Leg:
    """A stretch of a sequence, and what the engine said of it.

    Attributes:
        tokens: [N] ids of positions start..start+N-1; N may be 0 (a request that was aborted at once).
        start: Position of the first token; 0 where `tokens` begin with the whole context.
        sampled: Which tokens the engine sampled in this leg: how many at the end, or a mask [N].
        logprobs: One for each sampled token; None if they are not known.
        routes: Token-major rows [R, L, K] as `r3.wire` returns them, or Routes of R tokens; None if there are none.
        routes_start: Position of the first row (vLLM's `routed_experts_prompt_start`); `start` if not given.
        weight_version: Of the weights that sampled; -1 unknown.
    """

    tokens: npt.ArrayLike
    start: int = 0
    sampled: int | Mask = 0
    logprobs: npt.ArrayLike | None = None
    routes: Routes | npt.NDArray[Any] | None = None
    routes_start: int | None = None
    weight_version: int = UNKNOWN_VERSION


def stitch(
    legs: Sequence[Leg],
    spec: RoutingSpec,
    *,
    sample_id: str,
    group_id: str = "",
    provenance: Provenance | None = None,
    max_tokens: int | None = None,
) -> RolloutSample:
    """The sample that the legs make; `prompt_length` is the number of tokens before the first sampled one.

    Args:
        legs: In the order in which they happened.
        spec: The routing of the model.
        max_tokens: Cut the sample to so many tokens, and its rows with them.

    Raises:
        SampleError: legs that contradict each other, by leg and position.

    Warns:
        R3Warning: rows without a record.
    """
    sequence = _Sequence(
        spec, f"sample {sample_id!r}", max((leg.start + np.size(leg.tokens) for leg in legs), default=0)
    )
    for leg in legs:
        sequence.add(leg)
    sampled = np.flatnonzero(sequence.loss_mask)
    sample = RolloutSample(
        sample_id=sample_id,
        group_id=group_id,
        spec=spec,
        tokens=narrow_tokens(sequence.tokens),
        routes=sequence.routes,
        prompt_length=int(sampled[0]) if len(sampled) else len(sequence.tokens),
        rollout_logprobs=sequence.logprobs,
        loss_mask=sequence.loss_mask,
        weight_version=sequence.weight_version,
        provenance=provenance or Provenance(),
    )
    sequence.warn_of_missing(sample.num_tokens if max_tokens is None else max_tokens)
    return sample if max_tokens is None else sample.truncate(min(max_tokens, sample.num_tokens))


class _Sequence:
    """What the legs so far have said, per position."""

    def __init__(self, spec: RoutingSpec, where: str, capacity: int) -> None:
        self._spec, self._where = spec, where
        self._legs = self._known = 0
        self.routes = Routes.empty(capacity, spec)
        self.tokens = np.zeros(capacity, np.int64)
        self.logprobs = np.full(capacity, np.nan, np.float32)
        self.loss_mask: Mask = np.zeros(capacity, np.bool_)
        self.weight_version = np.full(capacity, UNKNOWN_VERSION, np.int32)
        self._leg_of = np.zeros(capacity, np.int64)  # that brought the token, or sampled it

    def add(self, leg: Leg) -> None:
        where = f"{self._where}: leg {self._legs}"
        tokens = np.asarray(leg.tokens, np.int64).ravel()
        start, end, known = leg.start, leg.start + len(tokens), self._known
        if not 0 <= start <= known:
            raise SampleError(
                "a leg begins after the end of what came before: the tokens between are not known",
                where=where,
                expected=f"start in 0..{known}",
                got=start,
                remedy="put the tool's or user's tokens into a leg of their own, or into this one",
            )
        self._require_same(tokens[: max(known - start, 0)], start, where)
        if end > known:
            self.tokens[known:end] = tokens[known - start :]
            self._leg_of[known:end] = self._legs
            self._known = end
        self._take_samples(leg, tokens, slice(start, end), where)
        if leg.routes is not None:
            self._take_rows(leg, leg.routes, end, where)
        self._legs += 1

    def _require_same(self, again: npt.NDArray[np.int64], start: int, where: str) -> None:
        before = self.tokens[start : start + len(again)]
        differ = np.flatnonzero(before != again)
        if len(differ):
            first = int(differ[0])
            raise SampleError(
                f"{len(differ)} tokens of this leg's context are not those of the legs before",
                where=f"{where}, position {start + first} (token {first} of the leg)",
                expected=f"token {int(before[first])}",
                got=f"token {int(again[first])}",
                remedy="pass token ids from turn to turn, not text: encoding a decoded text again gives other tokens. "
                "A context that was edited or shortened is another sample",
            )

    def _take_samples(self, leg: Leg, tokens: npt.NDArray[np.int64], span: slice, where: str) -> None:
        sampled = _sampled_mask(leg.sampled, len(tokens), where)
        twice = np.flatnonzero(sampled & self.loss_mask[span])
        if len(twice):
            raise SampleError(
                f"{len(twice)} tokens were sampled by an earlier leg already",
                where=f"{where}, position {span.start + int(twice[0])}",
                expected="each token sampled once: in later legs it is context",
                got=f"sampled by leg {int(self._leg_of[span.start + twice[0]])} too",
                remedy="if each leg holds all output so far, pass the last one alone",
            )
        count = int(sampled.sum())
        logprobs = np.full(count, np.nan) if leg.logprobs is None else np.asarray(leg.logprobs, np.float64).ravel()
        if len(logprobs) != count:
            raise SampleError(
                "every sampled token needs its log-prob", where=where, expected=f"{count} log-probs", got=len(logprobs)
            )
        positions = span.start + np.flatnonzero(sampled)
        self.loss_mask[positions] = True
        self.logprobs[positions] = logprobs
        self.weight_version[positions] = leg.weight_version
        self._leg_of[positions] = self._legs

    def _take_rows(self, leg: Leg, routes: Routes | npt.NDArray[Any], end: int, where: str) -> None:
        rows = _routes(routes, self._spec, where)
        start = leg.start if leg.routes_start is None else leg.routes_start
        if start < 0 or start + rows.num_tokens > end:
            raise SampleError(
                "rows beyond the tokens of this leg",
                where=where,
                expected=f"rows of positions 0..{end - 1}",
                got=f"{rows.num_tokens} rows from position {start}",
                remedy="`routes_start` is the position of the first row in the whole sequence: 0 for a full array",
            )
        positions = start + np.flatnonzero(rows.recorded)
        self.routes.ids[:, positions] = rows.ids[:, rows.recorded]
        self.routes.recorded[positions] = True

    def warn_of_missing(self, num_tokens: int) -> None:
        missing = ~self.routes.recorded[:num_tokens]
        missing[len(self.tokens) - 1 :] = False  # the last token is never fed back
        if not missing.any():
            return
        legs, counts = np.unique(self._leg_of[:num_tokens][missing], return_counts=True)
        each = ", ".join(f"{count} of leg {leg}" for leg, count in zip(legs.tolist(), counts.tolist(), strict=True))
        warnings.warn(
            f"{self._where}: {int(missing.sum())} of {len(missing)} rows have no record ({each}); "
            "these tokens will route live in the replay",
            R3Warning,
            stacklevel=3,
        )


def _sampled_mask(sampled: int | Mask, num_tokens: int, where: str) -> Mask:
    if not isinstance(sampled, np.ndarray):
        if not 0 <= sampled <= num_tokens:
            raise SampleError(
                "more tokens sampled than the leg has", where=where, expected=f"0..{num_tokens}", got=sampled
            )
        return np.arange(num_tokens) >= num_tokens - sampled
    if sampled.shape != (num_tokens,) or sampled.dtype != np.bool_:
        raise SampleError(
            "the mask of sampled tokens does not fit the leg",
            where=where,
            expected=f"bool [{num_tokens}]",
            got=f"{sampled.dtype} {list(sampled.shape)}",
        )
    return sampled


def _routes(routes: Routes | npt.NDArray[Any], spec: RoutingSpec, where: str) -> Routes:
    if not isinstance(routes, Routes):
        if routes.size and not 0 <= int(routes.min()) <= int(routes.max()) < spec.num_experts:
            raise SampleError(
                "expert ids are out of range",
                where=where,
                expected=f"0..{spec.num_experts - 1}",
                got=f"{routes.min()}..{routes.max()}",
                remedy="decode payloads with `r3.wire`, which says what such ids mean",
            )
        try:
            routes = Routes.from_rows(routes, len(routes), spec)
        except SampleError as error:
            raise error.at(where) from None
    routes.check(spec, where)
    return routes
