"""Run real Megatron-core on a machine without CUDA: `without_gpu()`, for tests and for the example on two cores.

Megatron-core 0.16 names CUDA where it means "the device": `device="cuda"` in factories, streams and events around copies, its
own generators for dropout, `"torch.cuda.FloatTensor"` in its optimizers. None of that decides what it computes. This module
puts CPU stand-ins there and leaves models, schedules, dispatchers, DDP and optimizers as they are; collectives run on gloo.
Tried with 0.16.1: TP with sequence parallelism, PP, interleaved PP, EP with the all-gather and the all-to-all dispatcher, CP
(with `r3.trainers.megatron.attention`), recompute, DDP, the distributed optimizer.

Contract: where CUDA is there, nothing happens. The stand-ins are process-wide (Megatron's names are), are put in place once, and
go when the block of the call that put them there ends. What is patched is checked first: another Megatron-core than the ones it
was written for is refused by name, not patched by guess.

The stand-ins, and what each is for:

- a `TorchFunctionMode` in the calling thread: factories and `Tensor.to` asked for a CUDA device give a CPU tensor, `pin_memory`
  is dropped, `Tensor.cuda` returns the tensor, `record_stream` does nothing, and Megatron's optimizers, which know parameters
  by the name of their type, are told the CUDA name;
- `torch.cuda.current_device`, `synchronize`, `Stream`, `Event`, `stream`, `current_stream`, `default_stream`: the all-to-all
  dispatcher and DDP order their copies with them; on a CPU everything is in order;
- the CUDA generator is the CPU generator (`torch.cuda.get_rng_state`, `manual_seed`, Megatron's `_get_cuda_rng_state` and
  `_set_cuda_rng_state`), so that `model_parallel_cuda_manual_seed`, dropout and recompute keep their meaning;
- `maybe_move_tensor_to_cpu` gives numpy split sizes for CPU tensors too: `all_to_all_single` takes numbers, not a tensor;
- `moe_utils.te_general_gemm = None`: 0.16.1 leaves the name undefined without Transformer Engine, and its router reads it;
- `torch.compile` is off (`set_stance("force_eager")`): Megatron decorates a dozen small functions with it, and compiling them for
  a CPU takes longer than a test.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megatron.core
import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

from r3.errors import ReplayError

_undo: contextlib.ExitStack | None = None


def without_gpu() -> contextlib.AbstractContextManager[None]:
    """Put the stand-ins of this module in place; they are when this returns, and go when a `with` block of the result ends.

    Call it before the first model is built. A second call changes nothing, and neither does the end of its block.

    Raises:
        ReplayError: this Megatron-core or torch has other functions than those that are replaced.
    """
    global _undo
    if torch.cuda.is_available() or _undo is not None:
        return contextlib.nullcontext()
    with contextlib.ExitStack() as undo:
        _put_in_place(undo)
        _undo = undo.pop_all()
    return _block()


def restore() -> None:
    """Take the stand-ins away, whoever put them there."""
    global _undo
    undo, _undo = _undo, None
    if undo is not None:
        undo.close()


@contextlib.contextmanager
def _block() -> Iterator[None]:
    try:
        yield
    finally:
        restore()


def _put_in_place(undo: contextlib.ExitStack) -> None:
    stream = _Stream()
    cuda: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_, **__: None,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }
    for name, stand_in in cuda.items():
        _replace(undo, torch.cuda, name, stand_in)
    _replace(undo, megatron_random, "_get_cuda_rng_state", _get_rng_state, ("device", "clone", "graph_safe"))
    _replace(undo, megatron_random, "_set_cuda_rng_state", _set_rng_state, ("new_state", "device", "graph_safe"))
    for module in (moe_utils, token_dispatcher):
        _replace(undo, module, "maybe_move_tensor_to_cpu", _move_tensor_to_cpu, ("tensor", "as_numpy", "record_stream"))
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
        undo.callback(delattr, moe_utils, "te_general_gemm")
    warns_of_own_draws = logging.getLogger(megatron_random.__name__)
    warns_of_own_draws.addFilter(_not_of_the_shared_generator)
    undo.callback(warns_of_own_draws.removeFilter, _not_of_the_shared_generator)
    undo.enter_context(torch.compiler.set_stance("force_eager"))
    undo.enter_context(_CpuDevice())


def _replace(
    undo: contextlib.ExitStack, owner: Any, name: str, stand_in: Any, parameters: Sequence[str] | None = None
) -> None:
    original = getattr(owner, name, None)
    found = None if original is None or parameters is None else tuple(inspect.signature(original).parameters)
    if original is None or (parameters is not None and found != tuple(parameters)):
        raise ReplayError(
            "this Megatron-core cannot be run without a GPU by r3: a function that it replaces is another one",
            where=f"megatron-core {megatron.core.__version__}, torch {torch.__version__}, {owner.__name__}.{name}",
            expected="a function" if parameters is None else f"parameters {', '.join(parameters)}",
            got=None if found is None else ", ".join(found),
            remedy="use megatron-core 0.16.1, or a GPU",
        )
    setattr(owner, name, stand_in)
    undo.callback(setattr, owner, name, original)


class _Event:
    """Everything on a CPU has happened when the next line runs."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream(_Event):
    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _CpuDevice(TorchFunctionMode):
    """Whoever asks for a tensor on a CUDA device gets one on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _caller_is_megatron():
            name: str = func(*args)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.")
        if func is torch.Tensor.to:
            args = tuple(torch.device("cpu") if _is_cuda(value) else value for value in args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _caller_is_megatron() -> bool:
    # Two frames up: the call of Tensor.type itself has no frame of Python's.
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.")


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:  # noqa: ARG001
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:  # noqa: ARG001
    torch.set_rng_state(new_state)


def _move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _not_of_the_shared_generator(record: logging.LogRecord) -> bool:
    """Megatron warns when the CPU generator moves inside a fork of the CUDA one; here they are one."""
    return "CPU RNG state changed" not in record.getMessage()
