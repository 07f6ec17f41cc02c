"""direct: r3's own override of Megatron's routers in slime's trainer, with slime's routing replay switched off.

What it does that the lazy way cannot: rows without a record route live, in the forward and in its recompute alike; selective
recompute and prediction layers (MTP) are fine; token ids and agreement are proved per micro-batch (`r3.trainers.megatron`).

slime's forward step takes a micro-batch from `get_batch` and then calls the model chunk. So: `get_batch` is wrapped to
remember which samples it cut, and hooks on the chunk open `replay.micro_batch(...)` around the call that follows. Whether a
pass replays is what slime says of it: the log-prob pass of the actor (prefix "") and the training steps do; "ref_" and
"teacher_" route live.

slime's own replay would answer first in its patched top-k, so `init` switches it off in this process before the model is built.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from r3 import shard
from r3.errors import ConfigError, ReplayError
from r3.layout import PADDING, Layout
from r3.partial import PartialSample
from r3.rollout.slime.settings import Settings, spec_of
from r3.trainers.megatron import MegatronReplay, attach, detach
from r3.trainers.slime.finding import Shards
from r3.trainers.slime.lazy import FIELD, HOOK, host_tokens, require_found
from r3.trainers.slime.upstream import SLIME_DIRECT, find

_HANDLE = "_r3_slime"
_log = logging.getLogger("r3")


class Direct:
    """The replay of one rank's model chunks under slime.

    Attributes:
        replay: The handle of `r3.trainers.megatron`.
        active: Whether the pass that runs replays.
    """

    def __init__(self, args: Any, chunks: Sequence[nn.Module]) -> None:
        self.args, self.active = args, False
        self._slime = find(SLIME_DIRECT)
        settings, spec = Settings.from_args(args), spec_of(args)
        self._shards = Shards(settings.store, spec, HOOK)
        self._next: tuple[dict[str, Any], list[str]] | None = None
        # The shards of this rollout's samples, found once: the tokens are on the device, and asking for them waits for it. The
        # rollout is known by its first tokens, weakly: slime frees its data before the GPU is handed to the engine.
        self._rollout: weakref.ref[torch.Tensor] | None = None
        self._found: dict[int, str] = {}
        self._open: list[AbstractContextManager[Any]] = []
        self.replay: MegatronReplay = attach(list(chunks), spec)
        with ExitStack() as undo:
            undo.callback(detach, list(chunks))
            for chunk in chunks:  # after attach: its own hook ends a forward before `_leave` closes the block
                undo.callback(chunk.register_forward_pre_hook(self._enter).remove)
                undo.callback(chunk.register_forward_hook(self._leave, always_call=True).remove)
            undo.callback(self._wrap_get_batch())
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Leave slime and the model as they were."""
        self._undo.close()

    def _wrap_get_batch(self) -> Callable[[], None]:
        module = importlib.import_module("slime.backends.megatron_utils.model")  # where its forward steps look it up
        original = self._slime["get_batch"]

        def get_batch(data_iterator: Any, keys: Any, *arguments: Any, **keywords: Any) -> Any:
            members = self._members(data_iterator) if self.active else None
            batch = original(data_iterator, keys, *arguments, **keywords)
            if members is not None:
                self._next = (batch, members)
            return batch

        module.get_batch = get_batch  # type: ignore[attr-defined]
        return lambda: setattr(module, "get_batch", original)

    def _members(self, data_iterator: Any) -> list[str]:
        """The shards of the samples that the iterator gives next."""
        try:
            indices = data_iterator.micro_batch_indices[data_iterator.offset]
            data = data_iterator.rollout_data
        except AttributeError as error:
            raise ConfigError(
                "slime's data iterator is not as r3 knows it",
                where="slime.backends.megatron_utils.data.DataIterator",
                expected="rollout_data, micro_batch_indices, offset",
                got=str(error),
                remedy="docs/slime.md has the table of commits",
            ) from None
        first = data["tokens"][0]
        if self._rollout is None or self._rollout() is not first:
            require_found(data)
            self._rollout, self._found = weakref.ref(first), {}
        return [self._member(data, i) for i in indices]

    def _member(self, data: dict[str, Any], i: int) -> str:
        if i not in self._found:
            carried = data[FIELD][i] if data.get(FIELD) is not None else None
            index = data["sample_indices"][i] if data.get("sample_indices") is not None else None
            self._found[i] = self._shards.find(carried, index, host_tokens(data["tokens"][i]))
        return self._found[i]

    def _enter(self, chunk: nn.Module, *_: Any) -> None:
        if not self.active or torch._C._current_graph_task_id() != -1:
            return
        if self._next is None:
            raise ReplayError(
                "a model chunk runs without a micro-batch from slime's get_batch",
                where=type(chunk).__name__,
                expected="get_batch(...), then one call of the chunk, as slime's forward_step does",
                remedy="a custom forward step is not supported: use r3_trainer: lazy",
            )
        (batch, members), self._next = self._next, None
        layers = self.replay.layers_of(chunk)
        samples = [_read(key, layers) for key in members]
        lengths = [int(each.shape[0]) for each in batch["unconcat_tokens"]]
        layout = token_layout(self.args, self._slime, lengths)
        block = self.replay.micro_batch(chunk, samples, layout, batch["tokens"])
        block.__enter__()
        self._open.append(block)

    def _leave(self, _chunk: nn.Module, _arguments: Any, output: Any) -> None:
        if not self._open or torch._C._current_graph_task_id() != -1:
            return
        block = self._open.pop()
        if output is not None:
            block.__exit__(None, None, None)
            return
        error = RuntimeError("the forward failed")  # its own exception is the one to show
        with contextlib.suppress(RuntimeError):
            block.__exit__(RuntimeError, error, None)


def _read(key: str, layers: Sequence[int]) -> PartialSample:
    with shard.open_file(key) as file:
        return PartialSample.of_file(file, layers)


def token_layout(args: Any, slime: dict[str, Any], lengths: Sequence[int]) -> Layout:
    """Where each position of the token tensor [1, t] of slime's `get_batch` comes from, through slime's own cut.

    Args:
        args: slime's arguments.
        slime: The names of SLIME_DIRECT.
        lengths: Tokens of the micro-batch's samples.
    """
    size = slime["mpu.get_context_parallel_world_size"]()
    multiple = slime["mpu.get_tensor_model_parallel_world_size"]() * args.data_pad_size_multiplier
    starts = np.cumsum([0, *lengths])
    numbers = [torch.arange(begin, end) for begin, end in itertools.pairwise(starts.tolist())]
    if args.allgather_cp:
        rows = _padded(torch.cat(numbers), size * multiple).chunk(size)[slime["mpu.get_context_parallel_rank"]()]
    else:
        rows = _padded(torch.cat([slime["slice_with_cp"](each, PADDING) for each in numbers]), multiple)
    return Layout(rows.numpy().astype(np.int64), tuple(lengths), 1)


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    return nn.functional.pad(rows, (0, -rows.shape[0] % multiple), value=PADDING)


def before_log_prob(args: Any, model: Sequence[nn.Module], store_prefix: str) -> None:
    """slime's hook before a log-prob pass: attach at the first call, and replay in the actor's pass alone.

    Args:
        args: slime's arguments.
        model: The rank's model chunks.
        store_prefix: "" for the actor, "ref_", "teacher_".
    """
    _direct(args, model, "r3.trainers.slime.before_log_prob").active = store_prefix == ""


def before_train_step(
    args: Any,
    rollout_id: int,
    step_id: int,
    model: Sequence[nn.Module],
    optimizer: Any,  # noqa: ARG001
    opt_param_scheduler: Any,  # noqa: ARG001
) -> None:
    """slime's hook before a training step: replay in it, and say what was replayed so far.

    slime computes no log-probs before training where it can reuse those of the training forward; then this hook is the only one.
    """
    direct = _direct(args, model, "r3.trainers.slime.before_train_step")
    direct.active = True
    _log.info("r3 rollout %s step %s, so far: %s", rollout_id, step_id, direct.replay.coverage.to_dict())


def _direct(args: Any, model: Sequence[nn.Module], hook: str) -> Direct:
    if Settings.from_args(args).trainer != "direct":
        raise ConfigError(
            "this hook belongs to r3_trainer: direct",
            where=hook,
            expected="r3_trainer: direct",
            got="r3_trainer: lazy",
            remedy="set r3_trainer: direct in the file of --custom-config-path, or take the hook out of the command line",
        )
    handle: Direct | None = model[0].__dict__.get(_HANDLE)
    if handle is None:
        handle = Direct(args, model)
        model[0].__dict__[_HANDLE] = handle
    return handle
