"""Find the routers of a transformers model by walking it, and prove on dummy input that each can be replayed.

Structure first: a sparse block is a module with a child `gate` or `router` and a child that holds the experts. Which
module of it makes the selection differs: the router itself (Mixtral and its kind in transformers 5), or the block around it
(DeepSeek-V3's `route_tokens_to_experts`; everything in transformers 4). Names cannot tell, so a skeleton of the block (the same
code, shared nothing, tiny expanded weights on the CPU, experts replaced by a trap) is run once on dummy rows. The probe sees

- which module is the innermost one around the selection: there the replay is bound;
- that there is one selection, and how many dimensions its scores have;
- that the experts are called with the very ids that the selection was answered with, every expert once;
- that their gate weights are neither 0 nor infinite, in whatever group of experts the ids lie.

So a family that selects otherwise is refused by name when it is attached, and not at its first forward. The real
parameters are never touched: sharded, quantized and meta ones are only asked for their shapes.

E experts, K top-k, H hidden size, n probe rows.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from r3.errors import ReplayError, first_line
from r3.spec import RoutingSpec
from r3.topk import Selection, SelectionMode, require_one

_GATES = ("gate", "router")
_EXPERTS = ("experts", "input_linear")  # Granite's experts are two grouped linears in the block itself


@dataclass(frozen=True)
class SparseBlock:
    """A MoE block of one decoder layer.

    Attributes:
        block: The module around router and experts; the decoder layer itself in a family without a block of its own.
        gate: Its router.
        experts: What the chosen ids go to.
        bare: Whether the block is the whole decoder layer.
    """

    block: nn.Module
    gate: nn.Module
    experts: nn.Module
    bare: bool


def find_routers(model: nn.Module, spec: RoutingSpec) -> dict[int, SparseBlock]:
    """The sparse block of each MoE layer, by global decoder-layer index, found by walking the model.

    Raises:
        ReplayError: no list of decoder layers, or a layer that does not route as the spec says.
    """
    blocks: dict[int, SparseBlock] = {}
    for index, layer in enumerate(_decoder_layers(model, spec)):
        found = list(_sparse_blocks(layer))
        routed = index in spec.moe_layers or index in spec.hash_layers
        if len(found) != int(routed):
            raise ReplayError(
                "a decoder layer does not route as the spec says",
                where=f"{_name(spec)}{type(layer).__name__}, layer {index}",
                expected="one router" if routed else "no router (a dense layer)",
                got=f"{len(found)} routers",
                remedy="replay is not possible in this model family (docs/families.md lists those in which it is), or the "
                "model and the spec are of different models",
            )
        if index in spec.moe_layers:
            blocks[index] = found[0]
    return blocks


def _sparse_blocks(layer: nn.Module) -> Iterator[SparseBlock]:
    for module in layer.modules():
        children = dict(module.named_children())
        gate = next((children[name] for name in _GATES if name in children), None)
        experts = next((children[name] for name in _EXPERTS if name in children), None)
        if gate is not None and experts is not None:
            yield SparseBlock(module, gate, experts, module is layer)


def _decoder_layers(model: nn.Module, spec: RoutingSpec) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    fitting = [m for m in lists if len(m) == spec.num_layers and any(any(_sparse_blocks(layer)) for layer in m)]
    if len(fitting) != 1:
        raise ReplayError(
            "cannot find this model's routers",
            where=f"{_name(spec)}{type(model).__name__}",
            expected=f"one list of {spec.num_layers} modules, some of which hold a router and experts",
            got=f"{len(fitting)} such lists among lists of {sorted({len(m) for m in lists})}",
            remedy="attach to the causal language model itself, whole; or this family's layers are not supported "
            "(docs/families.md)",
        )
    return fitting[0]


@dataclass(frozen=True)
class Binding:
    """Where to replay one layer, and where its choice can be seen.

    Attributes:
        module: The innermost module around its selection.
        selection: How the selection is recognised.
        output: Where in the module's output the selected ids are, as they were selected; None if they are not in it.
        received: Whether the experts get the selected ids [n, K] as an argument of one call.
    """

    module: nn.Module
    selection: Selection
    output: int | None = None
    received: bool = False


def probe(found: SparseBlock, spec: RoutingSpec, layer: int, hidden_size: int) -> Binding:
    """Run a skeleton of a sparse block on dummy rows and say where its selection is made.

    Raises:
        ReplayError: there is none, or more than one; or the experts do not get what it was answered with.
    """
    where = f"{_name(spec)}{type(found.block).__name__}, layer {layer}"
    stack: list[nn.Module] = []
    originals: dict[nn.Module, nn.Module] = {}
    outputs: dict[nn.Module, Any] = {}
    gate = _skeleton(found.gate, originals, stack, outputs)
    entry = gate if found.bare else _skeleton(found.block, originals, stack, outputs, gate=gate)
    num_rows = -(-spec.num_experts // spec.top_k)
    hidden = 0.5 + torch.rand(num_rows, hidden_size, generator=torch.Generator().manual_seed(0), device="cpu")
    ids = (torch.arange(num_rows * spec.top_k) % spec.num_experts).reshape(num_rows, spec.top_k)
    seen: list[tuple[nn.Module, int]] = []

    class Recorder(SelectionMode):
        """Counts selections of any number of dimensions, and answers those that could be of all rows."""

        def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            scores = args[0] if args else (kwargs or {}).get("input")
            if isinstance(scores, torch.Tensor):
                self.selection = Selection(spec.num_experts, spec.top_k, scores.dim())
            before = self.answered
            result = super().__torch_function__(func, kinds, args, kwargs)
            if self.answered > before:
                assert isinstance(scores, torch.Tensor)
                seen.append((originals[stack[-1]], scores.dim()))
            return result

    received: tuple[Any, ...] | None = None
    mode = Recorder(Selection(spec.num_experts, spec.top_k), lambda _own, shape: ids.reshape(shape))
    try:
        with torch.no_grad(), mode:
            output = entry(hidden if found.bare else hidden[None])
        received = output if found.bare and isinstance(output, tuple) else None
    except _Reached as reached:
        received = reached.arguments
    except Exception as error:  # foreign code on dummy weights fails in its own ways; each is a refusal, with its words
        raise ReplayError(
            f"this block's router could not be tried on dummy rows ({type(error).__name__}: {first_line(error)})",
            where=where,
            remedy="attach before the model is wrapped (FSDP1 flattens its weights) and without fused kernels for its MoE "
            "blocks; else this router is not supported",
        ) from error
    # An earlier selection over groups of experts has one dimension more: [rows, groups, experts of a group].
    last = [(module, num_dims) for module, num_dims in seen if num_dims == seen[-1][1]]
    selection = Selection(spec.num_experts, spec.top_k, seen[-1][1] if seen else 2)
    require_one(len(last), selection, where)
    if received is None:
        raise ReplayError(
            "the experts of this block cannot be watched: its forward does not call them",
            where=where,
            remedy="attach without fused kernels for its MoE blocks (docs/families.md)",
        )
    in_experts = _require_received(received, ids, spec, where)
    module = last[0][0]
    output = outputs.get(module)
    parts = output if isinstance(output, tuple) else (output,)
    shown = [index for index, part in enumerate(parts) if _are(part, ids)]
    return Binding(module, selection, shown[0] if shown else None, in_experts and not found.bare)


def _are(part: Any, ids: torch.Tensor) -> bool:
    if not isinstance(part, torch.Tensor) or part.is_floating_point() or part.shape[-1:] != ids.shape[1:]:
        return False
    return torch.equal(part.reshape(-1, ids.shape[1]).to(ids.dtype), ids)


def _require_received(received: tuple[Any, ...], ids: torch.Tensor, spec: RoutingSpec, where: str) -> bool:
    """Whether the experts get the selected ids as such; raise if they get others."""
    tensors = [value for value in received if isinstance(value, torch.Tensor)]
    given = [t for t in tensors if not t.is_floating_point() and t.shape[-1:] == (spec.top_k,)]
    if given and not any(_are(t, ids) for t in given):
        raise ReplayError(
            "the experts of this block are not those that its router's top-k was answered with",
            where=where,
            remedy="this router changes its choice after the top-k: replay is not possible in it (docs/families.md)",
        )
    for value in tensors if given else ():
        weights = value.reshape(-1, value.shape[-1]) if value.is_floating_point() and value.dim() else None
        if (
            weights is None
            or weights.shape[0] != ids.shape[0]
            or weights.shape[1] not in (spec.top_k, spec.num_experts)
        ):
            continue
        weights = weights if weights.shape[1] == spec.top_k else weights.gather(1, ids)
        if not bool((weights.isfinite() & (weights != 0)).all()):
            raise ReplayError(
                "this router masks scores before its top-k in a way that r3 cannot look through: experts outside the "
                "trainer's own choice would get the gate weight 0",
                where=where,
                remedy="replay is not possible in this router (docs/families.md)",
            )
    return bool(given)


class _Reached(Exception):
    """The probe has come to the experts."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.arguments = arguments


class _Trap(nn.Module):
    """Stands in for the experts: ends the probe with what they are called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Reached((*args, *kwargs.values()))


class _Pass(nn.Module):
    """Stands in for what a block computes beside its routing, such as shared experts."""

    def forward(self, hidden: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return hidden


def _skeleton(
    module: nn.Module,
    originals: dict[nn.Module, nn.Module],
    stack: list[nn.Module],
    outputs: dict[nn.Module, Any],
    *,
    gate: nn.Module | None = None,
) -> nn.Module:
    """The same code on dummy weights, without hooks; given its `gate`, a block whose other children are stand-ins.

    `originals` maps each clone to its module; while a clone's forward runs, it stands on `stack`; what it returns is in
    `outputs`, by its module.
    """
    clone: nn.Module = object.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    clone.__dict__.update({name: type(value)() for name, value in vars(nn.Module()).items() if isinstance(value, dict)})
    clone.__dict__.pop("_compiled_call_impl", None)
    own = vars(module).get("_old_forward", vars(module).get("forward"))  # the first is under a hook of accelerate
    if isinstance(own, types.MethodType) and own.__self__ is module:
        clone.__dict__["forward"] = types.MethodType(own.__func__, clone)
    clone.training = False  # noise in training would be drawn from the user's random generator
    originals[clone] = module
    for name, parameter in module._parameters.items():
        clone._parameters[name] = None if parameter is None else nn.Parameter(_dummy(parameter), requires_grad=False)
    for name, buffer in module._buffers.items():
        clone._buffers[name] = None if buffer is None else _dummy(buffer)
    for name, child in module._modules.items():
        if gate is None or child is None:
            clone._modules[name] = None if child is None else _skeleton(child, originals, stack, outputs)
        elif child is originals[gate]:
            clone._modules[name] = gate
        elif name in _EXPERTS:
            traps = nn.ModuleList(_Trap() for _ in child) if isinstance(child, nn.ModuleList) else _Trap()
            clone._modules[name] = traps
        else:
            clone._modules[name] = _Pass()
    clone.register_forward_pre_hook(lambda itself, _args: stack.append(itself))
    clone.register_forward_hook(lambda _m, _a, output: _leave(stack, originals, outputs, output), always_call=True)
    return clone


def _leave(
    stack: list[nn.Module], originals: dict[nn.Module, nn.Module], outputs: dict[nn.Module, Any], output: Any
) -> None:
    outputs[originals[stack.pop()]] = output


def _dummy(tensor: torch.Tensor) -> torch.Tensor:
    """Small values that differ along the first dimension (the experts, in a router's weights) and cost no memory."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    if tensor.dim() == 0:
        return torch.ones((), device="cpu")
    first = 0.5 + torch.rand(tensor.shape[0], generator=torch.Generator().manual_seed(1), device="cpu")
    return (first / tensor.shape[-1]).reshape(-1, *(1 for _ in tensor.shape[1:])).expand(tensor.shape)


def _name(spec: RoutingSpec) -> str:
    return f"{spec.model_type}: " if spec.model_type else ""
