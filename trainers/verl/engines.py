"""engines: veRL's FSDP engine (FSDP and FSDP2) with routing replay in the actor's passes.

A subclass of veRL's own `FSDPEngineWithLMHead`, and nothing of it is copied. Three of its methods are gone around:

    _build_fsdp_module      the replay is attached to the model before it is wrapped (and after LoRA)
    prepare_model_inputs    its input ids are what the model will see: the replay of this micro-batch begins here
    forward_step            ends it, and measures the gap from the log-probs that came out

Where each row of a micro-batch stands after veRL has packed, padded and cut it (remove-padding, bucket padding, Ulysses) is not
described here but asked: `prepare_model_inputs` is run once more on row numbers in place of token ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine.fsdp import FSDPEngineWithLMHead

from r3.errors import ConfigError
from r3.layout import Layout
from r3.partial import Replayable
from r3.replay import Replay
from r3.trainers.transformers import attach
from r3.trainers.verl.passes import ReplayPasses, layout_of, numbered, options


class ReplayFSDPEngine(ReplayPasses, FSDPEngineWithLMHead):  # type: ignore[misc]
    """veRL's `FSDPEngineWithLMHead` that replays the rollout's routes.

    Raises (in `initialize`):
        SpecError, ReplayError: the model is dense, or its routers cannot be bound.
        ConfigError: a vision model under Ulysses, which veRL cuts inside the model.
    """

    _opened: tuple[contextlib.ExitStack, Replay, list[Replayable], Layout] | None = None

    def _build_fsdp_module(self, module: torch.nn.Module) -> Any:
        if not self.engine_config.forward_only:
            if self.use_ulysses_sp and hasattr(module.config, "vision_config"):
                raise ConfigError(
                    "replay does not know where the tokens of a vision model are cut under Ulysses",
                    where="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
                    expected=1,
                    got=self.ulysses_sequence_parallel_size,
                )
            self._replay = attach(module, **options())
        return super()._build_fsdp_module(module)

    def initialize(self) -> None:
        super().initialize()
        if self._replay is not None:
            # Attached while the weights were on the host, or on no device at all (meta, ranks other than 0).
            name = get_device_name()
            self._device = torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
            self._replay.device = self._device
            self.announce(self.engine_config.strategy, self.rank)

    def forward_step(self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool) -> Any:
        if self._stats is None or self._replay is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        samples = self.read(micro_batch)
        micro_batch = micro_batch.exclude("routed_experts")  # not to the device: the replay brings what it needs
        layout = self._layout(micro_batch, samples)
        with contextlib.ExitStack() as stack:
            self._opened = stack, self._replay, [sample for sample in samples if sample is not None], layout
            try:
                loss, output = super().forward_step(micro_batch, loss_function, forward_only)
            finally:
                self._opened = None
        if self.is_mp_src_rank_with_outputs() and "log_probs" in output["model_output"]:
            self._stats.add_gap(micro_batch, output["model_output"]["log_probs"].float())
        return loss, output

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        model_inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self._opened is not None:
            (stack, replay, samples, layout), self._opened = self._opened, None
            stack.enter_context(replay.micro_batch(samples, layout, model_inputs["input_ids"]))
        return model_inputs, output_args

    def _layout(self, micro_batch: Any, samples: list[Replayable | None]) -> Layout:
        """What veRL makes of row numbers, on the host: nothing waits for a GPU."""
        traced = micro_batch.exclude("multi_modal_inputs").to("cpu")
        offsets = traced["input_ids"].offsets()
        numbers = torch.tensor(numbered(samples, offsets.diff().tolist()), dtype=torch.int64)
        traced["input_ids"] = torch.nested.nested_tensor_from_jagged(numbers, offsets=offsets)
        traced.set_non_tensor("pad_token_id", 0)
        model_inputs, _ = super().prepare_model_inputs(traced)
        return layout_of(model_inputs["input_ids"], samples)
