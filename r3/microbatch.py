"""What one micro-batch brings to a router: the recorded experts of its local rows, or a place to record the router's own.

Host work (gathering a layout's rows, comparing tokens) is numpy; what a router touches is a tensor on its device, queued
there without waiting: indices travel narrow and are widened layer by layer.

n local rows, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from r3.agreement import AgreementCheck
from r3.errors import ReplayError
from r3.layout import Layout
from r3.partial import PartialSample, Replayable
from r3.routes import Routes
from r3.spec import RoutingSpec


class Own(Protocol):
    """The router's own choice: of all rows ([..., K], as its top-k returns it), or of some of the n rows ([r, K])."""

    def __call__(self, rows: torch.Tensor | None = None) -> torch.Tensor: ...


class MicroBatch:
    """The recorded experts of one micro-batch's local rows, on the model's device.

    Args:
        samples, layout: Of the micro-batch.
        spec: The routing of the model.
        device: Where the routers run.
        layers: Global indices of the bound layers; others' ids stay on the host.
        min_agreement: See `r3.agreement`; 0 for no check.

    Attributes:
        num_rows: n.
        agreement: The comparison with the router's own choice; None if there is none.
    """

    def __init__(
        self,
        samples: Sequence[Replayable],
        layout: Layout,
        spec: RoutingSpec,
        device: torch.device,
        *,
        layers: Sequence[int] | None = None,
        min_agreement: float = 0,
    ) -> None:
        self.samples, self.layout = tuple(samples), layout
        self.layers = tuple(spec.moe_layers if layers is None else layers)
        positions = [spec.moe_layers.index(layer) for layer in self.layers]
        self._index = {position: index for index, position in enumerate(positions)}
        ids, recorded = _local_rows(self.samples, layout, spec, self.layers)
        self.num_rows = layout.num_positions
        self.num_replayed = int(recorded.sum())
        self.num_padding = int((layout.rows < 0).sum())
        self.num_unrecorded = self.num_rows - self.num_replayed - self.num_padding
        # torch has few uint16 kernels: ids travel as int16 and are read back as unsigned in `ids_of`.
        self._wide = ids.dtype == np.uint16
        self._ids = to_device(torch.from_numpy(ids.view(np.int16) if self._wide else ids), device)
        self.agreement: AgreementCheck | None = None
        if min_agreement > 0 and self.layers:
            self.agreement = AgreementCheck(self.samples, layout, recorded, self.layers, min_agreement)
        live = np.flatnonzero(~recorded)
        compared = np.zeros(0, np.int64) if self.agreement is None else self.agreement.rows
        self._num_live = len(live)
        # The rows that the router is asked for: live ones, then those to compare. Known on the host, so nothing waits.
        asked = np.concatenate([live, compared])
        self._asked = to_device(torch.from_numpy(asked), device) if len(asked) else None

    def ids_of(self, position: int) -> torch.Tensor:
        """[n, K] int64, the recorded experts of the MoE layer at `position` of the spec; 0 in rows that are live."""
        ids = self._ids[self._index[position]].to(torch.int64)
        return ids & 0xFFFF if self._wide else ids

    def choose(self, position: int, own: Own, shape: tuple[int, ...]) -> torch.Tensor:
        """The ids that a router shall use: the recorded ones, and its own where there is no record.

        The same operations run in a recompute as in the forward: selective checkpointing counts them.

        Args:
            position: Of the layer, on the layer axis of the routes.
            own: The router's own choice, of the rows that are asked for.
            shape: [..., K], n rows in all.

        Returns:
            int64 of `shape`. Nothing here waits for the device.
        """
        ids = self.ids_of(position)
        if self._asked is None:
            return ids.reshape(shape)
        choice = own(self._asked)
        live, compared = self._asked[: self._num_live], self._asked[self._num_live :]
        if self.agreement is not None and len(compared):
            recorded = ids.index_select(0, compared)
            self.agreement.see(self.layers[self._index[position]], recorded, choice[self._num_live :])
        if self._num_live:
            ids = ids.index_copy(0, live, choice[: self._num_live])
        return ids.reshape(shape)


class Recording:
    """The routers' own choices in one forward: what routing replay without a rollout engine (R2) replays later.

    Nothing is kept on the device: each layer's ids go to the host as soon as they are chosen, narrow (uint8 up to 256
    experts), and on a GPU nothing waits for them before `routes`.

    Attributes:
        num_rows: n.
    """

    num_replayed = num_unrecorded = num_padding = 0
    agreement = None

    def __init__(self, layout: Layout, spec: RoutingSpec, layers: Sequence[int] | None = None) -> None:
        self.layout, self.spec = layout, spec
        self.layers = tuple(spec.moe_layers if layers is None else layers)
        self.num_rows = layout.num_positions
        self._ids: dict[int, torch.Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    def choose(self, position: int, own: Own, shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002
        """The router's own choice, of which a narrow copy is on its way to the host afterwards.

        Raises:
            ReplayError: a second forward in the same recording.
        """
        ids = own()
        if torch._C._current_graph_task_id() != -1:  # a recompute of what is recorded
            return ids
        if position in self._ids:
            raise ReplayError(
                "a recording holds one forward",
                where=f"layer {self.spec.moe_layers[position]}",
                remedy="open `with replay.record(layout)` for each micro-batch",
            )
        narrow = ids.detach().reshape(-1, ids.shape[-1]).to(torch.uint8 if self.spec.dtype == np.uint8 else torch.int16)
        if narrow.device.type == "cuda":
            host = torch.empty(narrow.shape, dtype=narrow.dtype, pin_memory=True)
            self._ids[position] = host.copy_(narrow, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(narrow.device))
        else:
            self._ids[position] = narrow.cpu()
        return ids

    def routes(self) -> list[Routes]:
        """The routes of each sample of the layout, every row recorded; layers of other pipeline stages are absent.

        Raises:
            ReplayError: a forward has not happened, or tokens of a sample are not on this rank.
        """
        out = self._by_sample()
        for sample, routes in enumerate(out):
            if not routes.recorded.all():
                raise ReplayError(
                    "tokens of this sample are not on this rank",
                    where=f"sample {sample} of the micro-batch, token {int(routes.recorded.argmin())}",
                    remedy="record where whole sequences are, or replay `recording.partial(samples)` on the same layout",
                )
        return out

    def partial(self, samples: Sequence[Replayable]) -> list[PartialSample]:
        """The same samples with the routes that were recorded here: to be replayed here, on the same layout.

        They hold the bound layers, and the tokens of this rank; other ranks' tokens are without a record.

        Raises:
            ReplayError: a forward has not happened, or other samples.
        """
        if tuple(s.num_tokens for s in samples) != self.layout.lengths:
            raise ReplayError(
                "these are not the samples of the recording",
                expected=f"lengths {list(self.layout.lengths)}",
                got=[s.num_tokens for s in samples],
            )
        return [
            PartialSample(s.sample_id, self.spec, s.tokens, routes, self.layers, s.loss_mask)
            for s, routes in zip(samples, self._by_sample(), strict=True)
        ]

    def _by_sample(self) -> list[Routes]:
        wanted = [self.spec.moe_layers.index(layer) for layer in self.layers]
        if sorted(self._ids) != wanted:
            raise ReplayError("nothing is recorded", expected="model(...) inside `with replay.record(...)`")
        if self._copied is not None:
            self._copied.synchronize()
        by_row = np.zeros((len(wanted), self.num_rows, self.spec.top_k), self.spec.dtype)
        for index, position in enumerate(wanted):
            by_row[index] = self._ids[position].numpy().view(self.spec.dtype)
        position_of_row = np.full(sum(self.layout.lengths), -1, np.int64)
        held = np.flatnonzero(self.layout.rows >= 0)
        position_of_row[self.layout.rows[held]] = held
        ends = np.cumsum(self.layout.lengths)
        out = []
        for end, length in zip(ends, self.layout.lengths, strict=True):
            positions = position_of_row[end - length : end]
            out.append(Routes(np.ascontiguousarray(by_row[:, positions]), positions >= 0))
        return out


class TokenCheck:
    """The comparison of the trainer's tokens with the rollout's, on the device that holds them; none where there are none."""

    def __init__(self, samples: Sequence[Replayable], layout: Layout, token_ids: torch.Tensor | None) -> None:
        lengths = tuple(sample.num_tokens for sample in samples)
        if lengths != layout.lengths:
            raise ReplayError(
                "the layout is not of these samples", expected=f"lengths {list(lengths)}", got=list(layout.lengths)
            )
        self.samples, self.layout = samples, layout
        self._flag: torch.Tensor | None = None
        if token_ids is None:
            return
        self.local = token_ids.detach().reshape(-1)
        if self.local.shape[0] != layout.num_positions:
            raise ReplayError(
                "the layout is not of these token ids",
                expected=f"{layout.num_positions} positions",
                got=self.local.shape[0],
            )
        total = np.concatenate([s.tokens for s in samples]).astype(np.int64) if samples else np.zeros(0, np.int64)
        self.expected = layout.gather(total, fill=-1)
        if self.local.device.type != "cuda":
            self._require(self._differs(torch.from_numpy(self.expected).to(self.local.device)))
            return
        differs = self._differs(to_device(torch.from_numpy(self.expected), self.local.device))
        self._flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(differs.any(), non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record(torch.cuda.current_stream(self.local.device))

    def _differs(self, expected: torch.Tensor) -> torch.Tensor:
        return (expected >= 0) & (self.local != expected)

    def finish(self) -> None:
        """Raise if tokens on a GPU differ. Waits for the comparison, which was queued before the forward, and no more."""
        if self._flag is None:
            return
        self._done.synchronize()
        if bool(self._flag):
            self._require(self._differs(torch.from_numpy(self.expected).to(self.local.device)))

    def _require(self, differs: torch.Tensor) -> None:
        wrong = np.flatnonzero(differs.cpu().numpy())
        if not len(wrong):
            return
        position = int(wrong[0])
        sample, token = self.layout.locate_row(int(self.layout.rows[position]))
        raise ReplayError(
            f"the trainer's tokens are not the rollout's: {len(wrong)} of {int((self.expected >= 0).sum())} differ",
            where=f"sample {self.samples[sample].sample_id!r}, token {token} (local position {position})",
            expected=int(self.expected[position]),
            got=int(self.local[position]),
            remedy="samples in another order than the batch, tokens shifted by a pad or BOS, or a sequence that was "
            "decoded and tokenized again: routes would be replayed at the wrong tokens",
        )


def _local_rows(
    samples: Sequence[Replayable], layout: Layout, spec: RoutingSpec, layers: Sequence[int]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """ids [L, n, K] of these layers and recorded [n], at a layout's positions."""
    ids = np.zeros((len(layers), layout.num_positions, spec.top_k), spec.dtype)
    recorded = np.zeros(layout.num_positions, np.bool_)
    first = 0
    for sample in samples:
        positions = np.flatnonzero((layout.rows >= first) & (layout.rows < first + sample.num_tokens))
        tokens = layout.rows[positions] - first
        _require_read(sample, tokens)
        for index, held in enumerate(_held(sample, layers)):
            ids[index, positions] = sample.routes.ids[held, tokens]
        recorded[positions] = sample.routes.recorded[tokens]
        first += sample.num_tokens
    return ids, recorded


def _require_read(sample: Replayable, tokens: npt.NDArray[np.int64]) -> None:
    if isinstance(sample, PartialSample) and sample.held is not None and not sample.held[tokens].all():
        raise ReplayError(
            "a sample was read without tokens that are replayed here",
            where=f"sample {sample.sample_id!r}, token {int(tokens[sample.held[tokens].argmin()])}",
            expected=f"routes of {len(tokens)} tokens",
            got=int(sample.held[tokens].sum()),
            remedy="read the tokens of this rank's routers: the layout differs from the one that the sample was read for",
        )


def _held(sample: Replayable, layers: Sequence[int]) -> list[int]:
    """Where these decoder layers stand in the sample's routes."""
    there = sample.layers if isinstance(sample, PartialSample) else sample.spec.moe_layers
    absent = [layer for layer in layers if layer not in there]
    if absent:
        raise ReplayError(
            "a sample was read without layers that are replayed here",
            where=f"sample {sample.sample_id!r}, decoder layers {absent}",
            expected=f"routes of layers {list(layers)}",
            got=list(there),
            remedy="read the layers of the chunk that the sample is for: replay.layers_of(chunk)",
        )
    return [there.index(layer) for layer in layers]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To a GPU through pinned memory, so that the copy is queued and nothing waits for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
