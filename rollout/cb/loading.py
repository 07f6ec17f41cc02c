"""loading: the model of the transformers engine, and the ways of running that are refused.

Contract: what is refused is refused by name, when the engine is made, because rows and requests could not be brought together
soundly in it, or because it was never proved.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

from r3.errors import ConfigError, EngineError, first_line


def load(
    model: str | os.PathLike[str] | torch.nn.Module, dtype: str | torch.dtype, device: str | torch.device | None
) -> tuple[Any, str | None]:
    """A model and where it came from, None if that is not known.

    Raises:
        EngineError: transformers cannot load it.
    """
    if isinstance(model, torch.nn.Module):
        live: Any = model if device is None else model.to(device)
        path = str(getattr(live.config, "_name_or_path", "")) or None
        return live, path
    name = os.fspath(model)
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise EngineError(
            f"transformers cannot load this model ({first_line(error)})",
            where=name,
            remedy="give a directory with config.json and weights, or a model id of the hub",
        ) from None
    return loaded.eval() if device is None else loaded.to(device).eval(), name


def refuse(model: Any, options: dict[str, Any]) -> None:
    """Ways of running in which rows and requests cannot be brought together soundly, each by name."""
    refusals = (
        (options.get("use_cuda_graph"), "CUDA graphs", "a replayed graph runs no router code: nothing would be captured"),
        (options.get("use_async_batching"), "asynchronous batching", "it needs a GPU, and its two overlapping batches were "
         "not proved there"),
        (options.get("varlen_compile_config") or options.get("decode_compile_config")
         or options.get("use_default_compile_configs"), "torch.compile", "batches are padded, and routers are compiled away"),
        (options.get("max_blocks_per_request"), "the block-table decode path", "it needs FlashAttention 3 and was not proved"),
        (options.get("cpu_offload_space", 0.0) != 0.0, "offloading of the cache to the host", "it moves tokens to other slots, "
         "and needs pinned memory, so that it was not proved"),
        (options.get("scheduler_type", "fifo") != "fifo", "another scheduler", "r3 follows the FIFO scheduler"),
        (not options.get("return_logprobs", True), "return_logprobs off", "a rollout without log-probs cannot be trained on"),
        (getattr(model, "_device_mesh", None) is not None, "tensor parallelism", "this engine captures in one process"),
        (torch.cuda.is_available() and getattr(model.config, "compile_config", None) is not None, "torch.compile",
         "the model's config asks for it"),
    )  # fmt: skip
    for wanted, what, why in refusals:
        if wanted:
            raise EngineError(
                f"the transformers engine does not run with {what}",
                where=type(model).__name__,
                got=why,
                remedy="leave it out, or sample with vLLM (r3 serve MODEL)",
            )


def longest(config: Any, cache: Any) -> int:
    """The longest sequence that the model has positions for and that an empty cache holds.

    A request may be given one block more than it needs (5.10.4 rounds up twice), and it needs one in each layer group. A
    sequence that does not fit would end the whole loop.
    """
    fits = (int(cache.num_blocks) // int(cache.num_groups) - 1) * int(cache.block_size) - 1
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = fits if positions is None else min(fits, int(positions))
    if longest < 2:
        raise ConfigError(
            "the cache holds no sequence",
            expected=f"at least {2 * cache.num_groups} blocks of {cache.block_size} tokens",
            got=cache.num_blocks,
            remedy="raise num_blocks",
        )
    return longest
