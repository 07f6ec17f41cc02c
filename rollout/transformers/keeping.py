"""keeping: routes from the model's routers to the requests, with what `r3.rollout.capture` has.

A step's rows are captured on the device, come to the host, and go to two places: to the requests whose tokens they are, and,
where blocks are shared, into the pool under the slots of those tokens.

L MoE layers, K top-k.
"""

from __future__ import annotations

import torch

from r3.errors import EngineError
from r3.rollout.capture import PendingRoutes, RoutePool, RoutingCapturer, bind
from r3.rollout.transformers.hooks import Tags
from r3.rollout.transformers.requests import Rows, Run
from r3.spec import RoutingSpec


class RowKeeper:
    """Binds a model's routers until `close`.

    Args:
        max_tokens: The most rows of a step.
        slots: Slots of the cache, 0 if none of its blocks are shared: there is no pool then.

    Raises:
        CaptureError: routers that cannot be captured.
    """

    def __init__(self, model: torch.nn.Module, spec: RoutingSpec, *, max_tokens: int, slots: int) -> None:
        device = next(model.parameters()).device
        self._capturer = RoutingCapturer(spec, max_tokens=max_tokens, device=device)
        # The cache's padding slots, sentinel and trash, lie behind the last block: no request has them.
        self._pool = RoutePool(slots, spec) if slots else None
        self.binding = bind(model, self._capturer, spec=spec)
        self._step: PendingRoutes | None = None

    def close(self) -> None:
        """Leave the model as it was."""
        self.binding.unbind()

    def begin_step(self, num_rows: int) -> None:
        self._capturer.begin_step(num_rows)

    def end_step(self, slots: torch.Tensor | None) -> None:
        step = self._capturer.snapshot(slots)
        assert step is not None
        self._step = step.to_host()

    def commit_step(self, parts: list[tuple[Run, int, int]]) -> None:
        assert self._step is not None
        rows, slots, _ = self._step.result()
        self._step = None
        if sum(count for _, _, count in parts) != len(rows):
            raise EngineError(
                "a step's rows are not those of its requests",
                expected=f"{sum(count for _, _, count in parts)} tokens of {len(parts)} requests",
                got=f"{len(rows)} rows",
                remedy="this is a defect of r3 or of an engine that was changed: report it",
            )
        if self._pool is not None:
            assert slots is not None
            self._pool.store(slots, rows)
        begin = 0
        for run, first, count in parts:
            run.place(first, rows[begin : begin + count])
            begin += count

    def rows_of(self, slots: Tags, generations: Tags) -> Rows:
        """[n, L, K] rows of slots that were written in these generations."""
        assert self._pool is not None
        rows: Rows = self._pool.gather(slots, generations).numpy()
        return rows

    def allocated(self, slots: Tags) -> Tags:
        # A block keeps its rows while it is kept for sharing, and loses them when it is handed out again, here.
        assert self._pool is not None
        return self._pool.allocate(slots, reused=True)

    def forget(self) -> None:
        """Every slot loses its rows."""
        if self._pool is not None:
            self._pool.flush()
