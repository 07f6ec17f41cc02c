"""bind: connect a model's MoE layers to a capturer, all of them or none.

What is bound is found by walking the model, without importing any engine:

1. a module with `layer_id` and `capture_fn` is a `CaptureSource` itself;
2. a module with `layer_id` and a `router` (vLLM's MoE runner) is captured in its router, if that can be given a callback;
3. either of them, if it says `is_monolithic`, selects inside its kernel: there is nothing to capture before it. It is bound
   only if the kernel says `supports_routing_replay_capture()`, in the kernel's own replay output;
4. if there is none of these, the model is a transformers one: `transformers_sources`.

Draft and multi-token-prediction modules (by their names: mtp, draft, eagle, ...) are left alone: they propose tokens, the
target model routes them. Everything else that cannot be bound is refused, by name, before anything is changed.

Off costs one None check per layer and forward (`pause`), unbound costs nothing: no hook, no attribute stays behind.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from r3.errors import CaptureError
from r3.rollout.capture.capturer import RoutingCapturer
from r3.rollout.capture.sources import CaptureFn, CaptureSource, transformers_sources
from r3.spec import RoutingSpec

_DRAFT = re.compile(r"(^|_)(mtp|nextn|draft|drafter|eagle|medusa|speculator)\d*(_|$)")
_BOUND = "_r3_capture"

SetFn = Callable[[CaptureFn | None], None]


class Binding:
    """A model whose MoE layers report to a capturer, until `unbind()` or the end of a `with`.

    Attributes:
        layers: The bound layers, ascending: those of the spec.
        skipped: Names of draft modules that were left alone.
    """

    def __init__(
        self,
        model: nn.Module,
        setters: dict[int, SetFn],
        capturer: RoutingCapturer,
        skipped: Sequence[str],
        undo: Sequence[Callable[[], None]],
    ) -> None:
        self.layers, self.skipped = tuple(sorted(setters)), tuple(skipped)
        self._model, self._setters, self._capturer, self._undo = model, setters, capturer, undo
        setattr(model, _BOUND, True)

    def pause(self) -> None:
        """Off: each layer checks for None and does nothing else."""
        for set_fn in self._setters.values():
            set_fn(None)

    def resume(self) -> None:
        """On again."""
        for layer, set_fn in self._setters.items():
            set_fn(functools.partial(self._capturer.capture, layer))

    def unbind(self) -> None:
        """Leave the model as it was before `bind`. More than once is the same."""
        if self._model.__dict__.pop(_BOUND, False):
            self.pause()
            for restore in self._undo:
                restore()

    def __enter__(self) -> Binding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unbind()


def bind(
    model: nn.Module, capturer: RoutingCapturer, *, spec: RoutingSpec | None = None, way: str | None = None
) -> Binding:
    """Give every MoE layer of a model the capturer's callback.

    Args:
        model: The target model, whole.
        capturer: Gets (layer_id, topk_ids) of every layer's forward.
        spec: The model's routing, which must be the capturer's; the capturer's if None.
        way: For transformers models: how their ids are seen (`r3.rollout.capture.sources.WAYS`).

    Raises:
        SpecError: the spec is not the capturer's.
        CaptureError: nothing to bind; a layer of the spec that is absent, or there twice; one that is not in the spec; a
            router or a monolithic kernel that cannot be captured; a model that is bound already. Nothing is bound then.
    """
    spec = capturer.spec if spec is None else spec
    spec.require_same(capturer.spec, "the capturer")
    if hasattr(model, _BOUND):
        raise CaptureError("this model is bound already", remedy="unbind() the binding that it has")
    skipped: list[str] = []
    found: list[tuple[str, int, SetFn, Callable[[], None]]] = list(_structural(model, spec, skipped))
    if found:
        setters = _one_for_each_layer(found, spec, type(model).__name__)
        undo: list[Callable[[], None]] = [restore for *_, restore in found]
    else:
        sources = transformers_sources(model, spec, way)
        for source in sources:
            source.install()
        setters = {source.layer_id: functools.partial(setattr, source, "capture_fn") for source in sources}
        undo = [source.remove for source in sources]
    binding = Binding(model, setters, capturer, skipped, undo)
    try:
        binding.resume()
    except BaseException:
        binding.unbind()
        raise
    return binding


def _structural(
    model: nn.Module, spec: RoutingSpec, skipped: list[str]
) -> Iterator[tuple[str, int, SetFn, Callable[[], None]]]:
    """(name, layer, setter of the callback, restorer) of every source in a model, each checked, none changed."""
    drafts: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(drafts) if drafts else False:
            continue
        if name and _DRAFT.search(name.rpartition(".")[2].lower()):
            drafts += (f"{name}.",)
            skipped.append(name)
            continue
        target = _target(module, name)
        if target is not None and module.layer_id not in spec.hash_layers:
            yield name, int(module.layer_id), *_setter(target, name)


def _target(module: Any, name: str) -> Any:
    """The object that gets the callback of a layer; None if the module is no MoE layer."""
    itself = isinstance(module, CaptureSource)
    if not itself and not (isinstance(getattr(module, "layer_id", None), int) and hasattr(module, "router")):
        return None
    if _true(module, "is_monolithic"):
        kernel = _kernel(module)
        if _true(kernel, "supports_routing_replay_capture"):
            return kernel
        raise CaptureError(
            f"the kernel {type(kernel).__name__} selects experts inside and does not hand them out",
            where=f"{name} ({type(module).__name__}), layer {module.layer_id}",
            expected="a kernel whose supports_routing_replay_capture() is True",
            remedy="choose a modular MoE backend for rollouts that are recorded; a monolithic one would return rows of zeros",
        )
    return module if itself else module.router


def _kernel(module: Any) -> Any:
    """Where a monolithic layer keeps its kernel: itself, `fused_experts`, or vLLM's path to that."""
    if hasattr(module, "supports_routing_replay_capture"):
        return module
    method = getattr(module, "_quant_method", getattr(module, "quant_method", None))
    inner = getattr(getattr(method, "moe_kernel", None), "impl", None)
    return getattr(module, "fused_experts", None) or getattr(inner, "fused_experts", None) or module


def _true(owner: Any, name: str) -> bool:
    value = getattr(owner, name, False)
    return (value() if callable(value) else value) is True


def _setter(target: Any, name: str) -> tuple[SetFn, Callable[[], None]]:
    """How a target is given a callback, and what leaves it as it was."""
    held = getattr(target, "capture_fn", getattr(target, "routing_replay_capture_fn", None))
    if held is not None:
        raise CaptureError(
            "this layer has a callback already",
            where=f"{name} ({type(target).__name__})",
            remedy="unbind what captures in it; two capturers of one layer are not kept",
        )
    set_fn = getattr(target, "set_capture_fn", None)
    if callable(set_fn):
        return set_fn, lambda: None
    if not hasattr(target, "capture_fn"):
        raise CaptureError(
            f"the router {type(target).__name__} cannot be captured",
            where=name,
            expected="a router with set_capture_fn, or with capture_fn",
            remedy="give it a capture_fn that it calls with its logical ids (docs/capture.md)",
        )
    # A class attribute `capture_fn = None` is hidden by an instance's own, which must go again; a slot or property is not.
    if "capture_fn" in getattr(target, "__dict__", {}) or hasattr(getattr(type(target), "capture_fn", None), "__set__"):
        return functools.partial(setattr, target, "capture_fn"), lambda: None
    return functools.partial(setattr, target, "capture_fn"), functools.partial(delattr, target, "capture_fn")


def _one_for_each_layer(
    found: Sequence[tuple[str, int, SetFn, Callable[[], None]]], spec: RoutingSpec, model: str
) -> dict[int, SetFn]:
    names: dict[int, str] = {}
    for name, layer, _, _ in found:
        if layer in names:
            raise CaptureError(
                "two modules say that they are the same layer",
                where=f"{model}, layer {layer}",
                got=f"{names[layer]} and {name}",
                remedy="layer_id is the global decoder-layer index; a draft module's name must say what it is",
            )
        if layer not in spec.moe_layers:
            raise CaptureError(
                "a module captures for a layer that does not route by the spec",
                where=f"{model}, {name}",
                expected=f"one of {list(spec.moe_layers)}",
                got=f"layer {layer}",
                remedy="the spec is another model's, layer_id counts MoE layers only, or this is a draft module whose name does "
                "not say so",
            )
        names[layer] = name
    missing = [layer for layer in spec.moe_layers if layer not in names]
    if missing:
        raise CaptureError(
            f"{len(missing)} of {spec.num_moe_layers} MoE layers have no capture source",
            where=f"{model}, layers {missing}",
            got=f"sources of layers {sorted(names)}",
            remedy="every MoE layer needs a `layer_id` and a `capture_fn`; of a pipeline stage, bind with a spec of its layers",
        )
    return {layer: set_fn for _, layer, set_fn, _ in found}


def require_all_ranks(binding: Binding | None, group: Any = None) -> None:
    """Raise, on every rank of a group alike, unless each of them has bound the same layers. A collective.

    A rank without a capturer would leave the others waiting in the first sharded snapshot. Call it once, after `bind`.

    Args:
        binding: This rank's, or None where there is none.
        group: Process group; the default one if None.

    Raises:
        CaptureError: the ranks differ; each is listed.
    """
    own = None if binding is None else binding.layers
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, own, group=group)
    if own is None or any(layers != every[0] for layers in every):
        raise CaptureError(
            "the ranks of this group do not capture alike",
            expected="the same layers bound on every rank",
            got=", ".join(
                f"rank {rank}: {'nothing' if layers is None else f'{len(layers)} layers'}"
                for rank, layers in enumerate(every)
            ),
            remedy="bind(model, capturer) on every rank, whether or not it returns routes",
        )
