"""Watch the ids that the *experts* receive, behind the override and independent of it.

That is how the diagnostic proves that what was replayed is what was recorded, so nothing here looks at a router or at the
override. Families hand their choice to their experts in four ways, each watched where the experts are:

- one call with an integer tensor [n, K] (most families): its argument;
- a list of expert modules, each called with its rows (transformers 4), whose outputs are added to a result: the module that
  ran, and the rows of the `index_add` that follows;
- grouped linears called with the rows sorted by expert and the number of rows of each (Granite): the same `index_add`, split
  by those numbers;
- every expert called with all rows, the unchosen ones multiplied by 0 (Llama 4): the rows that are not 0.

The last three do not keep the order of a token's K choices; there the ids are ascending. A zero-computation expert is seen by
its own id. Ways that are none of these are refused by name.

n rows, K top-k, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from r3.errors import ReplayError
from r3.routers import SparseBlock, find_routers
from r3.spec import RoutingSpec

_INDEX_ADD = (torch.index_add, torch.Tensor.index_add, torch.Tensor.index_add_)


@contextlib.contextmanager
def observe(model: nn.Module, spec: RoutingSpec) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the ids that each layer's experts receive: {layer: [n, K]}, overwritten by each forward.

    Raises:
        ReplayError: experts that are called in a way that does not show the ids.
    """
    seen: dict[int, torch.Tensor] = {}
    handles: list[Any] = []
    for layer, found in find_routers(model, spec).items():
        watch = _Watch(layer, found, spec, seen)
        handles += watch.by_rows() if _called_by_rows(found) else watch.by_arguments()
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _called_by_rows(found: SparseBlock) -> bool:
    # A list is never called itself: its modules are. Granite's grouped linear is called, with sizes and without ids.
    return isinstance(found.experts, nn.ModuleList) or "output_linear" in dict(found.block.named_children())


class _Watch:
    """The hooks of one layer."""

    def __init__(self, layer: int, found: SparseBlock, spec: RoutingSpec, seen: dict[int, torch.Tensor]) -> None:
        self.layer, self.found, self.spec, self.seen = layer, found, spec, seen

    def by_arguments(self) -> list[Any]:
        return [self.found.experts.register_forward_pre_hook(self._arguments, with_kwargs=True)]

    def _arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        top_k = self.spec.top_k
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        ids = [t for t in tensors if not t.is_floating_point() and t.shape[-1:] == (top_k,)]
        if len(ids) == 1:
            self.seen[self.layer] = ids[0].detach().reshape(-1, top_k)
        elif len(tensors) == 1 and tensors[0].is_floating_point():
            hidden = tensors[0].detach().reshape(self.spec.num_experts, -1, tensors[0].shape[-1])
            self.seen[self.layer] = self._complete((hidden != 0).any(-1).T.nonzero())
        else:
            self._refuse(
                f"{type(module).__name__} called with {_shapes(tensors)}", f"one integer argument [n, {top_k}]"
            )

    def by_rows(self) -> list[Any]:
        """An expert that runs says which it is; the rows of the next `index_add` in the block are its tokens."""
        running: list[int] = []  # the expert of each row that is about to be added
        pairs: list[torch.Tensor] = []  # [rows, 2] of (token, expert)
        modes: list[_IndexAdd] = []

        def add(tokens: torch.Tensor) -> None:
            experts = torch.tensor(running, device=tokens.device)
            if experts.shape != tokens.shape:
                self._refuse(f"{tuple(tokens.shape)} rows added for {len(running)} of experts", "the same number")
            pairs.append(torch.stack([tokens, experts], dim=1))
            running.clear()

        def one(number: int) -> Callable[..., None]:
            return lambda _module, args: running.extend([number] * args[0].reshape(-1, args[0].shape[-1]).shape[0])

        def grouped(_module: nn.Module, args: tuple[Any, ...]) -> None:
            running.extend(number for number, size in enumerate(args[1]) for _ in range(int(size)))

        def enter(*_: Any) -> None:
            running.clear()
            pairs.clear()
            mode = _IndexAdd(add)
            mode.__enter__()  # type: ignore[no-untyped-call]
            modes.append(mode)

        def leave(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if output is not None:
                if running or (not pairs and args[0].numel()):
                    self._refuse(f"{len(running)} rows of experts that are added in another way", "index_add")
                self.seen[self.layer] = self._complete(torch.cat(pairs) if pairs else torch.zeros(0, 2))

        experts = self.found.experts
        hooks = (
            [expert.register_forward_pre_hook(one(number)) for number, expert in enumerate(experts)]
            if isinstance(experts, nn.ModuleList)
            else [experts.register_forward_pre_hook(grouped)]
        )
        return [
            *hooks,
            self.found.block.register_forward_pre_hook(enter),
            self.found.block.register_forward_hook(leave, always_call=True),
        ]

    def _complete(self, pairs: torch.Tensor) -> torch.Tensor:
        """[n, K] ascending from [n * K, 2] of (token, expert), in any order."""
        tokens, experts = pairs.long().unbind(1)
        order = (tokens * self.spec.num_experts + experts).argsort()
        tokens = tokens[order].reshape(-1, self.spec.top_k) if len(order) % self.spec.top_k == 0 else tokens[:0]
        if len(tokens) * self.spec.top_k != len(order) or bool((tokens != tokens[:, :1]).any()):
            self._refuse("some with another number", f"{self.spec.top_k} experts for each token")
        return experts[order].reshape(-1, self.spec.top_k)

    def _refuse(self, got: str, expected: str) -> None:
        raise ReplayError(
            "cannot see which experts are used",
            where=f"{self.spec.model_type or type(self.found.block).__name__}, layer {self.layer}",
            expected=expected,
            got=got,
            remedy="the diagnostic cannot prove a replay in this model family (docs/families.md)",
        )


class _IndexAdd(TorchFunctionMode):
    """Reports the rows of every `index_add` along dimension 0."""

    def __init__(self, report: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INDEX_ADD and (args[1] if len(args) > 1 else kwargs["dim"]) == 0:
            self.report((args[2] if len(args) > 2 else kwargs["index"]).detach())
        return func(*args, **kwargs)


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in tensors) or "no tensor"
