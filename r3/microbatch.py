"""What one micro-batch brings to a router: the recorded experts of its local rows, or a place to record the router's own.

Host work (gathering a layout's rows, comparing tokens) is numpy; what a router touches is a tensor on its device, queued
there without waiting: indices travel narrow and are widened layer by layer.

n local rows, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from r3.errors import ReplayError
from r3.layout import Layout
from r3.routes import Routes
from r3.sample import RolloutSample
from r3.spec import RoutingSpec


class MicroBatch:
    """The recorded experts of one micro-batch's local rows, on the model's device.

    Attributes:
        num_rows: n.
        live: [n] bool, rows that use the router's own choice; None if every row is replayed.
    """

    def __init__(
        self, samples: Sequence[RolloutSample], layout: Layout, spec: RoutingSpec, device: torch.device
    ) -> None:
        self.samples, self.layout = tuple(samples), layout
        ids, recorded = _local_rows(self.samples, layout, spec)
        held = layout.rows >= 0
        self.num_rows = layout.num_positions
        self.num_replayed = int(recorded.sum())
        self.num_padding = int((~held).sum())
        self.num_unrecorded = self.num_rows - self.num_replayed - self.num_padding
        # torch has few uint16 kernels: ids travel as int16 and are read back as unsigned in `ids_of`.
        self._wide = ids.dtype == np.uint16
        self._ids = to_device(torch.from_numpy(ids.view(np.int16) if self._wide else ids), device)
        self.live = None if recorded.all() else to_device(torch.from_numpy(~recorded), device)

    def ids_of(self, position: int) -> torch.Tensor:
        """[n, K] int64, the recorded experts of the MoE layer at `position` of the spec; 0 in rows that are live."""
        ids = self._ids[position].to(torch.int64)
        return ids & 0xFFFF if self._wide else ids

    def choose(self, position: int, own: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """The ids that a router shall use: the recorded ones, and its own where there is no record.

        Args:
            position: Of the layer, on the layer axis of the routes.
            own: The router's own choice; only called if a row needs it.
            shape: [..., K], n rows in all.

        Returns:
            int64 of `shape`. Nothing here waits for the device.
        """
        ids = self.ids_of(position).reshape(shape)
        if self.live is None:
            return ids
        return torch.where(self.live.reshape(*shape[:-1], 1), own(), ids)


class Recording:
    """The routers' own choices in one forward: what routing replay without a rollout engine (R2) replays later.

    Attributes:
        num_rows: n.
    """

    num_replayed = num_unrecorded = num_padding = 0

    def __init__(self, layout: Layout, spec: RoutingSpec) -> None:
        self.layout, self.spec = layout, spec
        self.num_rows = layout.num_positions
        self._ids: list[torch.Tensor | None] = [None] * spec.num_moe_layers

    def choose(self, position: int, own: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:  # noqa: ARG002
        """The router's own choice, of which a narrow copy is on its way to the host afterwards."""
        ids = own()
        narrow = ids.detach().reshape(-1, ids.shape[-1])
        self._ids[position] = narrow.to(torch.uint8 if self.spec.num_experts <= 256 else torch.int32)
        return ids

    def routes(self) -> list[Routes]:
        """The routes of each sample of the layout, every row recorded; layers of other pipeline stages are absent.

        Raises:
            ReplayError: a forward has not happened, or tokens of a sample are not on this rank.
        """
        recorded = [ids.cpu().numpy().astype(self.spec.dtype) for ids in self._ids if ids is not None]
        if not recorded:
            raise ReplayError("nothing is recorded", expected="model(...) inside `with replay.record(...)`")
        by_row = np.stack(recorded)
        position_of_row = np.full(sum(self.layout.lengths), -1, np.int64)
        held = np.flatnonzero(self.layout.rows >= 0)
        position_of_row[self.layout.rows[held]] = held
        ends = np.cumsum(self.layout.lengths)
        out = []
        for sample, (end, length) in enumerate(zip(ends, self.layout.lengths, strict=True)):
            positions = position_of_row[end - length : end]
            if (positions < 0).any():
                raise ReplayError(
                    "tokens of this sample are not on this rank",
                    where=f"sample {sample} of the micro-batch, token {int((positions < 0).argmax())}",
                    remedy="record where whole sequences are, or replay the recording on the same layout",
                )
            out.append(Routes(np.ascontiguousarray(by_row[:, positions]), np.ones(length, np.bool_)))
        return out


class TokenCheck:
    """The comparison of the trainer's tokens with the rollout's, on the device that holds them."""

    def __init__(self, samples: Sequence[RolloutSample], layout: Layout, token_ids: torch.Tensor) -> None:
        lengths = tuple(sample.num_tokens for sample in samples)
        if lengths != layout.lengths:
            raise ReplayError(
                "the layout is not of these samples", expected=f"lengths {list(lengths)}", got=list(layout.lengths)
            )
        self.samples, self.layout = samples, layout
        self.local = token_ids.detach().reshape(-1)
        if self.local.shape[0] != layout.num_positions:
            raise ReplayError(
                "the layout is not of these token ids",
                expected=f"{layout.num_positions} positions",
                got=self.local.shape[0],
            )
        total = np.concatenate([s.tokens for s in samples]).astype(np.int64) if samples else np.zeros(0, np.int64)
        self.expected = layout.gather(total, fill=-1)
        self._flag: torch.Tensor | None = None
        if self.local.device.type != "cuda":
            self._require(self._differs(torch.from_numpy(self.expected).to(self.local.device)))
            return
        differs = self._differs(to_device(torch.from_numpy(self.expected), self.local.device))
        self._flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(differs.any(), non_blocking=True)
        self._done = torch.cuda.Event()
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
    samples: Sequence[RolloutSample], layout: Layout, spec: RoutingSpec
) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """ids [L, n, K] and recorded [n] of a layout's positions."""
    ids = np.zeros((spec.num_moe_layers, layout.num_positions, spec.top_k), spec.dtype)
    recorded = np.zeros(layout.num_positions, np.bool_)
    first = 0
    for sample in samples:
        positions = np.flatnonzero((layout.rows >= first) & (layout.rows < first + sample.num_tokens))
        tokens = layout.rows[positions] - first
        ids[:, positions] = sample.routes.ids[:, tokens]
        recorded[positions] = sample.routes.recorded[tokens]
        first += sample.num_tokens
    return ids, recorded


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To a GPU through pinned memory, so that the copy is queued and nothing waits for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
