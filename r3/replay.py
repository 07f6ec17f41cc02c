"""Replay: what is attached to one live model and hands each router the recorded experts of the current micro-batch.

Scope: this module knows micro-batches, autograd and counters, and no framework. `r3.trainers` binds it to routers, each of
which calls `rows_for(layer, ...)` in its forward and replaces only the answer of its top-k selection.

Lifecycle: `with replay.micro_batch(samples, layout, token_ids):` makes a micro-batch current; every forward of the model
inside it replays. Outside, routers run live. Activation checkpointing runs a router again during *backward*, when other
micro-batches may be current, so a forward ties its micro-batch to the graph: a gradient hook on the model's output names
the micro-batch when its backward begins, and the hook's closure is what keeps the rows alive. There is no queue to get
out of step, and a forward without a graph keeps nothing.

Missing rows (no record, padding) use the router's own choice, in the forward and in its recompute alike.

Proof: token ids are compared with the samples' at the layout's rows before anything runs; every bound router must fire
exactly once per forward; `coverage` counts rows replayed and live, by reason; on some rows of each sample the recorded
experts are compared with the router's own choice (`r3.agreement`).

n local rows, L MoE layers, K top-k, E experts.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from r3.agreement import MIN_AGREEMENT, Agreement, AgreementCheck
from r3.errors import ReplayError
from r3.layout import Layout
from r3.microbatch import MicroBatch, Recording, TokenCheck
from r3.partial import Replayable, known_rows
from r3.spec import RoutingSpec


@dataclass
class Coverage:
    """Rows of all forwards so far, counted per position of a micro-batch (times layers gives router rows).

    Attributes:
        forwards: Forwards that replayed.
        replayed: Rows that used recorded experts.
        unrecorded: Rows of tokens without a record; they routed live. The last token of a sequence has none.
        padding: Rows without a token; they routed live.
    """

    forwards: int = 0
    replayed: int = 0
    unrecorded: int = 0
    padding: int = 0

    @property
    def share(self) -> float:
        """Replayed rows as a share of the rows that hold a token."""
        return self.replayed / max(self.replayed + self.unrecorded, 1)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "share": self.share}


class Replay:
    """The replay handle of one model; made by `r3.trainers`, not by hand.

    Args:
        spec: The routing of the rollout model.
        layers: Global indices of the decoder layers whose routers are bound (all MoE layers, or a pipeline stage's).
        device: Where the routers run.
        on_missing: `live` (rows without a record use the router's own choice) or `raise`.
        min_agreement: The least share of a sample's recorded experts that the router would choose itself; 0 for no check.

    Attributes:
        coverage: Counts of rows replayed and live.
        agreement: Recorded ids that the router would have chosen itself, on the rows that were compared.
    """

    def __init__(
        self,
        spec: RoutingSpec,
        layers: Sequence[int],
        device: torch.device,
        *,
        on_missing: str = "live",
        min_agreement: float = MIN_AGREEMENT,
    ) -> None:
        if on_missing not in ("live", "raise"):
            raise ReplayError("unknown policy for rows without a record", expected="live or raise", got=on_missing)
        self.spec, self.on_missing, self.device = spec, on_missing, device
        if not 0 <= min_agreement <= 1:
            raise ReplayError("min_agreement is a share", expected="0 (no check) to 1", got=min_agreement)
        self.min_agreement = min_agreement
        self.coverage, self.agreement = Coverage(), Agreement()
        self._unjudged: list[AgreementCheck] = []
        self._position = {layer: spec.moe_layers.index(layer) for layer in layers}
        self._fired = dict.fromkeys(self._position, 0)
        self._current: MicroBatch | Recording | None = None
        self._num_forwards = 0
        # Of the backward that is running, announced by the gradient of the model's output. Weak, because a backward that
        # fails never says that it has ended.
        self._backward: weakref.ref[MicroBatch | Recording | _Live] | None = None

    @contextlib.contextmanager
    def micro_batch(
        self,
        samples: Sequence[Replayable],
        layout: Layout,
        token_ids: torch.Tensor | None,
        *,
        rows: Layout | None = None,
    ) -> Iterator[MicroBatch]:
        """Replay these samples in the forwards inside the `with` block; their backward may come later, in any order.

        Args:
            samples: The samples of the micro-batch, in the order of the layout.
            layout: Where each local row comes from.
            token_ids: The trainer's own input ids of the local positions, any shape in the layout's order. They are
                compared with the samples' tokens: at once if they are on the host; on a GPU there, and the result is read
                when the block ends, so that nothing waits for the device before the forward is queued.

        Raises:
            ReplayError: a token differs, a sample is of another model, a row is missing under on_missing="raise", no
                forward of the model happened in the block, or the recorded experts are not those of this model. The last
                is known when the forward has run, so on a GPU the first blocks wait for it at their end, before any
                gradient; later ones do not, and a fault is raised at the end of a later block.
        """
        check = TokenCheck(samples, layout, token_ids)
        for sample in samples:
            self.spec.require_same(sample.spec, f"sample {sample.sample_id!r}")
        if self.on_missing == "raise":
            _check_complete(samples, layout if rows is None else rows)  # under sequence parallelism, this rank's alone
        if self.spec.zero_experts:
            _check_zero_experts(samples)
        device = self.device if token_ids is None or token_ids.device.type == "cpu" else token_ids.device
        batch = MicroBatch(
            samples,
            layout if rows is None else rows,
            self.spec,
            device,
            layers=list(self._position),
            min_agreement=self.min_agreement,
        )
        with self._current_for(batch):
            yield batch
            check.finish()
        if batch.agreement is not None:
            self._judge(batch.agreement)

    def _judge(self, check: AgreementCheck) -> None:
        check.start()
        self._unjudged.append(check)
        wait = self.coverage.forwards <= _WAITING_FORWARDS or len(self._unjudged) > _MOST_UNJUDGED
        while self._unjudged and (wait or self._unjudged[0].ready):
            self._unjudged.pop(0).finish(self.agreement)

    @contextlib.contextmanager
    def record(self, layout: Layout) -> Iterator[Recording]:
        """Let the routers choose in the forward inside the `with` block, and keep what they chose (R2).

        Replay it with samples whose routes are `recording.routes()`. Meant for the pass that computes the old log-probs.

        Args:
            layout: Where each row of a router comes from.
        """
        recording = Recording(layout, self.spec, list(self._position))
        with self._current_for(recording):
            yield recording

    @contextlib.contextmanager
    def _current_for(self, batch: MicroBatch | Recording) -> Iterator[None]:
        if self._current is not None:
            raise ReplayError("a micro-batch is already being replayed", remedy="leave its `with` block first")
        self._current = batch
        before = self._num_forwards
        try:
            yield
        finally:
            self._current = None
        if self._num_forwards == before:
            raise ReplayError(
                "no forward of the attached model happened for this micro-batch",
                expected="model(...) inside `with replay.micro_batch(...)`",
                remedy="call the model that was given to attach(), not a submodule or a copy of it",
            )

    def rows_for(self, layer: int, num_rows: int) -> MicroBatch | Recording | None:
        """For a router's forward: the micro-batch to replay, or None to route live.

        Raises:
            ReplayError: the router sees another number of rows, or runs in a backward that no hook announced.
        """
        if torch._C._current_graph_task_id() == -1:
            batch = self._current
            self._fired[layer] += batch is not None
        else:
            announced = None if self._backward is None else self._backward()
            if announced is None:
                raise ReplayError(
                    "a router was recomputed in a backward whose micro-batch is not known",
                    where=f"layer {layer}",
                    expected="a forward through the model given to attach(), whose output the loss is computed from",
                    remedy="attach to the module that the loop calls, and give a checkpoint around the whole model "
                    "use_reentrant=False",
                )
            batch = None if isinstance(announced, _Live) else announced
        if batch is not None and batch.num_rows != num_rows:
            raise ReplayError(
                "the router sees another number of rows than the layout has",
                where=f"layer {layer}",
                expected=f"{batch.num_rows} rows",
                got=num_rows,
                remedy="the layout must describe the local tokens exactly as the router receives them, padding included",
            )
        return batch

    def position_of(self, layer: int) -> int:
        """Where a bound layer stands on the layer axis of the routes."""
        return self._position[layer]

    def begin_forward(self) -> None:
        """Forward pre-hook of the model."""
        if torch._C._current_graph_task_id() == -1:
            self._fired, self._backward = dict.fromkeys(self._fired, 0), None

    def end_forward(self, outputs: Any) -> None:
        """Forward hook of the model: every router fired once; tie the micro-batch to the outputs' graph."""
        if torch._C._current_graph_task_id() != -1:
            return
        batch = self._current
        if batch is not None:
            wrong = {layer: count for layer, count in self._fired.items() if count != 1}
            if wrong:
                raise ReplayError(
                    "not every router replayed exactly once in this forward",
                    where=f"layers {sorted(wrong)}",
                    expected="1 call each",
                    got=list(wrong.values()),
                    remedy="a layer was skipped, shared or replaced after attach(); attach again to the model as it runs",
                )
            self._num_forwards += 1
            self.coverage.forwards += 1
            self.coverage.replayed += batch.num_replayed
            self.coverage.unrecorded += batch.num_unrecorded
            self.coverage.padding += batch.num_padding

        kept = _LIVE if batch is None else batch

        def name_micro_batch(
            _gradient: torch.Tensor,
        ) -> None:  # this closure keeps the rows, as long as the graph lives
            self._backward = weakref.ref(kept)
            torch.autograd.Variable._execution_engine.queue_callback(self._forget_backward)

        for tensor in _tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(name_micro_batch)  # type: ignore[no-untyped-call]

    def _forget_backward(self) -> None:
        self._backward = None


class _Live:
    """Stands for a forward that routed live, so that its recompute does as well."""


_LIVE = _Live()
_WAITING_FORWARDS = 8  # of a handle: a wrong set-up shows at once
_MOST_UNJUDGED = 16


def _check_complete(samples: Sequence[Replayable], layout: Layout) -> None:
    ends = np.cumsum([sample.num_tokens for sample in samples])
    here = np.zeros(int(ends[-1]) if len(ends) else 0, np.bool_)
    here[layout.rows[layout.rows >= 0]] = True
    for sample, end in zip(samples, ends, strict=True):
        # The last token is never fed back, so its row is absent by nature and its output is not used by the loss.
        missing = np.flatnonzero(here[end - sample.num_tokens : end - 1] & ~sample.routes.recorded[:-1])
        if len(missing):
            raise ReplayError(
                f"{len(missing)} of {sample.num_tokens} rows have no record",
                where=f"sample {sample.sample_id!r}, token {int(missing[0])}",
                remedy='collect the sample again, or attach with on_missing="live"',
            )


def _check_zero_experts(samples: Sequence[Replayable]) -> None:
    """vLLM returns id 0 in place of each zero-computation expert. A token takes several of those as a rule, so a sample in
    which id 0 never repeats has the experts' own ids."""
    for sample in samples:
        ids = np.sort(sample.routes.ids, axis=-1)
        repeated = np.argwhere((ids[..., 1:] == ids[..., :-1]).any(axis=-1) & known_rows(sample))
        if len(repeated):
            raise ReplayError(
                "the zero-computation experts of this model were recorded as expert 0: which were chosen is lost",
                where=f"sample {sample.sample_id!r}, token {int(repeated[0, 1])}, MoE layer {int(repeated[0, 0])}",
                remedy="replay the trainer's own choice instead (replay.record), or routes of an engine that returns the "
                "ids of zero experts",
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a model's output: tensors, sequences, mappings (transformers' ModelOutput is one)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
