"""requests: one request of the engine, from its prompt to its tokens, log-probs and route rows.

A request of N tokens, prompt and sampled, has rows for its first N-1: the last is never fed back. Each row is kept the first
time its token goes through the model, because that is the forward that gave the next token's log-prob. Three things bring a
token a second time, and their rows are counted and left out: a preempted request that is computed again, the last token of a
prompt whose every block was shared, and nothing else.

Contract: rows are contiguous from 0. A hole (a row whose predecessor was never captured nor shared) is an error that names the
request and the position, at the step where it appears.

P prompt tokens, G sampled tokens, L MoE layers, K top-k.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from r3.errors import EngineError
from r3.rollout.transformers.params import Params

Rows = npt.NDArray[Any]

MAX_PIECES = 64  # steps whose rows, all requests' of each, a request may keep in memory


@dataclass(frozen=True, eq=False)
class Output:
    """A finished request.

    Attributes:
        prompt_token_ids, token_ids: P and G ids.
        logprobs: Of the sampled tokens, natural log of the raw distribution (before temperature, top-p and top-k).
        top_logprobs: For each sampled token the ids and log-probs of the most likely ones, as many as asked for.
        rows: [P+G-1, L, K] of the spec's dtype, None without capture.
        finish_reason: `stop` or `length`.
        stop_text: The stop string that ended it, None if none did.
        weight_version: Of the weights that sampled.
        shared: Prompt tokens whose forward was skipped, because another request's blocks held them.
        recomputed: Tokens that went through the model again after a preemption.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]
    rows: Rows | None
    finish_reason: str
    stop_text: str | None
    weight_version: int
    shared: int
    recomputed: int


@dataclass(eq=False)
class Run:
    """A request on its way through the engine; written by the engine's thread alone once submitted."""

    request_id: str
    prompt: list[int]
    params: Params
    seed: int
    generator: torch.Generator
    weight_version: int
    row_shape: tuple[int, int] | None  # (L, K); None without capture
    row_dtype: Any = np.uint8
    decode: Any = None  # token ids -> text, where there are stop strings
    future: Future[Output] = field(default_factory=Future)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    finish_reason: str = ""
    stop_text: str | None = None
    recorded: int = 0
    shared: int = 0
    recomputed: int = 0
    _pieces: list[Rows] = field(default_factory=list)

    def place(self, first: int, rows: Rows) -> None:
        """Keep the rows of the tokens from position `first` on; those that are there already are only counted.

        Args:
            first: Position of the first row.
            rows: [n, L, K] of a snapshot, to which nobody writes: it is kept, not copied.

        Raises:
            EngineError: they do not join on to what is there.
        """
        if first > self.recorded:
            raise EngineError(
                "route rows are missing before those of this step",
                where=f"request {self.request_id}, position {self.recorded}",
                expected=f"rows from position {self.recorded}",
                got=f"rows from position {first}",
                remedy="this is a defect of r3 or of an engine that was changed: turn prefix sharing off, and report it",
            )
        known = min(self.recorded - first, len(rows))
        if known:
            self.recomputed += known
            rows = rows[known:]
        if len(rows):
            # Joined later, many at a time: copying each step's row for each request would cost more than all else here.
            self._pieces.append(rows)
            self.recorded += len(rows)
            if len(self._pieces) > MAX_PIECES:
                self._pieces = [np.concatenate(self._pieces)]

    def share(self, rows: Rows) -> None:
        """Keep the rows of a prefix that others computed; a request that was preempted may have them already."""
        if self.recorded < len(rows):
            self.shared = len(rows)
            known, self.recomputed = self.recomputed, 0
            self.place(0, rows)
            self.recomputed = known

    def take(self, token: int, logprob: float | None) -> bool:
        """One more sampled token; whether a stop string ends the request with it."""
        self.tokens.append(token)
        self.logprobs.append(float("nan") if logprob is None else logprob)
        stops = self.params.stop
        if not stops:
            return False
        # A match ends in the newest token, and a token that shows is at least one byte long.
        window = self.tokens[-(max(len(stop.encode()) for stop in stops) + 4) :]
        text = self.decode(window)
        self.stop_text = next((stop for stop in stops if stop in text), None)
        return self.stop_text is not None

    def output(self) -> Output:
        """What it came to.

        Raises:
            EngineError: its tokens and its rows do not fit each other, or a log-prob is not a number.
        """
        if not all(map(math.isfinite, self.logprobs)):
            position = next(i for i, each in enumerate(self.logprobs) if not math.isfinite(each))
            raise EngineError(
                "a sampled token has no finite log-prob",
                where=f"request {self.request_id}, sampled token {position}",
                expected="finite logits",
                got=self.logprobs[position],
                remedy="look for NaN in the weights; another dtype if the model overflows in this one",
            )
        rows = None
        if self.row_shape is not None:
            expected = len(self.prompt) + len(self.tokens) - 1
            if self.recorded != expected or not self._pieces:
                raise EngineError(
                    "a finished request has not as many route rows as tokens",
                    where=f"request {self.request_id}",
                    expected=f"{len(self.prompt)} + {len(self.tokens)} - 1 = {expected} rows",
                    got=self.recorded,
                    remedy="this is a defect of r3 or of an engine that was changed: report it",
                )
            rows = np.concatenate(self._pieces, dtype=self.row_dtype)
        return Output(
            self.prompt,
            self.tokens,
            self.logprobs,
            self.top,
            rows,
            self.finish_reason,
            self.stop_text,
            self.weight_version,
            self.shared,
            self.recomputed,
        )


class RoutedState(RequestState):  # type: ignore[misc]
    """transformers' state of a request, with its Run."""

    run: Run

    @classmethod
    def of(cls, run: Run) -> RoutedState:
        state = cls(
            request_id=run.request_id,
            initial_tokens=list(run.prompt),
            max_new_tokens=run.params.max_tokens,
            eos_token_id=sorted(run.params.stop_token_ids) or -1,
        )
        state.run = run
        return state

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        before = self.generated_len()
        finished = bool(super().update_and_check_completion(token_id, logprob))
        if self.generated_len() == before:  # the engine dropped it
            return finished
        if self.run.take(token_id, logprob) and not finished:
            self.status = RequestStatus.FINISHED
            finished = True
        if finished:
            ended = token_id in self.run.params.stop_token_ids or self.run.stop_text is not None
            self.run.finish_reason = "stop" if ended else "length"
        return finished

    def create_equivalent_initial_request(self) -> RoutedState:
        """After an eviction: the same request, its sampled tokens put behind its prompt, to be computed again."""
        plain = super().create_equivalent_initial_request()
        state = type(self)(**{each.name: getattr(plain, each.name) for each in fields(plain)})
        state.run = self.run
        return state
