"""Replay in transformers models, in any loop that calls the model: plain, FSDP, DDP, accelerate.

    replay = attach(model)                                          # finds the routers; spec from model.config
    with replay.micro_batch(samples, Layout.from_attention_mask(mask, lengths), input_ids):
        logits = model(input_ids, attention_mask=mask).logits       # routers use the recorded experts
    loss.backward()                                                 # recompute under checkpointing included
    detach(model)

Scope: every family whose router chooses by one top-k over its experts, wherever that call is made; docs/families.md lists
them, made by the tests. Others are refused at attach, by name (`r3.routers`). No family has code of its own here.

`observe` (`r3.trainers.observe`) watches the ids that the *experts* receive, behind the override and independent of it: that is
how the diagnostic proves that what was replayed is what was recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from r3.agreement import MIN_AGREEMENT
from r3.errors import ReplayError
from r3.families import FAMILIES
from r3.layout import Layout
from r3.partial import Replayable
from r3.replay import Replay
from r3.routers import Binding, SparseBlock, find_routers, probe
from r3.spec import RoutingSpec, family_of
from r3.topk import SelectionMode, Uncompiled, require_one, uncompiled
from r3.trainers.observe import observe as observe

_HANDLES = "_r3_hooks"


def attach(
    model: nn.Module,
    spec: RoutingSpec | None = None,
    *,
    on_missing: str = "live",
    min_agreement: float = MIN_AGREEMENT,
) -> Replay:
    """Bind every router of a transformers model to a new Replay handle.

    Args:
        model: The module that the loop calls (FSDP- or DDP-wrapped is fine).
        spec: The rollout model's routing; from `model.config` if None. Where the config's family is known, it must be the
            config's too; where it is not (a model of remote code), the model's own layers and routers must fit it.
        on_missing: `live` or `raise`, for rows without a record.
        min_agreement: The least share of recorded experts that the routers would choose themselves (`r3.agreement`).

    Raises:
        SpecError: the model's config does not tell its routing, or is not the spec's.
        ReplayError: a layer of the spec has no router that can be bound, or the model is attached already.
    """
    if hasattr(model, _HANDLES):
        raise ReplayError("this model has a replay attached already", remedy="detach(model) first")
    config = _config(model)
    if spec is None or family_of(config) in FAMILIES:
        own = RoutingSpec.from_config(config)
        spec = own if spec is None else spec
        spec.require_same(own, "the trainer's model")
    blocks = find_routers(model, spec)
    hidden_size = _hidden_size(config)
    bindings = {layer: probe(found, spec, layer, hidden_size) for layer, found in blocks.items()}
    replay = Replay(spec, list(bindings), _device(blocks), on_missing=on_missing, min_agreement=min_agreement)
    begin, end = uncompiled(replay.begin_forward), uncompiled(replay.end_forward)
    handles: list[Any] = [
        model.register_forward_pre_hook(lambda *_: begin()),
        model.register_forward_hook(lambda _module, _args, outputs: end(outputs)),
    ]
    for layer, binding in bindings.items():
        handles += _bind(binding, replay, layer)
    setattr(model, _HANDLES, handles)
    return replay


def detach(model: nn.Module) -> None:
    """Leave the model as it was before `attach`."""
    for handle in model.__dict__.pop(_HANDLES, ()):
        handle.remove()


def _config(model: nn.Module) -> Any:
    for module in model.modules():
        if hasattr(module, "config"):
            return module.config
    raise ReplayError("this is not a transformers model: it has no config", where=type(model).__name__)


def _device(blocks: dict[int, SparseBlock]) -> torch.device:
    devices = {next(found.gate.parameters()).device for found in blocks.values()}
    if len(devices) != 1:
        raise ReplayError(
            "the routers of this model are on several devices",
            expected="one device in each process",
            got=sorted(str(device) for device in devices),
            remedy="replay needs data, tensor or expert parallelism, not layers spread by device_map",
        )
    return devices.pop()


def _hidden_size(config: Any) -> int:
    get = getattr(config, "get_text_config", None)
    return int((get(decoder=True) if callable(get) else config).hidden_size)


def _bind(binding: Binding, replay: Replay, layer: int) -> list[Any]:
    position, selection = replay.position_of(layer), binding.selection
    active: list[SelectionMode] = []

    def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
        batch = replay.rows_for(layer, hidden.numel() // hidden.shape[-1])
        if batch is not None:
            mode = SelectionMode(selection, functools.partial(batch.choose, position))
            mode.__enter__()  # type: ignore[no-untyped-call]
            active.append(mode)

    def leave(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if active:
            mode = active.pop()
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            if output is not None:  # None when the router itself raised: its own error is the one to show
                require_one(mode.answered, selection, f"layer {layer}")

    return [
        Uncompiled(binding.module),
        binding.module.register_forward_pre_hook(uncompiled(enter), with_kwargs=True),
        binding.module.register_forward_hook(uncompiled(leave), always_call=True),
    ]


def right_padded(samples: Sequence[Replayable], pad_id: int = 0) -> tuple[Layout, torch.Tensor, torch.Tensor]:
    """(layout, input_ids, attention_mask), both [batch, longest] int64: the simplest micro-batch of some samples."""
    layout = Layout.padded([sample.num_tokens for sample in samples])
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    shape = (len(samples), layout.num_positions // len(samples))
    input_ids = torch.from_numpy(layout.gather(tokens, fill=pad_id)).reshape(shape)
    return layout, input_ids, torch.from_numpy((layout.rows >= 0).astype(np.int64)).reshape(shape)


def token_logprobs(
    logits: torch.Tensor, input_ids: torch.Tensor, *, temperature: float = 1.0, chunk: int = 1024
) -> npt.NDArray[np.float32]:
    """log p(token t | tokens before t) [batch, width] float32, NaN at position 0, from logits [batch, width, vocabulary].

    The division by `temperature` and the softmax run in float32 over `chunk` positions at a time: a vocabulary of 150,000 is
    0.6 GB for 1,024 of them.
    """
    batch, width, vocabulary = logits.shape
    flat, targets = logits[:, :-1].reshape(-1, vocabulary), input_ids[:, 1:].reshape(-1, 1)
    parts = [
        flat[i : i + chunk].float().div(temperature).log_softmax(-1).gather(-1, targets[i : i + chunk]).squeeze(-1)
        for i in range(0, flat.shape[0], chunk)
    ]
    out = torch.full((batch, width), float("nan"), dtype=torch.float32)
    if parts:
        out[:, 1:] = torch.cat(parts).reshape(batch, width - 1).cpu()
    return out.numpy()
