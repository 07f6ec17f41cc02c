"""hooks: where rows of a forward meet requests and KV slots, as subclasses of transformers' own classes.

One step of the engine, and what is added to it:

    prepare_next_batch   commands of other threads (weights, flush) | schedules; a prefix match hands its blocks' rows over
    _generation_step     begin the capture | forward and sampling   | snapshot of the step
    update_batch         rows to their requests, and to the slots   | tokens to their requests

A row's request and position come from the batch that the engine prepared: its requests in order, each with its number of query
tokens and the position behind them. A row's slot is the write index of the full-attention group, the very number under which the
keys and values of that token are stored. So a shared block's rows are those that were captured when its keys were written.

Contract: every row of a forward goes to exactly one request or the step fails; a failed step fails every request. Blocks that
are handed out again get a new generation in the pool, so that no row of their former owner comes out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache, group_layers_by_attn_type
from transformers.generation.continuous_batching.cache_manager import BlockManager
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from r3.errors import EngineError
from r3.rollout.capture import full_attention_group
from r3.rollout.transformers.sampling import RawLogprobsRunner

Tags = npt.NDArray[np.int64]

FIRST_SLOT = 1  # the cache counts its slots from 0, the pool reserves row 0


class Listener(Protocol):
    """What the engine is told, in its own thread."""

    def between_steps(self) -> None:
        """Before anything is scheduled."""

    def begin_step(self, num_rows: int) -> None:
        """Before a forward of so many rows."""

    def end_step(self, slots: torch.Tensor | None) -> None:
        """After the forward; the KV slot of each row, None in a model whose blocks are not shared."""

    def commit_step(self, parts: list[tuple[Any, int, int]]) -> None:
        """The forward's rows are (Run, first position, number of rows), in order."""

    def shared(self, request_id: str, slots: Tags, generations: Tags) -> None:
        """A request starts with slots that others have written: [prefix tokens], with the generations they were written in."""

    def allocated(self, slots: Tags) -> Tags:
        """Slots are given to new tokens; their generations from now on."""

    def evicted(self) -> None:
        """A running request lost its blocks; it will be computed again."""

    def cancelled(self, state: RequestState) -> None:
        """A request was taken out; nothing more comes of it."""

    def finished(self, output: GenerationOutput) -> None:
        """A request ended, or failed (`output.error`)."""

    def died(self, error: Exception) -> None:
        """The engine cannot go on."""


class RoutedBlocks(BlockManager):  # type: ignore[misc]
    """Tells which blocks are handed out, and vouches for those that are shared."""

    listener: Listener | None = None

    def get_free_blocks(
        self, n_blocks: int, last_block_id: int | None, shareable: bool, group_id: int
    ) -> list[int] | None:
        blocks: list[int] | None = super().get_free_blocks(n_blocks, last_block_id, shareable, group_id)
        if blocks and self.listener is not None:
            generations = self.listener.allocated(slots_of(blocks, self.block_size)).reshape(len(blocks), -1)
            for block, each in zip(blocks, generations, strict=True):
                # On the Block itself, which is another object each time that its number is handed out.
                self._id_to_block[block].generations = each
        return blocks

    def generations_of(self, blocks: list[int]) -> Tags:
        """Generations of the slots of blocks that were found by the hash of their contents.

        Raises:
            EngineError: a block is not what the prefix cache takes it for: it was handed out again since.
        """
        for number in blocks:
            block = self._id_to_block[number]
            if not block.is_complete or self._hash_to_id.get(block.hash) != number:
                raise EngineError(
                    "the prefix cache shares a block that holds something else",
                    where=f"block {number}",
                    expected="the block that was completed under this hash",
                    got=repr(block),
                    remedy="turn prefix sharing off, and report it: this is a defect of the engine",
                )
        return np.concatenate([self._id_to_block[number].generations for number in blocks])

    def forget(self) -> None:
        """Make every block that is not in use one without contents: nothing of before can be shared any more.

        Raises:
            EngineError: blocks are in use.
        """
        if not self.has_enough_free_blocks(self.num_free_blocks) or self._init_block_ids or self._hash_to_id:
            raise EngineError(
                "the prefix cache could not be emptied",
                expected="no block in use",
                got=f"{self.num_blocks - self.num_free_blocks} blocks in use",
                remedy="let all requests finish first",
            )


class RoutedCache(PagedAttentionCache):  # type: ignore[misc]
    """Tells which slots a request takes over from others."""

    listener: Listener | None = None

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._block_manager = RoutedBlocks(self.num_blocks, self.block_size, tp_on=False)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        length = int(super().search_prefix_match(request_id, prompt_ids))
        if length and self.listener is not None:
            blocks = self.group_cache_managers[0].block_table[request_id]
            # The engine computes a prompt's last token in any case: its logits are what is sampled from.
            kept = min(length, len(prompt_ids) - 1)
            generations = self._block_manager.generations_of(blocks)[:kept]
            self.listener.shared(request_id, slots_of(blocks, self.block_size)[:kept], generations)
        return length


class RoutedScheduler(FIFOScheduler):  # type: ignore[misc]
    """Tells of evictions, and mends one thing."""

    listener: Listener | None = None

    def pop_request_to_evict(self) -> tuple[str, RequestState]:
        if self.listener is not None:
            self.listener.evicted()
        victim: tuple[str, RequestState] = super().pop_request_to_evict()
        return victim

    def clear_cancelled_requests(self) -> list[RequestState]:
        # After an eviction 5.10.4 admits nothing until a request finishes; if all that run are cancelled, none ever does.
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        for state in cancelled:
            if self.listener is not None:
                self.listener.cancelled(state)
        if cancelled and not self.active_requests:
            self.block_new_requests = False
        return cancelled


class RoutedProcessor(ContinuousBatchProcessor):  # type: ignore[misc]
    """One step with capture around it. `capture_group` is the cache group whose slots are followed, None for none."""

    model_runner: Any

    def __init__(self, *, listener: Listener, capture: bool, capture_group: int | None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.listener, self.capture, self.capture_group = listener, capture, capture_group
        self.steps = self.tokens = 0
        runner: Any = self.model_runner
        self.model_runner = RawLogprobsRunner(
            logit_processor=runner.logit_processor,
            cb_config=runner.cb_config,
            inputs_and_outputs=runner.inputs_and_outputs,
            cache=runner.cache,
            do_sample=runner.do_sample,
            return_logprobs=runner.return_logprobs,
        )

    def prepare_next_batch(self) -> bool:
        self.listener.between_steps()
        return bool(super().prepare_next_batch())

    def _generation_step(self, model: torch.nn.Module) -> None:
        self.steps += 1
        self.tokens += int(self.inputs_and_outputs.num_q_tokens)
        if not self.capture:
            super()._generation_step(model)
            return
        self.listener.begin_step(int(self.inputs_and_outputs.num_q_tokens))
        super()._generation_step(model)
        self.listener.end_step(self._slots())

    def update_batch(self) -> None:
        if self.capture:
            parts = []
            for each in self.inputs_and_outputs.requests_in_batch:
                # The engine has moved the position behind this step's tokens when it prepared them.
                parts.append((each.state.run, each.state.position_offset - each.query_length, each.query_length))
            self.listener.commit_step(parts)
        super().update_batch()

    def _slots(self) -> torch.Tensor | None:
        if self.capture_group is None:
            return None
        io = self.inputs_and_outputs
        slots: torch.Tensor = io.write_index_storage[self.capture_group, : io.num_q_tokens] + FIRST_SLOT
        return slots


class _Router(OutputRouter):  # type: ignore[misc]
    """Hands outputs to the engine in place of the manager's queue."""

    def __init__(self, deliver: Callable[[GenerationOutput], None]) -> None:
        super().__init__()
        self._deliver = deliver

    def deliver(self, output: GenerationOutput) -> None:
        self._deliver(output)

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self._deliver(output)


class RoutedManager(ContinuousBatchingManager):  # type: ignore[misc]
    """transformers' manager that builds the classes above."""

    def __init__(self, *, listener: Listener, capture: bool, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.listener, self.capture = listener, capture
        self.output_router = _Router(listener.finished)

    def submit(self, state: RequestState) -> None:
        """As `add_request`, with a state of our own."""
        self.input_queue.put(state)
        self.wake()

    def wake(self) -> None:
        """End the loop's wait for requests."""
        self._has_new_requests.set()

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        if self.batch_processor is not None:
            self.batch_processor.reset()
            return self.batch_processor
        cache = RoutedCache(
            config=self.model.config,
            continuous_batching_config=self.continuous_batching_config,
            device=self.model.device,
            distributed_helper=self.distributed_helper,
            tp_plan=getattr(self.model, "tp_plan", {}),
            dtype=self.model.dtype,
        )
        self._use_prefix_sharing = cache.use_prefix_sharing
        scheduler = RoutedScheduler(cache)
        scheduler.listener = self.listener
        shares = self.capture and cache.use_prefix_sharing
        if shares:
            cache.listener = cache._block_manager.listener = self.listener
        # The process's generators are the trainer's, where there is one in this process: transformers seeds them here.
        with torch.random.fork_rng(devices=None if torch.cuda.is_available() else []):
            return RoutedProcessor(
                listener=self.listener,
                capture=self.capture,
                capture_group=full_attention_group(group_layers_by_attn_type(self.model.config)) if shares else None,
                cache=cache,
                config=self.model.config,
                generation_config=self.generation_config,
                continuous_batching_config=self.continuous_batching_config,
                logit_processor=self.logit_processor,
                input_queue=self.input_queue,
                cancel_queue=self.cancel_queue,
                output_router=self.output_router,
                background_thread_status=self.background_thread_status,
                model_device=self.model.device,
                model_dtype=self.model.dtype,
                scheduler=scheduler,
                distributed_helper=self.distributed_helper,
            )

    def _handle_critical_error(self, error: Exception, batch_processor: ContinuousBatchProcessor | None) -> None:
        self.listener.died(error)
        super()._handle_critical_error(error, batch_processor)


def slots_of(blocks: Sequence[int], block_size: int) -> Tags:
    """The slots of blocks, in order: [len(blocks) * block_size] int64."""
    starts = np.array(blocks, np.int64) * block_size + FIRST_SLOT
    return (starts[:, None] + np.arange(block_size)).reshape(-1)
