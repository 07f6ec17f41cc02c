"""Replay in Megatron-core, in any loop that drives its schedules with a `forward_step` of its own.

    replay = attach(chunks)                                   # the rank's model chunks, as the schedule gets them

    def forward_step(data_iterator, chunk):
        samples, layout, tokens, position_ids = next(data_iterator)
        with replay.micro_batch(chunk, samples, layout, tokens):      # layout: of this rank's token tensor
            output = chunk(tokens, position_ids, None)                # routers use the recorded experts
        return output, loss_func                              # backward, recompute included, is the schedule's business

    detach(chunks)

Scope: megatron-core 0.16 and later through the router's replay seam, older ones through their top-k; proved on each router
when it is attached (`seam`), refused by name otherwise (`routers`). How Megatron cuts tokens: `layouts`. Importing this
package does not import Megatron.

Contract: one `r3.replay.Replay` per model chunk, so a chunk's micro-batches in flight are tied to that chunk's own graphs.
Nothing is global, and nothing is left behind by `detach`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from r3.agreement import MIN_AGREEMENT, Agreement
from r3.errors import ReplayError
from r3.layout import Layout
from r3.microbatch import MicroBatch, Recording
from r3.partial import PartialSample, Replayable, known_rows
from r3.replay import Coverage, Replay
from r3.spec import RoutingSpec
from r3.trainers.megatron.layouts import router_rows
from r3.trainers.megatron.routers import Chunk, decoder_of, find_chunks, refuse
from r3.trainers.megatron.seam import install, prove

_HANDLE = "_r3_replay"


class MegatronReplay:
    """The replay handle of one rank's model chunks; made by `attach`.

    Attributes:
        spec: The routing of the whole model.
        layers: Global decoder-layer indices of the routers bound on this rank, over all chunks, ascending.
        hash_layers: Layers of this rank that take their experts from a table by token id: skipped.
    """

    def __init__(self, spec: RoutingSpec, chunks: Sequence[Chunk], replays: Sequence[Replay], undo: ExitStack) -> None:
        self.spec = spec
        self.layers = tuple(sorted(layer for chunk in chunks for layer in chunk.routers))
        self.hash_layers = tuple(sorted(layer for chunk in chunks for layer in chunk.hashed))
        self._parts = list(zip(chunks, replays, strict=True))
        self._undo = undo
        self._distinct: weakref.WeakSet[Replayable] = weakref.WeakSet()

    @contextlib.contextmanager
    def micro_batch(
        self, chunk: nn.Module, samples: Sequence[Replayable], layout: Layout, token_ids: torch.Tensor | None = None
    ) -> Iterator[MicroBatch]:
        """Replay these samples in the forward of `chunk` inside the `with` block; its backward is the schedule's.

        Args:
            chunk: The model chunk that this forward step is for, wrapped or bare.
            samples: Of the micro-batch, in the order of the layout: whole, or with the chunk's layers alone
                (`PartialSample.read(store, sample_id, replay.layers_of(chunk))`).
            layout: Where each position of this rank's token tensor comes from: after padding and the context-parallel cut,
                before tensor and sequence parallelism (`r3.trainers.megatron.layouts`).
            token_ids: That tensor, [b, s] or [1, t]; compared with the samples' tokens. None on a stage that has none.

        Raises:
            ReplayError: as in `r3.replay.Replay.micro_batch`; a chunk that is not attached; a token that was recorded with the
                same expert twice (a routing map holds it once: the all-to-all dispatcher fails, the others drop a share).
            LayoutError: the number of lines is not known or does not fit.
        """
        replay = self._of(chunk)
        for sample in samples:
            self._require_distinct(sample)
        rows = self._rows(chunk, _with_lines(layout, token_ids))
        with replay.micro_batch(samples, layout, token_ids, rows=rows) as batch:
            yield batch

    def record(self, chunk: nn.Module, layout: Layout) -> AbstractContextManager[Recording]:
        """Let the routers of `chunk` choose in the forward inside the block, and keep what they chose (R2).

        Replay it on the same chunk and layout with `recording.partial(samples)` as the samples.

        Args:
            chunk, layout: As in `micro_batch`; the layout must know its `lines`.
        """
        return self._of(chunk).record(self._rows(chunk, layout))

    def layers_of(self, chunk: nn.Module) -> tuple[int, ...]:
        """The layers of `layers` that are in this chunk."""
        return tuple(sorted(self._part(chunk)[0].routers))

    @property
    def coverage(self) -> Coverage:
        """Rows of this rank's routers so far, summed over the chunks that hold a router.

        A row is counted once for each forward of such a chunk, however many routers it has. Over ranks: add those of data,
        context and expert parallel ranks, and of tensor parallel ranks under sequence parallelism (each routes its own rows);
        tensor parallel ranks without it count the same rows, so take one. Pipeline ranks count the same tokens in other layers.
        """
        total = Coverage()
        for chunk, replay in self._parts:
            if chunk.routers:
                for name, value in vars(replay.coverage).items():
                    setattr(total, name, getattr(total, name) + value)
        return total

    @property
    def agreement(self) -> Agreement:
        """Recorded ids that the routers would have chosen themselves, by layer; counts add up over ranks like `coverage`'s."""
        total = Agreement()
        for _, replay in self._parts:
            total.agreed.update(replay.agreement.agreed)
            total.compared.update(replay.agreement.compared)
        return total

    def _require_distinct(self, sample: Replayable) -> None:
        if sample in self._distinct:
            return
        layers = sample.layers if isinstance(sample, PartialSample) else sample.spec.moe_layers
        for position, layer in enumerate(layers):
            if layer in self.layers:
                ids = np.sort(sample.routes.ids[position], axis=-1)
                twice = np.flatnonzero((ids[:, 1:] == ids[:, :-1]).any(axis=-1) & known_rows(sample))
                if len(twice):
                    raise ReplayError(
                        "a token is recorded with the same expert twice",
                        where=f"sample {sample.sample_id!r}, token {int(twice[0])}, layer {layer}",
                        expected=f"{self.spec.top_k} distinct experts",
                        got=sample.routes.ids[position, twice[0]].tolist(),
                        remedy="collect the sample again with an engine that returns the routes of every token",
                    )
        self._distinct.add(sample)

    def _part(self, chunk: nn.Module) -> tuple[Chunk, Replay]:
        for part in self._parts:  # as it was given, as a rule; else unwrap it, which walks the model
            if chunk is part[0].outer or chunk is part[0].inner:
                return part
        inner = decoder_of(chunk)[0]
        for part in self._parts:
            if inner is part[0].inner:
                return part
        raise ReplayError(
            "this model chunk is not attached to this replay",
            where=type(chunk).__name__,
            expected="one of the chunks given to attach(), wrapped or bare",
        )

    def _of(self, chunk: nn.Module) -> Replay:
        return self._part(chunk)[1]

    def _rows(self, chunk: nn.Module, layout: Layout) -> Layout:
        for router in self._part(chunk)[0].routers.values():
            if router.config.sequence_parallel:
                rank, size = _tensor_parallel(router)
                return router_rows(layout, tp_rank=rank, tp_size=size)
            return router_rows(layout)
        return layout  # no router sees it


def attach(
    chunks: nn.Module | Sequence[nn.Module],
    spec: RoutingSpec | None = None,
    *,
    on_missing: str = "live",
    min_agreement: float = MIN_AGREEMENT,
    freeze_expert_bias: bool = False,
    disable_fused_router: bool = False,
    allow_token_dropping: bool = False,
) -> MegatronReplay:
    """Bind every router of a rank's model chunks to a new replay handle.

    Args:
        chunks: The model or model chunks that the schedule is given; DDP and Float16Module around them are fine.
        spec: The rollout model's routing; from the chunks' TransformerConfig if None.
        on_missing: `live` or `raise`, for rows without a record.
        min_agreement: The least share of recorded experts that the routers would choose themselves (`r3.agreement`).
        freeze_expert_bias: Count no tokens for the update of the expert bias while attached, so that it stays as it is. Else
            the counts are of the replayed routing, in forwards with gradients.
        disable_fused_router: Switch `moe_router_fusion` off while attached, instead of refusing it.
        allow_token_dropping: Accept expert capacities: tokens over an expert's capacity lose that expert although it is
            recorded.

    Raises:
        SpecError: the config does not tell its routing, or does not fit the spec.
        ReplayError: a router that cannot be bound, a setting under which replay would not happen (docs/megatron.md), or a
            chunk that is attached already.
    """
    models = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
    spec, found = find_chunks(models, spec)
    if any(hasattr(chunk.inner, _HANDLE) for chunk in found):
        raise ReplayError("a model chunk has a replay attached already", remedy="detach(chunks) first")
    with ExitStack() as undo:
        routers = {layer: router for chunk in found for layer, router in chunk.routers.items()}
        for router in routers.values():
            if disable_fused_router:
                _set(undo, router.config, "moe_router_fusion", False)
            if freeze_expert_bias:
                _set(undo, router, "enable_expert_bias", False)
            refuse(router.config, allow_token_dropping=allow_token_dropping)
        for layer, router in routers.items():
            prove(router, spec, layer)
        replays = [_attach(chunk, spec, on_missing, min_agreement, undo) for chunk in found]
        handle = MegatronReplay(spec, found, replays, undo.pop_all())
    for chunk in found:
        setattr(chunk.inner, _HANDLE, handle)
        handle._undo.callback(delattr, chunk.inner, _HANDLE)
    return handle


def detach(chunks: nn.Module | Sequence[nn.Module]) -> None:
    """Leave the chunks, and all that were attached together with them, as they were before `attach`."""
    for model in [chunks] if isinstance(chunks, nn.Module) else chunks:
        handle: MegatronReplay | None = decoder_of(model)[0].__dict__.get(_HANDLE)
        if handle is not None:
            handle._undo.close()


def _attach(chunk: Chunk, spec: RoutingSpec, on_missing: str, min_agreement: float, undo: ExitStack) -> Replay:
    device = _device(chunk)
    replay = Replay(spec, list(chunk.routers), device, on_missing=on_missing, min_agreement=min_agreement)
    for handle in (
        chunk.inner.register_forward_pre_hook(lambda *_: replay.begin_forward()),
        chunk.inner.register_forward_hook(lambda _module, _args, outputs: replay.end_forward(outputs)),
    ):
        undo.callback(handle.remove)
    for layer, router in chunk.routers.items():
        undo.callback(install(router, replay, layer))
    return replay


def _set(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name) and getattr(owner, name) != value:
        undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def _device(chunk: Chunk) -> torch.device:
    weights = [router.weight for router in chunk.routers.values()] or list(chunk.inner.parameters())
    device = weights[0].device if weights else torch.device("cpu")
    if device.type == "cpu" and torch.cuda.is_available():  # Megatron moves a router to the GPU at its first forward
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


def _tensor_parallel(router: Any) -> tuple[int, int]:
    group = getattr(router, "tp_group", None)
    if group is not None:
        return group.rank(), group.size()
    from megatron.core import parallel_state  # before routers had groups

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def _with_lines(layout: Layout, token_ids: torch.Tensor | None) -> Layout:
    if token_ids is None or token_ids.dim() != 2:  # a flattened tensor does not tell its lines: the layout must
        return layout
    lines = token_ids.shape[0]
    if layout.lines not in (None, lines):
        raise ReplayError(
            "the layout has another number of lines than the token tensor",
            expected=f"{layout.lines} lines",
            got=f"token_ids {list(token_ids.shape)}",
            remedy="the layout describes this rank's token tensor [b, s]; packed tokens are [1, t]",
        )
    return Layout(layout.rows, layout.lengths, lines) if token_ids.numel() else layout
