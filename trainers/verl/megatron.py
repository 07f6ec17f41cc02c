"""megatron: veRL's Megatron engine with routing replay in the actor's passes.

A subclass of veRL's own `MegatronEngineWithLMHead`; the replay is `r3.trainers.megatron`'s, on the model chunks that veRL has
built. veRL's own router replay (`router_replay.mode`) must be off: both would answer the same routers.

Where each row stands after veRL has packed a micro-batch (alignment to tensor and context parallel ranks, FP8, buckets, the cut
over context parallel ranks) is asked of veRL's own function, which is run on row numbers in place of token ids.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils.device import get_device_id, get_device_name
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from r3.errors import ConfigError
from r3.layout import Layout
from r3.partial import Replayable
from r3.spec import RoutingSpec
from r3.trainers.megatron import attach
from r3.trainers.verl.passes import ReplayPasses, layout_of, numbered, options


class ReplayMegatronEngine(ReplayPasses, MegatronEngineWithLMHead):  # type: ignore[misc]
    """veRL's `MegatronEngineWithLMHead` that replays the rollout's routes.

    Raises:
        ConfigError: veRL's own replay is on, or a way of cutting tokens that is not known here.
        SpecError, ReplayError (in `initialize`): the model is dense, or its routers cannot be bound (fused ones among them).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.engine_config.forward_only:
            return
        where = "actor_rollout_ref.actor.megatron"
        if self.engine_config.router_replay.mode != "disabled":
            raise ConfigError(
                "two would replay: veRL's own router replay and r3's engine",
                where=f"{where}.router_replay.mode",
                expected="disabled",
                got=self.engine_config.router_replay.mode,
            )
        if getattr(self.engine_config, "dynamic_context_parallel", False):
            raise ConfigError(
                "replay does not know how tokens are cut here",
                where=f"{where}.dynamic_context_parallel",
                expected=False,
                got=True,
            )
        if hasattr(self.model_config.hf_config, "vision_config"):
            raise ConfigError(
                "replay does not know where the tokens of a vision model stand in Megatron",
                where="actor_rollout_ref.model.path",
                expected="a text model",
                got=str(self.model_config.hf_config.model_type),
            )

    def initialize(self) -> None:
        super().initialize()
        if not self.engine_config.forward_only:
            self._replay = attach(self.module, RoutingSpec.from_config(self.model_config.hf_config), **options())
            name = get_device_name()
            self._device = torch.device(name) if name == "cpu" else torch.device(name, get_device_id())
            self.announce("megatron", torch.distributed.get_rank())

    def counts_rows(self) -> bool:
        """Rows are counted on the last pipeline stage, and without sequence parallelism on one tensor parallel rank: the
        others route the same rows."""
        alone = mpu.get_tensor_model_parallel_rank() == 0 or self.tf_config.sequence_parallel
        return bool(mpu.is_pipeline_last_stage(ignore_virtual=True) and alone)

    def forward_step(
        self,
        batch_iter: Iterator[Any],
        model: torch.nn.Module,
        logits_processor_func: Callable[..., Any] | None,
        postprocess_micro_batch_func: Callable[..., Any],
    ) -> Any:
        step = super().forward_step
        if self._stats is None or self._replay is None:
            return step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)
        batch = next(batch_iter)
        samples = self.read(batch, self._replay.layers_of(model) or None)
        batch = batch.exclude("routed_experts")  # not to the device: the replay brings what it needs
        there: list[Replayable] = [sample for sample in samples if sample is not None]
        layout, token_ids = self._layout(batch, samples, model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._replay.micro_batch(model, there, layout, token_ids))
            return step(iter([batch]), model, logits_processor_func, postprocess_micro_batch_func)

    def postprocess_micro_batch_func(self, output: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().postprocess_micro_batch_func(output, data, *args, **kwargs)
        if self._stats is not None and self.is_mp_src_rank_with_outputs() and "log_probs" in output:
            self._stats.add_gap(data, output["log_probs"].detach().float())
        return result

    def _layout(
        self, batch: Any, samples: list[Replayable | None], model: torch.nn.Module
    ) -> tuple[Layout, torch.Tensor | None]:
        """Where this rank's token tensor comes from, and that tensor (None on a stage that embeds nothing)."""
        input_ids = batch["input_ids"].to("cpu")
        lengths = input_ids.offsets().diff().tolist()
        numbers = torch.tensor(numbered(samples, lengths), dtype=torch.int64)
        numbers = torch.nested.nested_tensor_from_jagged(numbers, offsets=input_ids.offsets())
        layout = layout_of(self._packed(numbers, batch, model), samples)
        packed = self._packed(input_ids, batch, model)
        layout = Layout(layout.rows, layout.lengths, packed.shape[0])
        return layout, packed if unwrap_model(model).pre_process else None

    def _packed(self, tensor: torch.Tensor, batch: Any, model: torch.nn.Module) -> torch.Tensor:
        """[1, t] or [b, s]: what veRL's forward makes of a jagged tensor."""
        inner = unwrap_model(model)
        fp8 = inner.config.fp8 in ("e4m3", "hybrid")
        packed: torch.Tensor
        if not self.engine_config.use_remove_padding:
            forced = batch.get("forced_max_seqlen", None)
            forced = getattr(forced, "data", forced)
            packed = preprocess_bshd_engine(tensor, use_fp8_padding=fp8, forced_max_seqlen=forced)[0]
            return packed
        bucket = self.engine_config.pad_to_length_bucket if self.engine_config.pad_to_length else None
        layout = self._get_context_parallel_layout(inner)
        packed = preprocess_thd_engine(tensor, use_fp8_padding=fp8, pad_to_length_bucket=bucket, cp_layout=layout)[0]
        return packed
