"""registry: put r3's engines into veRL's EngineRegistry, and refuse a veRL that has moved away from under them.

What is asked of veRL is asked by capability (a method, its parameters), not by version: forks and nightly builds carry any
number. docs/verl.md has the table of versions that were read and run.
"""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

from r3.errors import ReplayError
from r3.trainers.verl.plugin import VENDOR

DEVICES = ("cuda", "cpu")  # npu: not run, so not registered; the agent loops then refuse

# What the engine overrides or calls, with the parameters it relies on.
_FSDP_SEAMS = {
    "_build_module": ("self",),
    "initialize": ("self",),
    "prepare_model_inputs": ("self", "micro_batch"),
    "forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    "forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    "disable_adapter": ("self",),
    "is_mp_src_rank_with_outputs": ("self",),
}
_MEGATRON_SEAMS = {
    "initialize": ("self",),
    "prepare_model_inputs": ("self", "batch"),
    "forward_step": ("self", "batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"),
    "postprocess_micro_batch_func": ("self", "output", "data", "forward_only", "loss_function"),
    "forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    "disable_adapter": ("self",),
    "is_mp_src_rank_with_outputs": ("self",),
}


def register() -> None:
    """Register the engines; harmless if they are registered already.

    Raises:
        ReplayError: veRL's engines are not as they are known here.
    """
    from verl.workers.engine import base, fsdp

    require_seams(fsdp.FSDPEngineWithLMHead, _FSDP_SEAMS)
    from r3.trainers.verl.engines import ReplayFSDPEngine

    _put(base.EngineRegistry, ["fsdp", "fsdp2"], ReplayFSDPEngine)
    engine = _megatron_engine()
    if engine is not None:
        require_seams(engine, _MEGATRON_SEAMS)
        from r3.trainers.verl.megatron import ReplayMegatronEngine

        _put(base.EngineRegistry, ["megatron"], ReplayMegatronEngine)


def _megatron_engine() -> Any:
    try:
        from verl.workers.engine.megatron import MegatronEngineWithLMHead
    except ImportError:  # veRL does without it as well, with a warning of its own
        return None
    return MegatronEngineWithLMHead


def _put(registry: Any, backends: list[str], engine: type) -> None:
    engines = registry._engines.setdefault("language_model", {})
    if "vendor" in inspect.signature(registry.register).parameters:
        devices = [d for d in DEVICES if any((d, VENDOR) not in engines.get(backend, {}) for backend in backends)]
        if devices:
            registry.register(model_type="language_model", backend=backends, device=devices, vendor=VENDOR)(engine)
        return
    # 0.8 has one engine per device, and the first that registers stays. The user named r3 in external_lib.
    for backend in backends:
        for device in DEVICES:
            engines.setdefault(backend, {})[device] = engine


def require_seams(engine: type, seams: dict[str, tuple[str, ...]]) -> None:
    """Refuse an engine class without these methods, or with other parameters before its optional ones.

    Raises:
        ReplayError: naming the method, and what was found.
    """
    for name, parameters in seams.items():
        method = getattr(engine, name, None)
        found = tuple(inspect.signature(method).parameters) if method is not None else ()
        if found[: len(parameters)] != parameters:
            raise ReplayError(
                "veRL's engine is not as r3 knows it",
                where=f"verl {importlib.metadata.version('verl')}, {engine.__name__}.{name}",
                expected=f"({', '.join(parameters)}, ...)",
                got=f"({', '.join(found)})" if found else "no such method",
                remedy="use a veRL of the table in docs/verl.md (0.8.0, 0.9.0, 0.9.1), or a newer r3",
            )
