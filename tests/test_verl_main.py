"""veRL's whole `main_ppo` on a CPU by `configs/verl/tiny_cpu.sh`, and the proof that an engine of r3 is in a Ray job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import verl_parts

from r3 import ShardStore
from r3.errors import ConfigError
from r3.handoff import announce_trainer, announced_trainers
from r3.rollout.verl.settings import Settings, check_config, require_trainer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("verl_environment")]
SCRIPT = Path(__file__).resolve().parent.parent / "configs" / "verl" / "tiny_cpu.sh"


@pytest.fixture
def job() -> Iterator[None]:
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    yield
    ray.shutdown()


def test_a_job_without_an_engine_of_r3_is_refused_and_one_with_it_is_not(job: None) -> None:  # noqa: ARG001
    import ray

    assert announced_trainers() == []
    with pytest.raises(ConfigError, match="no engine of r3 is in this job"):
        require_trainer()
    assert ray.get(ray.remote(announce_trainer).remote(engine="ReplayFSDPEngine"))  # from a worker's process
    require_trainer()
    assert announced_trainers() == [{"engine": "ReplayFSDPEngine"}]


def test_main_ppo_trains_with_replay(tiny_model: Path, tmp_path: Path) -> None:
    """Two GRPO steps: vLLM in veRL's server actor, weights synchronized, TransferQueue, two loops per prompt, FSDP2 engine."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONWARNINGS": "ignore",
    }
    command = ["bash", str(SCRIPT), str(tiny_model), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    log = run.stdout + run.stderr
    assert run.returncode == 0, log[-6000:]
    assert "r3: ReplayFSDPEngine (fsdp2) replays the rollout's routes: 8 of 8 layers route" in log
    steps = [dict(re.findall(r"(\S+):(-?[\d.]+(?:e-?\d+)?)", line)) for line in log.splitlines() if " step:" in line]
    assert len(steps) == 2
    for number, metrics in enumerate(steps, 1):
        value = {name: float(text) for name, text in metrics.items()}
        store = ShardStore(tmp_path / "shards").step(number)
        samples = list(store)
        assert len(samples) == 8
        tokens = sum(sample.num_tokens for sample in samples)
        assert value["actor/r3/coverage"] == pytest.approx((tokens - 8) / tokens)
        assert value["actor/r3/rows_replayed"] == tokens - 8
        assert value["actor/r3/agreement"] > 0.9
        # computed from the same log-probs by veRL, on its own
        assert value["actor/r3/old_log_prob/k3"] == pytest.approx(value["rollout_corr/k3_kl"], rel=1e-3)
        versions = {int(v) for sample in samples for v in np.unique(sample.weight_version[sample.loss_mask])}
        assert len(versions) == 1
        assert versions.pop() >= number - 1


@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_the_large_configurations_are_verls(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """veRL's own configuration takes every override of the script: what the script would run is composed, and not run."""
    import hydra

    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("R3_STORE", "/s")
    script = SCRIPT.with_name(f"qwen3_30b_a3b_{trainer}.sh")
    run = subprocess.run(
        ["bash", str(script), "train.parquet", "val.parquet"], capture_output=True, text=True, check=True
    )
    module, *arguments = run.stdout.splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    names = [argument.removeprefix("--config-name=") for argument in arguments if argument.startswith("--config-name=")]
    overrides = [argument for argument in arguments if not argument.startswith("--")]
    with hydra.initialize_config_dir(config_dir=verl_parts.CONFIG_DIR, version_base=None):
        config = hydra.compose(config_name=(names or ["ppo_trainer"])[0], overrides=overrides)
    assert config.actor_rollout_ref.actor.strategy == trainer
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "r3")
    check_config(config, Settings(store="/s"))
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR == "r3"
