"""The override: replace the answer of a router's top-k selection and nothing else.

A router's own code computes scores, normalises, scales and adds its bias. All of that stays. The one call that chooses
experts, `torch.topk(scores, K)` over the E experts, is answered with the recorded ids, and the values are gathered from the
very scores that the router selects from, so that the router keeps its gradient and the family keeps its formula (the "mask
only" rule of arXiv 2510.11370). No router code is copied.

One thing is looked through. A group-limited router (DeepSeek-V2) fills the scores of all but its best groups with 0 or -inf
before it selects, and uses the values of that selection as gate weights. A recorded expert may lie outside the groups that the
trainer would choose; its weight is its score before the fill, which is what its formula gives in the rollout.

`SelectionWatch` is the same place for a rollout: the router's own choice is reported, and goes on as it was, to the bit.

Both are TorchFunctionModes: active in one thread, inside one router's forward, they see both
`torch.topk` and `Tensor.topk`. A selection of K experts is told from an earlier one over groups of them ([rows, groups,
experts of a group]) by its number of dimensions.

n rows, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from r3.errors import ReplayError
from r3.microbatch import Own

_TOPK = (torch.topk, torch.Tensor.topk)
_MASKED_FILL = (torch.masked_fill, torch.Tensor.masked_fill)


class Selection(NamedTuple):
    """By what a router's selection is recognised: topk over the last of `num_dims` dimensions, of E, with k=K."""

    num_experts: int
    top_k: int
    num_dims: int = 2

    def is_in(
        self, input: torch.Tensor, k: Any = None, dim: int = -1, largest: bool = True, *_: Any, **__: Any
    ) -> bool:
        return (
            input.dim() == self.num_dims
            and input.shape[-1] == self.num_experts
            and k == self.top_k
            and dim in (-1, self.num_dims - 1)
            and largest
        )


class SelectionMode(TorchFunctionMode):
    """Inside one forward of one router: answer its selection.

    Args:
        selection: Which call is answered.
        answer: From the router's own choice (a function, called for the rows where it is needed) and the shape [..., K] to
            the ids to use: `MicroBatch.choose` or `Recording.choose` of one layer.

    Attributes:
        answered: Calls answered so far.
    """

    def __init__(self, selection: Selection, answer: Callable[[Own, tuple[int, ...]], torch.Tensor]) -> None:
        super().__init__()
        self.selection, self.answer = selection, answer
        self.answered = 0
        self._filled: tuple[torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MASKED_FILL:
            filled = func(*args, **kwargs)
            self._filled = (filled, args[0] if args else kwargs["input"])
            return filled
        if func not in _TOPK or not self.selection.is_in(*args, **kwargs):
            return func(*args, **kwargs)
        self.answered += 1
        scores: torch.Tensor = args[0] if args else kwargs["input"]
        shape = (*scores.shape[:-1], self.selection.top_k)

        def own(rows: torch.Tensor | None = None) -> torch.Tensor:
            if rows is None:
                every: torch.Tensor = func(*args, **kwargs).indices
                return every
            some = scores.detach().reshape(-1, self.selection.num_experts).index_select(0, rows)
            order = kwargs.get("sorted", args[4] if len(args) > 4 else True)
            return torch.topk(some, self.selection.top_k, sorted=order).indices

        ids = self.answer(own, shape)
        if self._filled is not None and self._filled[0] is scores:
            scores = self._filled[1].reshape(scores.shape)
        return torch.return_types.topk((scores.gather(-1, ids), ids))


class SelectionWatch(TorchFunctionMode):
    """Inside one forward of one router: report what it selects, and change nothing.

    Args:
        selection: Which call is watched.
        report: Gets the ids of the router's choice, in the shape of the call [..., K].

    Attributes:
        answered: Calls seen so far.
    """

    def __init__(self, selection: Selection, report: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.selection, self.report = selection, report
        self.answered = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _TOPK and self.selection.is_in(*args, **kwargs):
            self.answered += 1
            self.report(result[1])
        return result


def require_one(answered: int, selection: Selection, where: str) -> None:
    """Raise unless a router's forward made its selection, once."""
    if answered != 1:
        raise ReplayError(
            "this router does not choose its experts by one top-k over its experts",
            where=where,
            expected=f"1 call of topk over [..., {selection.num_experts}] with k={selection.top_k}",
            got=f"{answered} calls",
            remedy="replay is not possible in this model's router: docs/families.md lists the families in which it is",
        )


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which torch.compile leaves alone."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call,no-any-return]


class Uncompiled:
    """Keeps torch.compile out of a router. Traced, a selection would be answered once for all micro-batches, and by a backend
    that runs torch functions a second time."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, module.__dict__.get("forward")
        self.ours = module.__dict__["forward"] = uncompiled(module.forward)

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is self.ours:
            del self.module.__dict__["forward"]
            if self.own is not None:
                self.module.__dict__["forward"] = self.own
