"""The override: replace the answer of a router's top-k selection and nothing else.

A router's own code computes scores, normalises, scales and adds its bias. All of that stays. The one call that chooses
experts, `torch.topk(scores, K)` over [n, E], is answered with the recorded ids, and the values are gathered from the very
scores that the router selects from, so that the router keeps its gradient and the family keeps its formula (the "mask
only" rule of arXiv 2510.11370). No router code is copied.

`TopKOverride` is a TorchFunctionMode: it is active in one thread, inside one router's forward, and sees both
`torch.topk` and `Tensor.topk`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from r3.errors import ReplayError
from r3.replay import MicroBatch

_TOPK = (torch.topk, torch.Tensor.topk)


class TopKOverride(TorchFunctionMode):
    """Inside one forward of one router: answer its top-k with the recorded experts.

    Args:
        batch: The micro-batch being replayed.
        position: The layer's position on the layer axis of the routes.
        num_experts: E, the last dimension by which the selection is recognised.
        top_k: K.
    """

    def __init__(self, batch: MicroBatch, position: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.batch, self.position, self.num_experts, self.top_k = batch, position, num_experts, top_k
        self.answered = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _TOPK or not self._is_selection(*args, **kwargs):
            return func(*args, **kwargs)
        self.answered += 1
        scores: torch.Tensor = args[0] if args else kwargs["input"]
        ids = self.batch.ids_of(self.position)
        if self.batch.live is not None:
            own = func(*args, **kwargs).indices
            ids = torch.where(self.batch.live[:, None], own, ids)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _is_selection(self, input: torch.Tensor, k: Any = None, dim: int = -1, *_args: Any, **_kwargs: Any) -> bool:
        return input.dim() == 2 and input.shape[-1] == self.num_experts and k == self.top_k and dim in (-1, 1)

    def require_answered(self, layer: int) -> None:
        if self.answered != 1:
            raise ReplayError(
                "this router does not choose its experts by one top-k over [rows, experts]",
                where=f"layer {layer}",
                expected=f"1 call of topk over [n, {self.num_experts}] with k={self.top_k}",
                got=f"{self.answered} calls",
                remedy="this model family's router is not supported",
            )
