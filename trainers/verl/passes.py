"""passes: which of veRL's passes replay, and what goes around a mini-batch; common to the FSDP and the Megatron engine.

    compute_log_prob, update_actor      the actor's own passes: replay
    compute_ref_log_prob                another engine object (`forward_only`), or with LoRA the actor without its adapter: live
    the critic                          veRL's value-model engines, which are not r3's: live
    validation                          generates only

veRL tells the passes apart by a flag in the batch (`enable_routing_replay`), but sets it only where its own replay is on; where
it is set it is obeyed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from r3.agreement import MIN_AGREEMENT
from r3.errors import ConfigError
from r3.handoff import announce_trainer
from r3.layout import Layout
from r3.partial import Replayable
from r3.trainers.verl.samples import samples_of
from r3.trainers.verl.stats import PassStats

_MIN_AGREEMENT, _ON_MISSING = "R3_VERL_MIN_AGREEMENT", "R3_VERL_ON_MISSING"


class ReplayPasses:
    """Stands before one of veRL's engines, which sets `_replay` when its model is there and calls `announce` when it is ready."""

    engine_config: Any
    _replay: Any = None  # r3.replay.Replay, or r3.trainers.megatron.MegatronReplay
    _device = torch.device("cpu")
    _stats: PassStats | None = None
    _old_log_prob: dict[str, float] | None = None
    _without_adapter = 0

    def announce(self, strategy: str, rank: int) -> None:
        """Tell the rollout side, and whoever reads the log, that this engine replays."""
        if self._replay is None:
            return
        routing = self._replay.spec.brief()
        announce_trainer(engine=type(self).__name__, strategy=strategy, rank=rank, routing=routing)
        if rank == 0:
            print(f"r3: {type(self).__name__} ({strategy}) replays the rollout's routes: {routing}", flush=True)

    def replays(self, data: Any) -> bool:
        """Whether a batch is to be replayed.

        Raises:
            ConfigError: a reference model is asked to replay.
        """
        flag = data.get("enable_routing_replay", None)
        flag = getattr(flag, "data", flag)
        if self.engine_config.forward_only:
            if flag:
                raise ConfigError(
                    "a reference model is asked to replay: its log-probs would be those of no model",
                    where=f"{type(self).__name__} with forward_only",
                    expected="enable_routing_replay unset or False",
                    got=flag,
                    remedy="replay is for the actor's passes; leave the reference's batch without the flag",
                )
            return False
        return not self._without_adapter and (flag is None or bool(flag))

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """With LoRA the reference is the actor without its adapter; its pass routes live."""
        base: Any = super()
        self._without_adapter += 1
        try:
            with base.disable_adapter():
                yield
        finally:
            self._without_adapter -= 1

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        base: Any = super()
        if not self.replays(data):
            return base.forward_backward_batch(data, loss_function, forward_only)
        assert self._replay is not None
        self._stats = PassStats(self._replay, self._replay.spec.moe_layers)
        try:
            output = base.forward_backward_batch(data, loss_function, forward_only)
            totals = self._stats.totals(
                "r3/old_log_prob/" if forward_only else "r3/", self._device, counts_rows=self.counts_rows()
            )
            if forward_only:
                # By layer for the update alone: veRL's log is long enough.
                self._old_log_prob = {
                    name: value for name, value in totals.items() if "/layer_" not in name or "_min" in name
                }
                return output
            totals |= self._old_log_prob or {}
        finally:
            self._stats = None
        self._old_log_prob = None
        if self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]
            output["metrics"].update({name: [value] for name, value in totals.items()})
        return output

    def counts_rows(self) -> bool:
        """Whether this rank's rows are counted, or another rank's that routes the same ones."""
        return True

    def read(self, micro_batch: Any, layers: Sequence[int] | None = None) -> list[Replayable | None]:
        """The samples of a micro-batch, timed; of their routes those of `layers`."""
        assert self._replay is not None
        assert self._stats is not None
        begin = time.monotonic()
        samples = samples_of(micro_batch, self._replay.spec, layers)
        self._stats.read_s += time.monotonic() - begin
        if self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]  # the other model-parallel ranks read the same ones
            self._stats.synthetic += sum(sample is None for sample in samples)
        return samples


def options() -> dict[str, Any]:
    """Arguments of `attach` from the environment of veRL's workers.

    Raises:
        ConfigError: a value that is not one.
    """
    text = os.environ.get(_MIN_AGREEMENT, str(MIN_AGREEMENT))
    try:
        share = float(text)
    except ValueError:
        raise ConfigError(
            f"{_MIN_AGREEMENT} is a share", where="environment", expected="0 (no check) to 1", got=text
        ) from None
    return {"min_agreement": share, "on_missing": os.environ.get(_ON_MISSING, "live")}


def numbered(samples: list[Replayable | None], lengths: list[int]) -> list[int]:
    """For each token of the batch its row in the concatenation of the samples that are there, from 1; 0 for synthetic ones.

    In place of token ids these go through veRL's own packing, which pads with 0: what comes out, less 1, is the layout.
    """
    numbers: list[int] = []
    first = 1
    for sample, length in zip(samples, lengths, strict=True):
        numbers += [0] * length if sample is None else range(first, first + length)
        first += 0 if sample is None else length
    return numbers


def layout_of(numbers: Any, samples: list[Replayable | None]) -> Layout:
    """The layout from numbers that have gone through veRL's packing."""
    rows = numbers.reshape(-1).cpu().numpy().astype("int64") - 1
    return Layout(rows, tuple(sample.num_tokens for sample in samples if sample is not None))
