"""Replay in transformers models, in any loop that calls the model: plain, FSDP, DDP, accelerate.

    replay = attach(model)                                          # finds the routers; spec from model.config
    with replay.micro_batch(samples, Layout.from_attention_mask(mask, lengths), input_ids):
        logits = model(input_ids, attention_mask=mask).logits       # routers use the recorded experts
    loss.backward()                                                 # recompute under checkpointing included
    detach(model)

Scope: families whose decoder layer holds a sparse block with children `experts` and a router `gate` or `router` that ends
in one top-k over [rows, experts] (Qwen3-MoE and its kind, transformers 5). Others are refused at attach, by name.

`observe` watches the ids that the *experts* receive, behind the override and independent of it: that is how the
diagnostic proves that what was replayed is what was recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from r3.errors import ReplayError
from r3.layout import Layout
from r3.replay import Replay
from r3.sample import RolloutSample
from r3.spec import RoutingSpec
from r3.trainers.topk import TopKOverride

_HANDLES = "_r3_hooks"


def attach(model: nn.Module, spec: RoutingSpec | None = None, *, on_missing: str = "live") -> Replay:
    """Bind every router of a transformers model to a new Replay handle.

    Args:
        model: The module that the loop calls (FSDP- or DDP-wrapped is fine).
        spec: The rollout model's routing; from `model.config` if None.
        on_missing: `live` or `raise`, for rows without a record.

    Raises:
        SpecError: the model's config does not tell its routing, or is not the spec's.
        ReplayError: a layer of the spec has no router that can be bound, or the model is attached already.
    """
    if hasattr(model, _HANDLES):
        raise ReplayError("this model has a replay attached already", remedy="detach(model) first")
    own = RoutingSpec.from_config(_config(model))
    spec = own if spec is None else spec
    spec.require_same(own, "the trainer's model")
    routers = find_routers(model, spec)
    device = next(iter(routers.values())).router.weight.device
    replay = Replay(spec, list(routers), torch.device(device), on_missing=on_missing)
    handles = [
        model.register_forward_pre_hook(lambda *_: replay.begin_forward()),
        model.register_forward_hook(lambda _module, _args, outputs: replay.end_forward(outputs)),
    ]
    for layer, found in routers.items():
        handles += _bind(found.router, replay, layer)
    setattr(model, _HANDLES, handles)
    return replay


def detach(model: nn.Module) -> None:
    """Leave the model as it was before `attach`."""
    for handle in model.__dict__.pop(_HANDLES, ()):
        handle.remove()


class SparseBlock(NamedTuple):
    """A MoE block of one decoder layer: its router, and the module that the chosen ids go to."""

    router: Any
    experts: Any


def find_routers(model: nn.Module, spec: RoutingSpec) -> dict[int, SparseBlock]:
    """The sparse block of each MoE layer, by global decoder-layer index, found by walking the model.

    Raises:
        ReplayError: no list of decoder layers, or a layer that does not route as the spec says.
    """
    blocks: dict[int, SparseBlock] = {}
    for index, layer in enumerate(_decoder_layers(model, spec)):
        found = [
            SparseBlock(router, module.experts)
            for module in layer.modules()
            if isinstance(getattr(module, "experts", None), nn.Module)
            for router in [getattr(module, "gate", None) or getattr(module, "router", None)]
            if isinstance(router, nn.Module) and isinstance(getattr(router, "weight", None), torch.Tensor)
        ]
        if len(found) != int(index in spec.moe_layers):
            raise ReplayError(
                "a decoder layer does not route as the spec says",
                where=f"{type(layer).__name__}, layer {index}",
                expected="one router" if index in spec.moe_layers else "no router (a dense layer)",
                got=f"{len(found)} routers",
                remedy="this model family's layers are not supported, or the model and the spec are of different models",
            )
        if found:
            blocks[index] = found[0]
    return blocks


def _config(model: nn.Module) -> Any:
    for module in model.modules():
        if hasattr(module, "config"):
            return module.config
    raise ReplayError("this is not a transformers model: it has no config", where=type(model).__name__)


def _decoder_layers(model: nn.Module, spec: RoutingSpec) -> nn.ModuleList:
    lists = [
        m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and name.rpartition(".")[2] == "layers"
    ]
    fitting = [m for m in lists if len(m) == spec.num_layers]
    if len(fitting) != 1:
        raise ReplayError(
            "cannot tell which modules are the decoder layers",
            where=type(model).__name__,
            expected=f"one ModuleList `layers` of {spec.num_layers} modules",
            got=[len(m) for m in lists],
            remedy="attach to the causal language model itself, whole",
        )
    return fitting[0]


def _bind(router: Any, replay: Replay, layer: int) -> list[Any]:
    position = replay.position_of(layer)
    num_experts, top_k = replay.spec.num_experts, replay.spec.top_k
    active: list[TopKOverride] = []

    def enter(_module: nn.Module, args: tuple[Any, ...]) -> None:
        hidden: torch.Tensor = args[0]
        batch = replay.rows_for(layer, hidden.numel() // hidden.shape[-1])
        if batch is not None:
            override = TopKOverride(batch, position, num_experts, top_k)
            override.__enter__()  # type: ignore[no-untyped-call]
            active.append(override)

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if active:
            override = active.pop()
            override.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if output is not None:  # None when the router itself raised: its own error is the one to show
                override.require_answered(layer)

    return [
        router.register_forward_pre_hook(enter),
        router.register_forward_hook(leave, always_call=True),
    ]


@contextlib.contextmanager
def observe(model: nn.Module, spec: RoutingSpec) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the ids that each layer's experts receive: {layer: [n, K]}, overwritten by each forward.

    Raises:
        ReplayError: experts that are not called with an integer tensor [n, K].
    """
    seen: dict[int, torch.Tensor] = {}

    def watch(layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = [
                value
                for value in (*args, *kwargs.values())
                if isinstance(value, torch.Tensor)
                and not value.is_floating_point()
                and value.shape[-1:] == (spec.top_k,)
            ]
            if len(ids) != 1:
                raise ReplayError(
                    "cannot see which experts are used",
                    where=f"layer {layer}: {type(module).__name__}",
                    expected=f"one integer argument [n, {spec.top_k}]",
                    got=f"{len(ids)} such arguments",
                )
            seen[layer] = ids[0].detach().reshape(-1, spec.top_k)

        return hook

    handles = [
        block.experts.register_forward_pre_hook(watch(layer), with_kwargs=True)
        for layer, block in find_routers(model, spec).items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def right_padded(samples: Sequence[RolloutSample], pad_id: int = 0) -> tuple[Layout, torch.Tensor, torch.Tensor]:
    """(layout, input_ids, attention_mask), both [batch, longest] int64: the simplest micro-batch of some samples."""
    layout = Layout.padded([sample.num_tokens for sample in samples])
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    shape = (len(samples), layout.num_positions // len(samples))
    input_ids = torch.from_numpy(layout.gather(tokens, fill=pad_id)).reshape(shape)
    return layout, input_ids, torch.from_numpy((layout.rows >= 0).astype(np.int64)).reshape(shape)


def token_logprobs(logits: torch.Tensor, input_ids: torch.Tensor, *, chunk: int = 1024) -> npt.NDArray[np.float32]:
    """log p(token t | tokens before t) [batch, width] float32, NaN at position 0, from logits [batch, width, vocabulary].

    The softmax runs in float32 over `chunk` positions at a time: a vocabulary of 150,000 is 0.6 GB for 1,024 of them.
    """
    batch, width, vocabulary = logits.shape
    flat, targets = logits[:, :-1].reshape(-1, vocabulary), input_ids[:, 1:].reshape(-1, 1)
    parts = [
        flat[i : i + chunk].float().log_softmax(-1).gather(-1, targets[i : i + chunk]).squeeze(-1)
        for i in range(0, flat.shape[0], chunk)
    ]
    out = torch.full((batch, width), float("nan"), dtype=torch.float32)
    if parts:
        out[:, 1:] = torch.cat(parts).reshape(batch, width - 1).cpu()
    return out.numpy()
