"""engine: transformers' continuous batching in this process, with routes.

    engine = TransformersEngine("model", dtype="bfloat16", sampling=Sampling(max_tokens=128, seed=0))
    with engine:
        report = collect_sync(prompts, store, engine.info, sampling=engine.sampling, sampler=engine)

It is a `Sampler`: what the collector asks of a server it asks of this object, and gets what a server would have sent. The loop of
transformers' manager runs in one thread; requests come and results go through futures, so that any event loop may wait for them.

Contract: a sampled token has the raw log-prob of the forward that sampled it, and every token but the last has the row of the
first forward that it went through, or of the forward that wrote the shared block it was taken from. A failed step fails every
request with what failed. What cannot be captured soundly is refused when the engine is made: see `loading.refuse`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from r3.errors import ConfigError, EngineError, PromptError, first_line
from r3.fingerprint import model_fingerprint
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Completion, Sampling
from r3.rollout.transformers.loading import load, refuse
from r3.rollout.transformers.loop import Loop
from r3.rollout.transformers.params import Params
from r3.rollout.transformers.requests import Output, RoutedState, Rows, Run
from r3.rollout.transformers.surface import require_known
from r3.rollout.transformers.text import Text
from r3.sample import UNKNOWN_VERSION
from r3.spec import RoutingSpec

ENGINE = "transformers"
LOGPROBS_MODE = "raw_logprobs"


class TransformersEngine(Loop):
    """A rollout engine, from `start` to `close` or inside `with`.

    Args:
        model: Directory or hub id of a causal language model; or the live model itself, which keeps its weights and, after
            the engine is closed, its attention implementation.
        dtype: Of the weights, `auto` for the checkpoint's own. Ignored for a live model.
        device: Where to put the model; None leaves it where it is.
        spec: The routing; None reads it from the model's config.
        tokenizer: For text and chat prompts and stop strings; None takes the one in the model's directory, if there is one.
        sampling: How `sample` samples.
        num_blocks, block_size: KV cache in blocks of tokens. None is 1,024 on a CPU, and on an accelerator as many as
            transformers finds room for.
        max_batch_tokens: The most tokens in one forward; longer prompts are computed in pieces.
        prefix_sharing: Let equal prompt beginnings share blocks (models with full attention in every layer).
        capture: False runs the same engine without routes, for comparison.
        seed: Of requests that bring none; None draws it from the system.
        weight_version: Of the weights as they are now.
        options: More fields of transformers' `ContinuousBatchingConfig`.

    Raises:
        EngineError: a version of transformers that is not known, a model that cannot be loaded, or a way of running in which
            routes cannot be captured soundly.
        SpecError, CaptureError: no routing in the model, or routers that cannot be captured.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | torch.nn.Module,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        spec: RoutingSpec | None = None,
        tokenizer: Any = None,
        sampling: Sampling | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch_tokens: int = 512,
        prefix_sharing: bool = True,
        capture: bool = True,
        seed: int | None = None,
        weight_version: int = UNKNOWN_VERSION,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        require_known()
        live, path = load(model, dtype, device)
        refuse(live, dict(options or {}))
        for what, size in (("block_size", block_size), ("max_batch_tokens", max_batch_tokens)):
            if size < 1:
                raise ConfigError(f"{what} is out of range", where="engine", expected="at least 1", got=size)
        self.text = Text.of(tokenizer, path)
        self.sampling = sampling or Sampling()
        self.weight_version = weight_version
        if num_blocks is None and live.device.type == "cpu":
            num_blocks = 1024  # transformers would take nine tenths of the machine's memory
        try:
            config = ContinuousBatchingConfig(
                **{
                    "block_size": block_size,
                    "num_blocks": num_blocks,
                    "max_batch_tokens": max_batch_tokens,
                    "allow_block_sharing": prefix_sharing,
                    "use_cuda_graph": False,
                    "use_async_batching": False,
                    "max_blocks_per_request": 0,
                    "return_logprobs": True,
                    "seed": 0,
                    **(options or {}),
                }
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"transformers refuses these options ({first_line(error)})", where="options") from None
        routing = spec or RoutingSpec.from_config(live.config)
        super().__init__(path or type(live).__name__, live, routing, config, capture=capture)
        # The directory that the weights are those of; a live model's may have been trained since it was loaded.
        known = path is not None and not isinstance(model, torch.nn.Module) and Path(path).is_dir()
        self._weights = path if known else None
        self._torn = False
        self._seeds = random.Random(seed)
        self._ids = itertools.count()

    @property
    def info(self) -> EngineInfo:
        """What a preflight of a server finds out."""
        return EngineInfo(
            urls=(),
            spec=self.spec,
            model=self.name,
            engine=ENGINE,
            engine_version=transformers.__version__,
            model_root=self.name,
            model_fingerprint=model_fingerprint(self._weights) if self._weights is not None else "",
            weight_version=self.weight_version,
            max_model_len=getattr(self, "max_model_len", None),
            logprobs_mode=LOGPROBS_MODE,
        )

    # Requests

    async def sample(self, prompt: Prompt, *, seed: int | None = None) -> Completion:
        """One response to a prompt, as a server would have sent it; rows are [P+G-1, decoder layers, K].

        Raises:
            PromptError: too long, or of a kind that needs a tokenizer where there is none.
            EngineError: the engine failed.
        """
        tokens = self.text.tokens_of(prompt)
        output = await self.generate(tokens, Params.of(self.sampling, self.eos), seed=seed, where=prompt.where)
        return Completion(
            np.array(output.prompt_token_ids, np.int64),
            np.array(output.token_ids, np.int64),
            np.array(output.logprobs, np.float32),
            None if output.rows is None else self.hidden_layers(output.rows),
            output.finish_reason,
            self.name,
            output.weight_version,
        )

    async def generate(
        self, tokens: Sequence[int], params: Params, *, seed: int | None = None, where: str = "prompt"
    ) -> Output:
        """One response to token ids; a cancelled wait cancels the request. Errors as in `sample`."""
        run = self.submit(tokens, params, seed=seed, where=where)
        try:
            return await asyncio.wrap_future(run.future)
        except asyncio.CancelledError:
            self.cancel(run)
            raise

    def submit(self, tokens: Sequence[int], params: Params, *, seed: int | None = None, where: str = "prompt") -> Run:
        """Hand a request to the engine; its `future` holds the Output."""
        tokens = [int(token) for token in tokens]
        self._check(tokens, params, where)
        with self._lock:
            manager = self._running()
            if self._torn:
                raise EngineError(
                    "the weights are changed in part: an update of them failed",
                    where=self.name,
                    remedy="call update_weights with all of them",
                )
            seed = self._seeds.getrandbits(63) if seed is None else seed
            run = Run(
                request_id=f"r3-{next(self._ids)}",
                prompt=tokens,
                params=params,
                seed=seed,
                generator=torch.Generator(self.model.device).manual_seed(seed % 2**63),
                weight_version=self.weight_version,
                row_shape=(self.spec.num_moe_layers, self.spec.top_k) if self.capture else None,
                row_dtype=self.spec.dtype,
                decode=self.text.decode if params.stop else None,
            )
            self._runs[run.request_id] = run
            manager.submit(RoutedState.of(run))
        return run

    def cancel(self, run: Run) -> None:
        """Stop working on a request; its blocks are free at the next step."""
        manager = self._manager
        if manager is not None and run.request_id in self._runs:
            run.future.cancel()
            manager.cancel_request(run.request_id)

    def hidden_layers(self, rows: Rows) -> Rows:
        """Rows of all decoder layers, zeros for those that do not route, as vLLM sends them: [rows, layers, K]."""
        if self.spec.num_moe_layers == self.spec.num_layers:
            return rows
        out = np.zeros((len(rows), self.spec.num_layers, self.spec.top_k), rows.dtype)
        out[:, list(self.spec.moe_layers)] = rows
        return out

    @property
    def eos(self) -> frozenset[int]:
        """The model's end-of-sequence tokens."""
        given = getattr(self.model.generation_config, "eos_token_id", None)
        given = self.model.config.eos_token_id if given is None else given
        return frozenset(given if isinstance(given, (list, tuple)) else () if given is None else (given,))

    # Weights

    def update_weights(
        self, load: Mapping[str, torch.Tensor] | Callable[[torch.nn.Module], object], version: int
    ) -> None:
        """Put other weights in, between two steps of the engine, and forget what the old ones cached.

        If `load` fails, nothing is sampled until an update succeeds: nobody knows which of the weights are new.

        Args:
            load: Named tensors for `load_state_dict`, or a function that changes the model.
            version: Stamped on what is sampled from now on.

        Raises:
            EngineError: requests are under way. A sample is of one version: let them finish first.
            Exception: what `load` raised.
        """

        def change() -> bool:
            with self._lock, torch.no_grad():  # no request comes in between the weights and their number
                if self._runs and all(run.future.cancelled() for run in self._runs.values()):
                    return False  # they go with the next step
                if self._runs:
                    raise EngineError(
                        "weights cannot change under requests that are being sampled",
                        where=self.name,
                        expected="no request under way",
                        got=f"{len(self._runs)} requests",
                        remedy="wait for them (or cancel them), then update",
                    )
                self._forget()
                self._weights, self._torn = None, True
                if isinstance(load, Mapping):
                    self.model.load_state_dict(load)
                else:
                    load(self.model)
                self.weight_version, self._torn = version, False
                return True

        while not self.between_two_steps(change):
            pass

    def flush(self) -> None:
        """Forget every cached block that no request uses. For weights that were changed in place by others."""
        self.between_two_steps(self._forget)

    def _check(self, tokens: list[int], params: Params, where: str) -> None:
        self._running()
        vocabulary = self.model.config.get_text_config().vocab_size
        if not tokens or min(tokens) < 0 or max(tokens) >= vocabulary:
            raise PromptError(
                "not a prompt of this model",
                where=where,
                expected=f"at least one token id, each in 0..{vocabulary - 1}",
                got="no token" if not tokens else f"ids in {min(tokens)}..{max(tokens)}",
                remedy="use the tokenizer of this model",
            )
        if len(tokens) + params.max_tokens > self.max_model_len:
            # The first words are vLLM's, by which `r3.rollout.client` knows a prompt that is too long.
            raise PromptError(
                f"This model's maximum context length is {self.max_model_len} tokens",
                where=where,
                expected=f"at most {self.max_model_len} (the model's positions, or what the cache holds)",
                got=f"{len(tokens)} + {params.max_tokens} = {len(tokens) + params.max_tokens}",
                remedy="shorten the prompt, lower max_tokens, or make the engine with more num_blocks",
            )
        if params.max_tokens < 1:
            raise ConfigError("no token is asked for", where=where, expected="max_tokens >= 1", got=params.max_tokens)
        if params.stop and not self.text:
            raise ConfigError(
                "stop strings need a tokenizer",
                where=where,
                remedy="give the engine a tokenizer, or use stop_token_ids",
            )
