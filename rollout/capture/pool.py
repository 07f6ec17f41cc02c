"""RoutePool: routes by KV slot, so that whoever reads the KV of a token can read its routes.

On a prefix hit the forward of the shared tokens does not run, and nothing is captured for them. Their KV lies in slots that
another request wrote; so do their routes, if they are kept by slot:

    tags = pool.allocate(slots)              # with the KV blocks: the slots' rows are no record until they are written
    pool.store(slots, rows)                  # after the forward that wrote the KV: rows [n, L, K]
    rows = pool.gather(slots, tags)          # of a request's slots, whoever wrote them
    pool.free(slots)                         # with the KV blocks

[slots + 1, L, K] in uint8 or uint16, on the host or the device. Row 0 is reserved: an engine's padding (slot 0 or negative)
and writes that come too late go there, and nothing comes out of it. Slots count from 1: an engine whose first KV slot is 0
adds one to all of them.

Three things never come out as routes:

- a slot that was not wholly written since it was allocated: no record, an error or False, never zeros;
- another request's rows in a slot that was freed and given out again: the slot has another generation. A reader keeps the
  generation that it was given, or that it found at its prefix hit (`tags`);
- rows that a step wrote for a request that is gone: `store` with the generations of the step drops them, and counts them.

A preempted request gives its slots back and writes others when it is computed again; nothing is asked of the pool.

n rows, L MoE layers, K top-k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from r3.errors import CaptureError
from r3.rollout.capture.memory import PoolMemory, memory
from r3.rollout.capture.snapshot import HostRoutes, PendingRoutes, StepRoutes
from r3.spec import RoutingSpec

Slots = torch.Tensor | npt.NDArray[Any] | Sequence[int]


class RoutePool:
    """Routes of all KV slots of one engine. One thread at a time.

    Args:
        slots: KV slots of the full-attention group: its blocks times their size. Slots are 1..slots.
        spec: The model's routing.
        device: Where the rows are. The tags are always on the host: who owns a slot is the scheduler's knowledge.

    Attributes:
        rows: [slots + 1, L, K]; for reading use `gather`.
        misdirected: Rows written to row 0 because their slot was 0 or negative (padding).
        late: Rows written to row 0 because their slot had another generation.
        misaligned: Rows refused because their number was not that of their slots.
    """

    def __init__(self, slots: int, spec: RoutingSpec, *, device: torch.device | str = "cpu") -> None:
        if slots < 1:
            raise CaptureError("a pool needs at least one slot", got=slots)
        self.spec, self.num_slots, self.device = spec, slots, torch.device(device)
        # The bits of uint16 in int16, whose indexing every device has.
        dtype = torch.uint8 if spec.dtype.itemsize == 1 else torch.int16
        self._rows = torch.zeros((slots + 1, spec.num_moe_layers, spec.top_k), dtype=dtype, device=self.device)
        # The same memory: a step's few rows cost less in numpy than in torch.
        self._host = self._rows.numpy() if self.device.type == "cpu" else None
        self._generation = np.zeros(slots + 1, np.int64)  # odd while allocated
        self._layers = np.zeros(slots + 1, np.int16)  # layers written, from the first on; all of them is a record
        self.misdirected = self.late = self.misaligned = 0

    @property
    def rows(self) -> torch.Tensor:
        return self._rows if self._rows.dtype == torch.uint8 else self._rows.view(torch.uint16)

    @property
    def nbytes(self) -> int:
        return int(self._rows.nbytes + self._generation.nbytes + self._layers.nbytes)

    def memory(self, kv_bytes_per_token: int) -> PoolMemory:
        return memory(self.spec, self.num_slots, kv_bytes_per_token)

    def allocate(self, slots: Slots, *, reused: bool = False) -> npt.NDArray[np.int64]:
        """Slots that the engine gives out: a new generation each, without a record.

        Args:
            slots: [n], distinct.
            reused: True in an engine that does not say when slots are freed, but only gives them out again (transformers'
                block manager): those in use are freed first, and a slot given out twice by mistake goes unseen.

        Returns:
            [n] int64, their generations.

        Raises:
            CaptureError: a slot that is out of range, reserved, or in use.
        """
        index = self._distinct(slots)
        in_use = self._generation[index] % 2 == 1
        if not reused:
            self._require(~in_use, index, "a slot is allocated twice", "free it first")
        self._generation[index] += 1 + in_use
        self._layers[index] = 0
        return self._generation[index]

    def free(self, slots: Slots) -> None:
        """Slots that the engine takes back. Who still has their generations gets an error for them, not rows.

        Raises:
            CaptureError: a slot that is out of range, reserved, or not in use.
        """
        index = self._distinct(slots)
        self._require(self._generation[index] % 2 == 1, index, "a slot is freed that is not in use", "free it once")
        self._generation[index] += 1
        self._layers[index] = 0

    def flush(self) -> None:
        """Free all slots that are in use: new weights, or a cache that was emptied."""
        self._generation += self._generation % 2
        self._layers[:] = 0

    def tags(self, slots: Slots) -> npt.NDArray[np.int64]:
        """[n] int64, the generations of slots as they are now: to keep at a prefix hit, or for a step's late commit.

        Padding (slots 0 and negative) has tag 0.

        Raises:
            CaptureError: a slot that is out of range.
        """
        return self._generation[self._index(slots)]

    def store(self, slots: Slots, rows: torch.Tensor | npt.NDArray[Any], generations: Slots | None = None) -> int:
        """Write the rows of some slots, all layers.

        Args:
            slots: [n]; 0 and negative ones are padding.
            rows: [n, L, K], ids in range.
            generations: [n] tags from before the forward. Without them every slot must be in use, and the caller vouches that
                none has changed hands since.

        Returns:
            Rows that are a record now.

        Raises:
            CaptureError: rows that do not fit the slots (counted in `misaligned`) or the spec; without generations, a slot that
                is not in use.
        """
        index, rows = self._aligned(slots, rows, (self.spec.num_moe_layers, self.spec.top_k))
        index = self._directed(index, generations)
        self._write(index, rows)
        self._layers[index] = self.spec.num_moe_layers
        self._layers[0] = 0
        return int(np.count_nonzero(index))

    def store_layer(
        self, layer: int, slots: Slots, rows: torch.Tensor | npt.NDArray[Any], generations: Slots | None = None
    ) -> None:
        """Write one layer's rows [n, K], in the order of the layers: a slot is a record when the last is written.

        Writing the first layer begins the slot's row anew. Arguments and errors are those of `store`.

        Raises:
            CaptureError: also for a layer that is not in the spec, or comes before the one below it.
        """
        if layer not in self.spec.moe_layers:
            raise CaptureError(
                "this layer does not route", where=f"layer {layer}", expected=f"one of {list(self.spec.moe_layers)}"
            )
        position = self.spec.moe_layers.index(layer)
        index, rows = self._aligned(slots, rows, (self.spec.top_k,))
        index = self._directed(index, generations)
        kept = index[index > 0]
        if position:
            early = self._layers[kept] != position
            if early.any():
                slot = int(kept[early.argmax()])
                raise CaptureError(
                    "a layer is stored out of order",
                    where=f"slot {slot}, layer {layer}",
                    expected=f"{position} layers stored before it",
                    got=int(self._layers[slot]),
                )
        self._write(index, rows, position)
        self._layers[kept] = position + 1

    def commit(self, step: StepRoutes | PendingRoutes | HostRoutes | None) -> int:
        """Store a step by its own slots and generations. None (no capture, or a dummy run) is a no-op.

        Returns:
            Rows that are a record now.

        Raises:
            CaptureError: a step without slots; otherwise as `store`, and as `PendingRoutes.result`.
        """
        if step is None:
            return 0
        pending = step.to_host() if isinstance(step, StepRoutes) else step
        host = pending.result() if isinstance(pending, PendingRoutes) else pending
        if host.slots is None:
            raise CaptureError("a step without slots cannot be stored", remedy="capturer.snapshot(slots)")
        return self.store(host.slots, host.rows, host.generations)

    def recorded(self, slots: Slots, generations: Slots) -> npt.NDArray[np.bool_]:
        """[n], whether each slot is a record of that generation."""
        index = self._index(slots)
        ours = self._generation[index] == self._vector(generations, len(index))
        fine: npt.NDArray[np.bool_] = ours & (self._layers[index] == self.spec.num_moe_layers)
        return fine

    def gather(self, slots: Slots, generations: Slots) -> torch.Tensor:
        """The routes of a request's slots [n, L, K], a copy, uint8 or uint16.

        Args:
            slots: [n], in the order of its tokens; a prefix hit's among them.
            generations: [n], as `allocate` returned them, or `tags` at the prefix hit.

        Raises:
            CaptureError: a slot that changed hands, was not wholly written since it was allocated, or is row 0; slot and
                position are named.
        """
        index = self._index(slots)
        tags = self._vector(generations, len(index))
        fine = self.recorded(index, tags)
        if not fine.all():
            position = int((~fine).argmax())
            slot = int(index[position])
            layers = int(self._layers[slot])
            what = (
                "row 0 is reserved: nothing is read from it"
                if slot == 0
                else "a slot was freed, or given to another request, since these routes were written"
                if self._generation[slot] != tags[position]
                else f"a slot has no record: {layers} of {self.spec.num_moe_layers} layers were stored since it was allocated"
            )
            raise CaptureError(
                what,
                where=f"slot {slot}, position {position}",
                expected=f"generation {int(tags[position])}, wholly written",
                got=f"generation {int(self._generation[slot])}; {int((~fine).sum())} of {len(index)} slots are such",
                remedy="gather before the engine frees the request's slots; commit every step before the requests that ran in it "
                "are read; the last token of a sequence has no row",
            )
        rows = self._rows[torch.from_numpy(index).to(self.device)]
        return rows if rows.dtype == torch.uint8 else rows.view(torch.uint16)

    def _index(self, slots: Slots) -> npt.NDArray[np.int64]:
        """[n] int64, padding at 0."""
        index = slots.cpu().numpy() if isinstance(slots, torch.Tensor) else np.asarray(slots)
        if index.size == 0:
            return np.zeros(0, np.int64)
        if index.ndim != 1 or index.dtype.kind not in "iu" or index.max() > self.num_slots:
            raise CaptureError(
                "these are not slots of the pool",
                expected=f"integers [n] in 1..{self.num_slots} (0 and negative: padding)",
                got=f"{index.dtype} {list(index.shape)}, up to {index.max()}",
                remedy="the pool has as many slots as the KV cache of the full-attention group: blocks times block size",
            )
        return np.maximum(index.astype(np.int64), 0)

    def _distinct(self, slots: Slots) -> npt.NDArray[np.int64]:
        index = self._index(slots)
        self._require(index > 0, index, "row 0 is reserved: it cannot be allocated or freed", "count slots from 1")
        if len(np.unique(index)) != len(index):
            raise CaptureError("a slot is named twice", got=f"{len(index)} slots, {len(np.unique(index))} distinct")
        return index

    def _require(self, fine: npt.NDArray[np.bool_], index: npt.NDArray[np.int64], what: str, remedy: str) -> None:
        if not fine.all():
            slot = int(index[(~fine).argmax()])
            raise CaptureError(
                what,
                where=f"slot {slot}, position {int((~fine).argmax())}",
                got=f"generation {int(self._generation[slot])} (odd: in use)",
                remedy=remedy,
            )

    def _vector(self, generations: Slots, length: int) -> npt.NDArray[np.int64]:
        tags = generations.cpu().numpy() if isinstance(generations, torch.Tensor) else np.asarray(generations, np.int64)
        if tags.shape != (length,):
            raise CaptureError("not one generation for each slot", expected=f"[{length}]", got=list(tags.shape))
        return tags.astype(np.int64)

    def _aligned(
        self, slots: Slots, rows: torch.Tensor | npt.NDArray[Any], tail: tuple[int, ...]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any] | torch.Tensor]:
        index = self._index(slots)
        if tuple(rows.shape) != (len(index), *tail):
            self.misaligned += int(rows.shape[0]) if len(rows.shape) else 1
            raise CaptureError(
                "rows are not aligned with their slots: none of them is stored",
                expected=f"[{len(index)}, {', '.join(map(str, tail))}]",
                got=list(rows.shape),
                remedy="select this rank's rows (BatchLayout) and cut padding before they are stored",
            )
        if isinstance(rows, np.ndarray) and rows.dtype == self.spec.dtype and self._host is not None:
            return index, rows.view(self._host.dtype)
        ids = torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows
        if ids.dtype == torch.uint16 and self._rows.dtype == torch.int16:
            ids = ids.view(torch.int16)
        elif ids.dtype != self._rows.dtype:
            if ids.is_floating_point() or (
                ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.spec.num_experts
            ):
                raise CaptureError(
                    "rows are not ids of experts",
                    expected=f"integers in 0..{self.spec.num_experts - 1}",
                    got=f"{ids.dtype}" + ("" if ids.is_floating_point() else f" in {int(ids.min())}..{int(ids.max())}"),
                )
            ids = ids.to(self._rows.dtype)
        return index, ids.to(self.device) if self._host is None else ids.numpy()

    def _directed(self, index: npt.NDArray[np.int64], generations: Slots | None) -> npt.NDArray[np.int64]:
        """Where rows go: padding and late rows to row 0, both counted."""
        held = self._generation[index]
        tags = None if generations is None else self._vector(generations, len(index))
        fine = held & 1 if tags is None else (held == tags) & (index > 0)
        if np.count_nonzero(fine) == len(index):
            return index  # no padding among them: row 0 is in no generation that is in use
        self.misdirected += len(index) - int(np.count_nonzero(index))
        if tags is None:
            self._require(
                (fine == 1) | (index == 0),
                index,
                "a row is stored in a slot that is not in use",
                "allocate the slot first",
            )
            return index
        late = (held != tags) & (index > 0)
        self.late += int(np.count_nonzero(late))
        return np.where(late, 0, index)

    def _write(self, index: npt.NDArray[np.int64], rows: Any, position: int | slice = slice(None)) -> None:
        """Rows of `_aligned` to where `_directed` says, of all layers or of one."""
        if self._host is not None:
            self._host[index, position] = rows
        else:
            self._rows[:, position].index_copy_(0, torch.from_numpy(index).to(self.device), rows)
