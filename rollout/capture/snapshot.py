"""StepRoutes: what one step routed, out of reach of the next step, and its way to the host.

The capturer's buffer and an engine's slot mapping are written again by the next step, while the copy to the host may still be
under way. So a snapshot owns what it holds: rows and slots are copied on the device, in the order of the stream that wrote
them, before the next step can begin. The copy to the host then runs on a side stream into pinned memory and an event says
when it is done; on a CPU there is nothing to wait for.

n rows, L MoE layers, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from r3.errors import CaptureError
from r3.spec import RoutingSpec


class HostRoutes(NamedTuple):
    """A step on the host.

    Attributes:
        rows: [n, L, K] of the snapshot's dtype, checked against the spec.
        slots: [n] int64, the KV slot of each row; None if the step had none.
        generations: [n] int64, the generation of each slot when the step ran; None if not given.
    """

    rows: npt.NDArray[Any]
    slots: npt.NDArray[np.int64] | None
    generations: npt.NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class StepRoutes:
    """One step's routes on the device. Immutable by contract: nobody else has these tensors.

    Attributes:
        spec: The routing.
        rows: [n, L, K] uint8 or uint16 (int32 on demand).
        slots: [n] int64, or None.
        generations: [n] int64, or None.
        least: [L * K] int32, the least id of each layer and choice before they were narrowed.
        greatest: [L * K] int32.
        sound: [ranks] uint8, 1 where a rank of a sharded batch captured all its layers, all ids in range; None where nothing
            was gathered.
        stream: A side stream for the copy to the host; None on a CPU.
        written: An event after the last write of these tensors, on the stream that wrote them; None on a CPU.
    """

    spec: RoutingSpec
    rows: torch.Tensor
    slots: torch.Tensor | None
    generations: torch.Tensor | None
    least: torch.Tensor
    greatest: torch.Tensor
    sound: torch.Tensor | None = None
    stream: Any = None
    written: Any = None

    @property
    def num_rows(self) -> int:
        return int(self.rows.shape[0])

    def to_host(self) -> PendingRoutes:
        """Begin the copy to the host. Returns at once; `result()` of what it returns waits."""
        return PendingRoutes(self)


class PendingRoutes:
    """A copy to the host that is under way."""

    def __init__(self, step: StepRoutes) -> None:
        self._spec = step.spec
        sources = (step.rows, step.slots, step.generations, step.least, step.greatest, step.sound)
        self._done: Any = None
        if step.stream is None:
            self._parts = tuple(None if t is None else t.cpu() for t in sources)
            return
        # After what wrote the snapshot, whatever thread and stream this is; record_stream keeps its memory from being given
        # out again until the side stream has read it.
        step.stream.wait_event(step.written)
        with torch.cuda.stream(step.stream):
            self._parts = tuple(None if t is None else _to_pinned(t, step.stream) for t in sources)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(step.stream)

    def done(self) -> bool:
        """Whether `result()` would not wait."""
        return self._done is None or bool(self._done.query())

    def result(self) -> HostRoutes:
        """The step on the host; waits for the copy.

        Raises:
            CaptureError: ids that are no experts of the spec, the layer named; or a rank of a sharded batch whose step was
                incomplete or out of range.
        """
        if self._done is not None:
            self._done.synchronize()
        rows, slots, generations, least, greatest, sound = self._parts
        assert rows is not None
        assert least is not None
        assert greatest is not None
        self._require_in_range(least.numpy(), greatest.numpy())
        if sound is not None and not bool(sound.all()):
            raise CaptureError(
                "a rank's part of a sharded batch cannot be used",
                where=f"rank {int((sound == 0).nonzero()[0])} of the group",
                expected="all layers captured, all ids in range",
                remedy="the error that was raised on that rank names the layer",
            )
        return HostRoutes(
            rows.numpy(),
            None if slots is None else slots.numpy(),
            None if generations is None else generations.numpy(),
        )

    def _require_in_range(self, least: npt.NDArray[np.int32], greatest: npt.NDArray[np.int32]) -> None:
        # Of some dozens of numbers: a list's own min costs less than the start of a reduction.
        if min(least.tolist()) >= 0 and max(greatest.tolist()) < self._spec.num_experts:
            return
        by_layer = (self._spec.num_moe_layers, self._spec.top_k)
        low, high = least.reshape(by_layer).min(1), greatest.reshape(by_layer).max(1)
        bad = np.flatnonzero((low < 0) | (high >= self._spec.num_experts))
        raise CaptureError(
            f"{len(bad)} layers selected experts that do not exist",
            where=f"layer {self._spec.moe_layers[bad[0]]}",
            expected=f"logical ids in 0..{self._spec.num_experts - 1}",
            got=f"ids in {int(low[bad[0]])}..{int(high[bad[0]])}",
            remedy="capture before the map to physical experts (EPLB): their ids are larger; or the spec is another model's",
        )


def _to_pinned(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    tensor.record_stream(stream)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
