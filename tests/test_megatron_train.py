"""The training example as its users start it: real rollouts, four processes (pipeline 2 x experts 2), and what it saves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from megatron_shards import rollouts  # noqa: F401 - a fixture

from r3 import RoutingSpec, ShardStore

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parent.parent


def train(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/train_megatron.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def run(rollouts: ShardStore, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:  # noqa: F811
    """(what it printed, where its weights are)."""
    out = tmp_path_factory.mktemp("train")
    done = train(
        *("--model", tiny_model, "--shards", rollouts.root, "--out", out),
        *("--set", "steps=2", "--set", "samples=16", "--set", "micro_batch=2", "--set", "lr=0.001"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, out / "megatron" / "trained"


def test_replay_lowers_the_gap_in_each_step(run) -> None:
    lines = re.findall(r"^ +\d+ .*%$", run[0], re.M)
    assert len(lines) == 2
    for number, line in enumerate(lines):
        step, _, _, gradient_norm, live, replayed, f_live, f_replayed, coverage, agreement = (
            float(word.rstrip("%")) for word in line.split()
        )
        assert step == number
        assert 0 < gradient_norm < 100
        assert coverage > 98
        assert agreement > 95
        if number == 0:  # the weights that sampled; later ones have moved on
            assert replayed < 0.6 * live
            assert f_replayed <= f_live


def test_trained_weights_load_in_transformers_and_moved(run, tiny_model: Path) -> None:
    trained, before = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (run[1], tiny_model)
    )
    changed = [
        n for (n, a), b in zip(trained.named_parameters(), before.parameters(), strict=True) if not torch.equal(a, b)
    ]
    routers = [name for name in changed if name.endswith("mlp.gate.weight")]
    assert len(routers) == RoutingSpec.from_config(tiny_model).num_moe_layers
    assert any("embed_tokens" in name for name in changed)
    assert (run[1] / "tokenizer.json").is_file()


def test_misspelled_and_impossible_settings_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    done = train("--model", tiny_model, "--shards", tmp_path, "--set", "pipelines=2")
    assert done.returncode == 1
    assert done.stderr.startswith("r3: no such setting\n  expected steps, samples")
