"""The tokens that carry a pass's k3: a mean over a heavy tail, of which one token can be most, so they are shown by name."""

from __future__ import annotations

import heapq
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.metrics.definitions import Float

TOP_TOKENS = 50
CONTEXT = 24  # tokens kept on each side, for a report that shows text


@dataclass(frozen=True)
class TopToken:
    """One sampled token.

    Attributes:
        sample_id: Of its sample.
        position: Index in the sample's tokens (prompt included).
        response_position: Index among the sample's compared tokens.
        token_id: -1 where the source has no ids.
        k3: Its term in the pass that it was kept for.
        rollout_logprob: The engine's.
        train_logprobs: Those of every pass, by name.
        weight_version: -1 if not known.
        differing_layers: Layers of the row that predicts it in which the live routers chose another set; -1 if not known.
        context: Token ids of up to CONTEXT tokens before it, itself, and after it.
        context_start: Position of the first of them.
    """

    sample_id: str
    position: int
    response_position: int
    token_id: int
    k3: float
    rollout_logprob: float
    train_logprobs: dict[str, float]
    weight_version: int
    differing_layers: int
    context: tuple[int, ...]
    context_start: int

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "context": list(self.context)}


class TopTokens:
    """The `size` tokens of the largest k3 so far."""

    def __init__(self, size: int = TOP_TOKENS) -> None:
        self.size = size
        self._heap: list[tuple[float, str, int, TopToken]] = []

    def candidates(self, terms: Float) -> npt.NDArray[np.int64]:
        """Indices into k3 terms [n] that may be among them."""
        found = np.argpartition(terms, -min(self.size, len(terms)))[-self.size :]
        if len(self._heap) == self.size:
            found = found[terms[found] > self._heap[0][0]]
        return found

    def add(self, token: TopToken) -> None:
        entry = (token.k3, token.sample_id, token.position, token)
        if len(self._heap) < self.size:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def merge(self, other: TopTokens) -> None:
        for *_, token in other._heap:
            self.add(token)

    def sorted(self) -> list[TopToken]:
        """The largest first."""
        return [entry[-1] for entry in sorted(self._heap, key=lambda e: e[:3], reverse=True)]
