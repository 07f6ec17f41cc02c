"""The training example as its users start it: real rollouts, four processes (pipeline 2 x experts 2), and what it saves."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from megatron_shards import rollouts  # noqa: F401 - a fixture

from r3 import RoutingSpec, ShardStore
from r3.errors import ConfigError, MetricError
from r3.fingerprint import model_fingerprint

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
        *("--model", tiny_model, "--shards", rollouts.root, "--out", out, "--again"),
        *("--set", "steps=2", "--set", "samples=16", "--set", "micro_batch=2", "--set", "lr=1e-3"),
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


def test_the_trained_weights_are_sampled_from_and_no_others(run) -> None:
    assert re.search(r"^mean reward after: 0\.\d{4} over 128 samples$", run[0], re.M)
    fingerprint = model_fingerprint(run[1])
    store = ShardStore(run[1].parent / f"shards-{fingerprint[:8]}")
    assert {store.metadata(sample_id)["model_fingerprint"] for sample_id in store.sample_ids()} == {fingerprint}


@pytest.fixture
def script() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("train_megatron", ROOT / "scripts/train_megatron.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_megatron"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_settings_have_their_types(script) -> None:
    file = ROOT / "configs/megatron.yaml"
    settings = script.Settings.read(file, ["lr=1e-4", "clip=1", "replay=false"])  # YAML reads 1e-4 as text
    assert (settings.lr, settings.clip, settings.replay) == (1e-4, 1.0, False)
    for change, message in (
        ("steps=2.5", "steps: .*expected int, got 2.5"),
        ("replay=1", "replay: .*expected bool, got 1"),
        ("lr=small", "lr: .*expected float, got 'small'"),
        ("lr", "lr: .*expected float, got None"),
        ("dtype=float16", "expected bfloat16 or float32, got float16"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){message}"):
            script.Settings.read(file, [change])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("raw_logprobs", (1.0, "same")), ("processed_logprobs", (0.7, "same"))],
    ids=lambda value: value,
)
def test_the_temperature_of_the_rollouts_log_probs(script, rollouts, tiny_model, tmp_path, mode, expected) -> None:  # noqa: F811
    first, second = list(rollouts)[:2]
    store = ShardStore(tmp_path, create=True)
    warm = dataclasses.replace(first.provenance, temperature=0.7, logprobs_mode=mode)
    store.add(dataclasses.replace(first, provenance=warm))
    assert script.temperature_of(store, tiny_model) == expected
    assert script.temperature_of(store, tmp_path)[1] == "unknown"
    store.add(second)
    with pytest.raises(MetricError, match="samples of different rollouts in one store: temperature differs"):
        script.temperature_of(store, tiny_model)


def test_misspelled_and_impossible_settings_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    done = train("--model", tiny_model, "--shards", tmp_path, "--set", "pipelines=2")
    assert done.returncode == 1
    assert done.stderr.startswith("r3: no such setting\n  expected steps, samples")
