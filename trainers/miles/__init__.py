"""The trainer side of miles, slime's fork: what its hooks allow, so that no line of miles is changed. See docs/miles.md.

    --custom-megatron-init-path r3.trainers.miles.init                         Megatron: rows read from the shards
    "worker_process_setup_hook": "r3.trainers.miles.setup_worker"              FSDP, in Ray's runtime env: the same, and adapters

miles' FSDP actor loads no function of the user before it installs its replay, so there r3 is loaded by Ray, when a worker process
starts, and waits for the module of miles to be imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from r3.errors import ConfigError
from r3.rollout.slime.settings import Settings, require_routes_are_asked_for, require_unfused_router

__all__ = ["init", "setup_worker"]

_MEGATRON = "miles.backends.megatron_utils.actor"
_FSDP = "miles.backends.fsdp_utils.adaptations.routing_replay"


def init(args: Any) -> None:
    """miles' Megatron init hook, before the model is built: rows are read from the shards.

    Args:
        args: miles' arguments with the `r3_*` settings.

    Raises:
        ConfigError: a setting or the flag is missing, the router is fused, or miles is not as it was read.
    """
    settings = Settings.from_args(args)
    require_routes_are_asked_for(args, "r3.trainers.miles.init")
    require_unfused_router(args, "r3.trainers.miles.init")
    if settings.trainer != "lazy":
        raise ConfigError(
            "r3_trainer: direct is for slime alone",
            where="r3.trainers.miles.init",
            expected="r3_trainer: lazy",
            got=settings.trainer,
        )
    if settings.routes == "key":
        from r3.trainers.miles import fill

        fill.install(_MEGATRON)


def setup_worker() -> None:
    """Ray's setup hook of a worker process: when this process imports miles' FSDP replay, complete it.

    Costs other workers nothing: torch and miles are not imported by it.
    """
    if _FSDP in sys.modules:
        _complete()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _complete() -> None:
    from r3.trainers.miles import fill, fsdp

    fsdp.register_adapters()
    fill.install(_FSDP)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders find miles' module, and completes it when it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _FSDP:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _complete()
