"""surface: what of transformers' continuous batching r3 builds on, checked before anything is built on it.

The engine has no plug-in points. r3 subclasses its classes and overrides methods, some of them private, and relies on the order
in which they call each other. That was read in the versions below; another version is refused by name, and so is an
installation of the right number whose signatures differ (a fork, a patched build).
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers.generation.continuous_batching import (
    cache,
    cache_manager,
    continuous_api,
    model_runner,
    requests,
    scheduler,
)

from r3.errors import EngineError

VERSIONS = ("5.10.4",)

_CALLS: tuple[tuple[Any, str, str], ...] = (
    (
        continuous_api.ContinuousBatchingManager,
        "__init__",
        "self model generation_config continuous_batching_config workload_hints",
    ),
    (continuous_api.ContinuousBatchingManager, "_create_batch_processor", "self"),
    (continuous_api.ContinuousBatchingManager, "_handle_critical_error", "self error batch_processor"),
    (continuous_api.ContinuousBatchingManager, "cancel_request", "self request_id"),
    (
        continuous_api.ContinuousBatchProcessor,
        "__init__",
        "self cache config generation_config continuous_batching_config logit_processor input_queue cancel_queue output_router "
        "background_thread_status model_device model_dtype scheduler distributed_helper",
    ),
    (continuous_api.ContinuousBatchProcessor, "prepare_next_batch", "self"),
    (continuous_api.ContinuousBatchProcessor, "_generation_step", "self model"),
    (continuous_api.ContinuousBatchProcessor, "update_batch", "self"),
    (continuous_api.OutputRouter, "deliver", "self output"),
    (continuous_api.OutputRouter, "deliver_batch", "self outputs"),
    (
        cache.PagedAttentionCache,
        "__init__",
        "self config continuous_batching_config device distributed_helper tp_plan dtype",
    ),
    (cache.PagedAttentionCache, "search_prefix_match", "self request_id prompt_ids"),
    (cache_manager.BlockManager, "__init__", "self num_blocks block_size tp_on"),
    (cache_manager.BlockManager, "get_free_blocks", "self n_blocks last_block_id shareable group_id"),
    (cache_manager.BlockManager, "has_enough_free_blocks", "self n_blocks"),
    (
        cache_manager.FullAttentionCacheAllocator,
        "get_write_indices",
        "self request_id past_length query_length",
    ),
    (scheduler.Scheduler, "clear_cancelled_requests", "self"),
    (scheduler.Scheduler, "pop_request_to_evict", "self"),
    (
        model_runner.ModelRunner,
        "__init__",
        "self logit_processor cb_config inputs_and_outputs cache do_sample return_logprobs",
    ),
    (model_runner.ModelRunner, "_sample", "self scores logits_indices output_ids"),
    (requests.RequestState, "update_and_check_completion", "self token_id logprob"),
    (requests.RequestState, "create_equivalent_initial_request", "self"),
)


def require_known() -> None:
    """Raise unless the installed transformers is one whose continuous batching r3 knows.

    Raises:
        EngineError: another version, or a method with another signature.
    """
    if transformers.__version__ not in VERSIONS:
        raise EngineError(
            f"the continuous batching of transformers {transformers.__version__} is not known",
            where=str(transformers.__file__),
            expected=f"transformers {' or '.join(VERSIONS)}",
            got=transformers.__version__,
            remedy=f'pip install "transformers=={VERSIONS[-1]}", or sample with vLLM (r3 serve MODEL)',
        )
    for owner, name, expected in _CALLS:
        method = getattr(owner, name, None)
        got = "no such method" if method is None else " ".join(inspect.signature(method).parameters)
        if got != expected:
            raise EngineError(
                f"transformers' {owner.__name__}.{name} is not as r3 knows it",
                where=str(transformers.__file__),
                expected=f"({expected.replace(' ', ', ')})",
                got=got if method is None else f"({got.replace(' ', ', ')})",
                remedy=f"install an unmodified transformers {VERSIONS[-1]}",
            )
