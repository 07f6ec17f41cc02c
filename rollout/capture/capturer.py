"""RoutingCapturer: one step's ids of every MoE layer, in one buffer on the device.

    capturer.begin_step(num_rows)            # outside a step, everything below is a no-op
    ... the model's forward: each layer calls capture(layer_id, topk_ids) ...
    step = capturer.snapshot(slots)          # StepRoutes, out of reach of the next step

The buffer [max_tokens, L, K] is int32, what routers give: nothing is narrowed layer by layer, no layer waits for the device,
and ids that are no experts are still seen as such when the step ends, where one pass finds the extremes of all layers and
one narrows them, which is also the copy that keeps the next step from tearing it. At 8,192 tokens a step it takes 16 MB for
DeepSeek-V3 (58 layers, top-8).

Contract: every layer of the spec fires once in a step. One that did not leaves rows of an earlier step in the buffer, so
that is an error which names it, not a row that looks right. The buffer is not cleared: that would hide it.

CUDA graphs: while a graph is being captured nothing is copied and nothing counts as fired, because a copy that is recorded
into a graph runs again in every replay of it, with rows that nobody declared. docs/capture.md says what a graph needs.

n rows of this rank, L MoE layers, K top-k.
"""

from __future__ import annotations

from typing import Any

import torch

from r3.errors import CaptureError, LayerRangeError
from r3.rollout.capture.layouts import BatchLayout
from r3.rollout.capture.snapshot import StepRoutes
from r3.spec import RoutingSpec


class RoutingCapturer:
    """Collects one step at a time.

    Args:
        spec: The model's routing.
        max_tokens: The most rows of this rank in one step.
        device: Where the routers run.
        dtype: Of snapshots: uint8 up to 256 experts and uint16 above if None; torch.int32 where whatever takes them wants
            that.

    Attributes:
        active: Whether a step is under way.
    """

    def __init__(
        self, spec: RoutingSpec, *, max_tokens: int, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> None:
        narrow = torch.uint8 if spec.dtype.itemsize == 1 else torch.uint16
        if dtype not in (None, narrow, torch.int32):
            raise CaptureError("snapshots cannot have this dtype", expected=f"{narrow} or torch.int32", got=str(dtype))
        self.spec, self.max_tokens, self.device = spec, max_tokens, torch.device(device)
        self.dtype = narrow if dtype is None else dtype
        self._buffer = torch.zeros((max_tokens, spec.num_moe_layers, spec.top_k), dtype=torch.int32, device=self.device)
        self._position = {layer: index for index, layer in enumerate(spec.moe_layers)}
        self._layout: BatchLayout | None = None
        self._local = BatchLayout.local(0)
        self._by_layer = self._buffer[:0].unbind(1)
        self._waiting: set[int] = set()
        self._seen = torch.Size()
        self._stream = _side_stream(self.device)

    @property
    def active(self) -> bool:
        return self._layout is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._buffer.nbytes

    def begin_step(self, num_rows: int, layout: BatchLayout | None = None) -> None:
        """Begin a step; one that was begun and not ended (its forward failed) is forgotten.

        Args:
            num_rows: This rank's tokens n, without padding.
            layout: How the routers see them; `BatchLayout.local(num_rows)` if None.

        Raises:
            CaptureError: more rows than the buffer holds, or a layout of another number of rows.
        """
        if layout is None:
            # Steps of decoding have the same rows again and again: what depends on their number alone is kept.
            if self._local.num_rows != num_rows:
                self._local = BatchLayout.local(num_rows)
            layout = self._local
        if layout.num_rows != num_rows or max(num_rows, layout.kept) > self.max_tokens:
            raise CaptureError(
                "a step does not fit",
                expected=f"{num_rows} rows by the layout, at most {self.max_tokens} (max_tokens)",
                got=layout.brief(),
                remedy="make the capturer with max_tokens of the engine's largest step",
            )
        self._layout = layout
        if len(self._by_layer[0]) != layout.kept:
            self._by_layer = self._buffer[: layout.kept].unbind(1)
        self._waiting = set(self._position)
        self._seen = torch.Size((layout.seen, self.spec.top_k))

    def capture(self, layer_id: int, topk_ids: torch.Tensor) -> None:
        """Take one layer's ids [rows, K]. A no-op outside a step and while a CUDA graph is captured.

        Raises:
            LayerRangeError: (an IndexError) no layer of the model.
            CaptureError: a layer that does not route by the spec or fired twice, or ids of another shape or number of rows.
        """
        layout = self._layout
        if layout is None or _in_graph_capture(self.device):
            return
        if layer_id not in self._waiting:
            self._refuse(layer_id)
        if topk_ids.shape != self._seen or topk_ids.is_floating_point():
            self._refuse_ids(layer_id, topk_ids, layout)
        kept = topk_ids if layout.kept == layout.seen else topk_ids[layout.start : layout.start + layout.kept]
        self._by_layer[self._position[layer_id]].copy_(kept)
        self._waiting.discard(layer_id)

    def _refuse_ids(self, layer_id: int, ids: torch.Tensor, layout: BatchLayout) -> None:
        if ids.dim() == 2 and ids.shape[1] == self.spec.top_k and not ids.is_floating_point():
            layout.select(ids.shape[0], layer_id)
        raise CaptureError(
            "what a layer reported are not its experts' ids",
            where=f"layer {layer_id}",
            expected=f"integers [rows, {self.spec.top_k}]",
            got=f"{ids.dtype} {list(ids.shape)}",
        )

    def _refuse(self, layer_id: int) -> None:
        if not 0 <= layer_id < self.spec.num_layers:
            raise LayerRangeError(
                "a layer that is none of the model's captures",
                where=f"layer {layer_id}",
                expected=f"0..{self.spec.num_layers - 1}, of which {list(self.spec.moe_layers)} route",
                remedy="layer_id is the global decoder-layer index; draft and MTP layers are not captured",
            )
        if layer_id not in self._position:
            raise CaptureError(
                "a layer that does not route by the spec captures",
                where=f"layer {layer_id}",
                expected=f"one of {list(self.spec.moe_layers)}",
                remedy="the spec is another model's, or layer_id counts MoE layers only",
            )
        raise CaptureError(
            "a layer captured twice in one step",
            where=f"layer {layer_id}",
            expected="one call of capture for all rows of the step",
            remedy="an engine that splits its batch runs begin_step and snapshot once for each part",
        )

    def snapshot(
        self,
        slots: torch.Tensor | None = None,
        dummy: bool = False,
        *,
        generations: torch.Tensor | None = None,
    ) -> StepRoutes | None:
        """End the step and keep what it routed.

        Args:
            slots: [n] KV slot of each row, integers; copied, so the engine may write its mapping again.
            dummy: A warm-up or profiling run: nothing is checked and nothing comes out.
            generations: [n] `RoutePool.tags` of the slots, if the rows are committed later than the slots may be freed.

        Returns:
            None outside a step and for a dummy run.

        Raises:
            CaptureError: a layer did not fire, or slots of another number of rows. The step has ended all the same.
        """
        layout, self._layout = self._layout, None
        if layout is None or dummy:
            return None
        missing = sorted(self._waiting)
        taken = self._buffer[: layout.kept]
        least, greatest = self._extremes(taken)
        rows, sounds = _narrowed(taken, self.dtype), None
        if layout.kind == "sharded":
            in_range = (least.amin() >= 0) & (greatest.amax() < self.spec.num_experts)
            rows, sounds = layout.gather(rows, in_range & (not missing))
        if missing:
            raise CaptureError(
                f"{len(missing)} of {self.spec.num_moe_layers} layers did not capture in this step",
                where=f"layer {missing[0]}",
                expected=f"layers {list(self.spec.moe_layers)}",
                got=f"none of {missing}",
                remedy="a forward that was replayed from a CUDA graph, or that skips layers, does not call capture "
                "(docs/capture.md); the model must be bound: bind(model, capturer)",
            )
        own_slots, own_generations = _own(slots, layout, "slots"), _own(generations, layout, "generations")
        written = None
        if self._stream is not None:
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record(torch.cuda.current_stream(self.device))
        return StepRoutes(self.spec, rows, own_slots, own_generations, least, greatest, sounds, self._stream, written)

    def _extremes(self, taken: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Least and greatest id of each layer and choice [L * K], in one pass."""
        flat = taken.view(len(taken), self.spec.num_moe_layers * self.spec.top_k)
        if not len(flat):
            none = torch.zeros(flat.shape[1], dtype=torch.int32, device=self.device)
            return none, none
        least, greatest = torch.aminmax(flat, dim=0)
        return least, greatest


def _narrowed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another dtype. Through int16, whose bits are those of uint16: few kernels know uint16 itself."""
    if dtype == torch.uint16:
        return rows.to(torch.int16).view(torch.uint16)
    return rows.to(dtype, copy=True)


def _own(vector: torch.Tensor | None, layout: BatchLayout, name: str) -> torch.Tensor | None:
    if vector is None:
        return None
    if vector.shape != (layout.num_rows,) or vector.is_floating_point():
        raise CaptureError(
            f"the {name} are not those of the step's rows",
            expected=f"integers [{layout.num_rows}] ({layout.brief()})",
            got=f"{vector.dtype} {list(vector.shape)}",
            remedy="cut the engine's mapping to the step's tokens, without padding",
        )
    return vector.detach().to(torch.int64, copy=True)


def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _in_graph_capture(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
