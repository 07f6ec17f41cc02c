"""plugin: how veRL comes to know r3's engines.

veRL loads this module in each of its processes, in one of three ways:

    VERL_ENGINE_VENDOR=r3                                     by the entry point `verl.plugins`        (veRL 0.9 and later)
    VERL_USE_EXTERNAL_MODULES=r3.trainers.verl.plugin         by name, errors are not swallowed        (with the vendor above)
    actor_rollout_ref.model.external_lib=r3.trainers.verl.plugin                                       (0.8, which has no vendors)

The first two happen while `import verl` runs, so nothing of veRL is imported here: a finder waits for `verl.workers.engine` and
registers r3's engines when it has been executed. veRL swallows the errors of entry points; what can go wrong goes wrong in that
later import, which raises in the worker. Where veRL is told of no vendor "r3", and nobody named this module in `external_lib`, it
does nothing at all.

That the plug-in was loaded is proved, not assumed: the engine announces itself (`r3.handoff`), and the agent loops refuse to
sample without the announcement.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

VENDOR = "r3"
_AFTER = "verl.workers.engine"


def install() -> None:
    """Register r3's engines as soon as veRL's are imported; at once if they are."""
    if _is_complete(sys.modules.get(_AFTER)):
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    importlib.import_module("r3.trainers.verl.registry").register()


def _is_complete(module: ModuleType | None) -> bool:
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds `verl.workers.engine` as everybody does, and registers r3's engines after it has been executed."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _AFTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register()


def _is_wanted() -> bool:
    """Whether this process was told of r3. In `external_lib` the module is named when veRL's import is long complete."""
    return os.environ.get("VERL_ENGINE_VENDOR") == VENDOR or _is_complete(sys.modules.get("verl"))


if _is_wanted():
    install()
