"""Every dotted path that docs and configurations give for slime and miles is there, and is called as the framework calls it."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from r3.rollout.slime.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    [ROOT / "docs/slime.md", ROOT / "docs/miles.md", *ROOT.glob("configs/slime/*"), *ROOT.glob("configs/miles/*")]
)
PATH = re.compile(r"\br3\.(?:rollout|trainers)\.(?:slime|miles)\.\w+")

# How the frameworks call what is at each path: positional arguments, then keywords.
CALLS: dict[str, tuple[int, tuple[str, ...]]] = {
    "r3.rollout.slime.write_shard": (2, ("rollout_id", "evaluation")),
    "r3.rollout.slime.write_shard_async": (2, ("rollout_id", "evaluation")),
    "r3.rollout.slime.generate": (3, ("evaluation",)),
    "r3.trainers.slime.init": (1, ()),
    "r3.trainers.slime.before_log_prob": (3, ()),
    "r3.trainers.slime.before_train_step": (6, ()),
    "r3.trainers.slime.kl_report": (3, ()),
    "r3.trainers.slime.no_correction": (
        0,
        ("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths"),
    ),
    "r3.rollout.miles.generate": (1, ()),
    "r3.rollout.miles.write_shards": (3, ()),
    "r3.trainers.miles.init": (1, ()),
    "r3.trainers.miles.setup_worker": (0, ()),
}
ASYNC = ("r3.rollout.slime.write_shard_async", "r3.rollout.slime.generate", "r3.rollout.miles.generate")
# Imported with Megatron-core, in several seconds; test_slime_megatron.py calls them.
HEAVY = ("r3.trainers.slime.before_log_prob", "r3.trainers.slime.before_train_step")


def load(path: str) -> Any:
    module, _, name = path.rpartition(".")  # as both frameworks do
    return getattr(importlib.import_module(module), name)


def test_docs_and_configurations_name_exactly_these() -> None:
    assert {found for file in FILES for found in PATH.findall(file.read_text())} == set(CALLS)


@pytest.mark.parametrize("path", [p for p in CALLS if p not in HEAVY])
def test_a_path_is_called_as_its_framework_calls_it(path: str) -> None:
    function = load(path)
    count, keywords = CALLS[path]
    inspect.signature(function).bind(*range(count), **dict.fromkeys(keywords))
    assert inspect.iscoroutinefunction(function) == (path in ASYNC)


@pytest.mark.engine
@pytest.mark.parametrize("path", HEAVY)
def test_a_path_that_imports_megatron_is_called_as_slime_calls_it(path: str) -> None:
    inspect.signature(load(path)).bind(*range(CALLS[path][0]))


@pytest.mark.parametrize("framework", ["slime", "miles"])
def test_a_configuration_is_one_that_r3_takes(framework: str) -> None:
    values = yaml.safe_load((ROOT / f"configs/{framework}/r3.yaml").read_text())
    settings = Settings.from_args(Namespace(**values))
    assert (settings.routes, settings.trainer) == ("key", "lazy")
    commented = re.findall(r"^# (r3_\w+): (\S+)", (ROOT / f"configs/{framework}/r3.yaml").read_text(), re.MULTILINE)
    assert Settings.from_args(Namespace(**values, **dict(commented)))


@pytest.mark.parametrize(
    ("script", "variable", "flags"),
    [
        ("slime/qwen3-30B-A3B.sh", "${R3_ARGS[@]}", 7),
        ("slime/qwen3-30B-A3B.sh", "${R3_DIRECT_ARGS[@]}", 2),
        ("miles/qwen3-30B-A3B.sh", "${R3_MEGATRON_ARGS}", 4),
        ("miles/qwen3-30B-A3B.sh", "${R3_FSDP_ARGS}", 3),
    ],
)
def test_a_script_makes_the_arguments_that_the_docs_show(script: str, variable: str, flags: int) -> None:
    command = f"set -eu; source configs/{script}; echo {variable}"
    made = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert sum(word.startswith("--") for word in made) == flags
    docs = (ROOT / f"docs/{script.partition('/')[0]}.md").read_text()
    for word in made:
        if word.startswith("--"):
            assert word in docs
        elif word.endswith(".yaml"):
            assert Path(word).is_file()
