"""Where routed experts are captured: a structural protocol, and an adapter that gives it to transformers routers.

`CaptureSource` is anything with a `layer_id` and a settable `capture_fn`. An engine author writes one line into a layer,
after the selection and before any map to physical experts (EPLB):

    if self.capture_fn is not None:
        self.capture_fn(topk_ids)          # [rows, K], logical ids

Routers of transformers have no such line. `transformers_sources` finds them as replay does (`r3.routers`: by structure,
proved on dummy rows, no family named) and hooks each where its ids can be had at the least cost:

- `output`: the router returns the selected ids: one forward hook (21 of 40 families in transformers 5.10);
- `argument`: the experts are called with them: one pre-hook (15);
- `selection`: neither (4), or experts are placed by hooks of their own: the top-k call itself is watched inside the router's
  forward (`r3.topk.SelectionWatch`), which sees logical ids whatever comes after. Slower: every torch call of that
  module passes through the watch.

All three see the same ids, and leave the numbers as they are, to the bit. tests/test_capture_binding.py compares them.

n rows, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from r3.errors import CaptureError, ReplayError
from r3.routers import Binding as Place
from r3.routers import SparseBlock, find_routers, probe
from r3.spec import RoutingSpec
from r3.topk import SelectionWatch, Uncompiled, uncompiled

CaptureFn = Callable[[torch.Tensor], None]


@runtime_checkable
class CaptureSource(Protocol):
    """One MoE layer that reports what it selects.

    Attributes:
        layer_id: Global decoder-layer index, dense layers counted.
        capture_fn: None, or what the layer calls with topk_ids [rows, K], logical ids, once in each of its forwards.
    """

    layer_id: int
    capture_fn: CaptureFn | None


class TransformersSource:
    """One router of a transformers model as a `CaptureSource`. Hooks stand in the model from `install` to `remove`."""

    def __init__(self, layer_id: int, found: SparseBlock, place: Place, way: str) -> None:
        self.layer_id, self.found, self.place, self.way = layer_id, found, place, way
        self.capture_fn: CaptureFn | None = None
        self._handles: list[Any] = []
        self._watches: list[SelectionWatch] = []

    def install(self) -> None:
        if self.way == "output":
            # Prepended: a hook that maps ids to this rank's experts (expert parallelism) must come later.
            self._handles = [self.place.module.register_forward_hook(uncompiled(self._from_output), prepend=True)]
        elif self.way == "argument":
            hook = uncompiled(self._from_arguments)
            self._handles = [self.found.experts.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)]
        else:
            module = self.place.module
            self._handles = [
                Uncompiled(module),
                module.register_forward_pre_hook(uncompiled(self._enter)),
                module.register_forward_hook(uncompiled(self._leave), always_call=True),
            ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _from_output(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self.capture_fn is not None:
            self._report(output[self.place.output or 0] if isinstance(output, tuple) else output)

    def _from_arguments(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.capture_fn is None:
            return
        top_k = self.place.selection.top_k
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.shape[-1] == top_k:
                self._report(value)
                return
        raise CaptureError(
            "the experts were called without the ids that they were called with when they were bound",
            where=f"{type(module).__name__}, layer {self.layer_id}",
            expected=f"an integer argument [n, {top_k}]",
            remedy="bind after the model's experts implementation is chosen, not before",
        )

    def _enter(self, *_: Any) -> None:
        if self.capture_fn is not None:
            watch = SelectionWatch(self.place.selection, self._report)
            watch.__enter__()  # type: ignore[no-untyped-call]
            self._watches.append(watch)

    def _leave(self, *_: Any) -> None:
        if self._watches:
            self._watches.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _report(self, ids: torch.Tensor) -> None:
        if self.capture_fn is not None:
            self.capture_fn(ids if ids.dim() == 2 else ids.reshape(-1, ids.shape[-1]))


WAYS = ("output", "argument", "selection")


def transformers_sources(model: nn.Module, spec: RoutingSpec, way: str | None = None) -> list[TransformersSource]:
    """A source for every MoE layer of a transformers model, not installed yet.

    Args:
        model: The whole causal language model.
        spec: Its routing.
        way: One of `WAYS` for all layers; the cheapest that each layer has if None.

    Raises:
        CaptureError: a layer of the spec has no router, or one whose choice cannot be seen (in this way); it is named.
    """
    hidden_size = _hidden_size(model)
    try:
        blocks = find_routers(model, spec)
        places = {layer: probe(found, spec, layer, hidden_size) for layer, found in blocks.items()}
    except ReplayError as error:
        raise CaptureError(
            error.what,
            where=error.where,
            expected=error.expected,
            got=error.got,
            remedy="give the layer a `layer_id` and a `capture_fn` that it calls with its ids (docs/capture.md), or use a "
            "model family that docs/families.md lists",
        ) from error
    placed = _experts_are_placed(model)
    for layer, place in places.items():
        if way is not None and way not in _ways_of(place):
            raise CaptureError(
                "this layer's ids cannot be seen in this way",
                where=f"{type(place.module).__name__}, layer {layer}",
                expected=f"one of {', '.join(_ways_of(place))}",
                got=way,
            )
    return [TransformersSource(layer, blocks[layer], at, way or _cheapest(at, placed)) for layer, at in places.items()]


def _ways_of(place: Place) -> list[str]:
    there = (place.output is not None, place.received, True)
    return [way for way, fits in zip(WAYS, there, strict=True) if fits]


def _cheapest(place: Place, placed: bool) -> str:
    return "selection" if placed else _ways_of(place)[0]


def _experts_are_placed(model: nn.Module) -> bool:
    """Whether transformers spreads the experts over ranks: what they are called with are then this rank's ids."""
    config = getattr(model, "config", None)
    return bool(getattr(getattr(config, "distributed_config", None), "enable_expert_parallel", False))


def _hidden_size(model: nn.Module) -> int:
    config = next((module.config for module in model.modules() if hasattr(module, "config")), None)
    get = getattr(config, "get_text_config", None)
    size = getattr(get(decoder=True) if callable(get) else config, "hidden_size", None)
    if size is None:
        raise CaptureError(
            "this model has no capture source, and is no transformers model either",
            where=type(model).__name__,
            expected="modules with `layer_id` and `capture_fn`, or a config with hidden_size",
            remedy="give each MoE layer a `layer_id` and a `capture_fn` that it calls with its ids (docs/capture.md)",
        )
    return int(size)
