"""loading: the model of the transformers engine, and the ways of running that are refused.

Contract: what is refused is refused by name, when the engine is made, because rows and requests could not be brought together
soundly in it, or because it was never proved.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from r3.checkpoint import require_whole
from r3.errors import ConfigError, EngineError, first_line


def load(
    model: str | os.PathLike[str] | torch.nn.Module, dtype: str | torch.dtype, device: str | torch.device | None
) -> tuple[Any, str | None]:
    """A model and where it came from, None if that is not known.

    Raises:
        EngineError: transformers cannot load it, it is not whole, or the device is not there.
    """
    if isinstance(model, torch.nn.Module):
        live: Any = model if device is None else model.to(device)
        path = str(getattr(live.config, "_name_or_path", "")) or None
        return live, path
    name = os.fspath(model)
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError("not a dtype", where="dtype", expected="auto, bfloat16, float16 or float32", got=dtype)
    try:
        loaded, keys = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise EngineError(
            f"transformers cannot load this model ({first_line(error)})",
            where=name,
            remedy="give a directory with config.json and weights, or a model id of the hub",
        ) from None
    require_whole(keys, name, EngineError)
    try:
        return loaded.eval() if device is None else loaded.to(device).eval(), name
    except (AssertionError, RuntimeError) as error:  # torch without CUDA asserts, a device that is not there raises
        raise EngineError(f"the model cannot be put there ({first_line(error)})", where=str(device)) from None


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
        (options.get("max_queue_size"), "a bounded queue", "whoever submits would wait for the engine, and it for them"),
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


class Borrowed:
    """A model that an engine has: its attention is paged and it is in evaluation mode, until `give_back`.

    In between a forward of anybody else is refused: paged attention outside of the engine runs, without a causal mask.

    Raises:
        EngineError: another engine has it.
    """

    def __init__(self, model: Any, name: str) -> None:
        self._attention = str(model.config._attn_implementation)
        if self._attention.startswith("paged|"):
            raise EngineError(
                "this model's attention is paged already: another engine runs it",
                where=name,
                remedy="close the other engine first, or give this one a model of its own",
            )
        self._model, self._name = model, name
        self._training = [module for module in model.modules() if module.training]
        self._guard = model.base_model.register_forward_pre_hook(self._refuse_others, with_kwargs=True)

    def give_back(self) -> None:
        """Leave the model as it was."""
        self._guard.remove()
        if self._model.config._attn_implementation != self._attention:
            self._model.set_attn_implementation(self._attention)
        for module in self._training:
            module.training = True

    def _refuse_others(self, _module: torch.nn.Module, _arguments: Any, keywords: dict[str, Any]) -> None:
        if not isinstance(keywords.get("cache"), PagedAttentionCache):
            raise EngineError(
                "a forward of a model that an engine has: its attention is paged, and would see what comes later",
                where=self._name,
                remedy="close the engine (or leave its `with`) before the model is trained or scored, start it again after",
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
