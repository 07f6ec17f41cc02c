"""The whole chain on real parts: a vLLM server samples, its routes become shards, transformers replays them, the KL falls."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from r3 import Layout, ShardStore
from r3.diagnose import AGAIN, LIVE, REPLAY, Diagnosis, diagnose
from r3.rollout.collector import collect
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import read_prompts
from r3.rollout.protocol import Sampling
from r3.trainers.score import TransformersScorer
from r3.trainers.transformers import attach, observe

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def store(engine: EngineInfo, tiny_model: Path, tmp_path_factory) -> ShardStore:
    store = ShardStore(tmp_path_factory.mktemp("chain") / "shards", create=True)
    prompts = read_prompts(tiny_model / "prompts.jsonl")[:40]
    report = asyncio.run(
        collect(prompts, store, engine, sampling=Sampling(max_tokens=96, seed=11), n=2, weight_version=5)
    )
    assert (report.asked, report.written, report.failures) == (80, 80, ())
    return store


@pytest.fixture(scope="module")
def bfloat16(store: ShardStore, tiny_model: Path) -> tuple[TransformersScorer, Diagnosis]:
    scorer = TransformersScorer(tiny_model, dtype="bfloat16", device="cpu")
    return scorer, diagnose(store, scorer)


def test_shards_say_where_they_come_from(store: ShardStore, engine: EngineInfo) -> None:
    for sample in store:
        assert sample.spec == engine.spec
        assert (sample.provenance.engine, sample.provenance.engine_version) == ("vllm", engine.engine_version)
        assert sample.provenance.logprobs_mode == "raw_logprobs"
        assert sample.provenance.model_fingerprint == engine.model_fingerprint
        assert sample.routes.num_recorded == sample.num_tokens - 1  # the last token is never fed back
        assert not sample.routes.recorded[-1]
        assert set(sample.weight_version[sample.loss_mask].tolist()) == {5}
        assert np.isfinite(sample.rollout_logprobs[sample.loss_mask]).all()


def test_replay_closes_the_gap_in_bfloat16(bfloat16: tuple[TransformersScorer, Diagnosis]) -> None:
    """Looser than what the quickstart shows (see README): here it must hold on any machine."""
    _, result = bfloat16
    live, replay = result.gaps[LIVE], result.gaps[REPLAY]
    assert live.num_tokens > 6000
    assert result.mismatch[LIVE].share > 0.005
    assert replay.k3 < 0.6 * live.k3
    assert live.exceed["1.1"] > 0
    assert replay.exceed["1.1"] <= live.exceed["1.1"] / 5
    assert result.k3_saved[0] > 0


def test_every_recorded_route_is_seen_at_the_experts(
    bfloat16: tuple[TransformersScorer, Diagnosis], store: ShardStore
) -> None:
    scorer, result = bfloat16
    rows = sum(sample.num_tokens for sample in store)
    recorded = sum(sample.routes.num_recorded for sample in store)
    assert (result.rows, result.recorded) == (rows, recorded)
    assert result.verified == recorded * scorer.spec.num_moe_layers
    assert result.mismatch[REPLAY].share == result.mismatch[AGAIN].share == 0
    coverage = scorer.replay.coverage
    assert (coverage.forwards, coverage.replayed, coverage.unrecorded) == (
        coverage.forwards,
        2 * recorded,
        2 * (rows - recorded),
    )
    assert coverage.share == pytest.approx(result.coverage)


def test_float32_trainer_gains_as_well(store: ShardStore, tiny_model: Path) -> None:
    result = diagnose(store, TransformersScorer(tiny_model, dtype="float32", device="cpu"), limit=40)
    assert result.gaps[REPLAY].k3 < result.gaps[LIVE].k3
    assert result.mismatch[REPLAY].share == 0


def test_a_training_step_of_the_readme_replays_under_checkpointing(store: ShardStore, tiny_model: Path) -> None:
    """The loop that the README shows, on real shards: policy-gradient loss, gradient checkpointing, AdamW."""
    samples = list(store)[:4]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    replay = attach(model, samples[0].spec)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    lengths = [sample.num_tokens for sample in samples]
    layout = Layout.padded(lengths, max(lengths))
    tokens = np.concatenate([sample.tokens for sample in samples]).astype(np.int64)
    input_ids = torch.from_numpy(layout.gather(tokens, fill=0)).reshape(len(samples), -1)
    mask = torch.from_numpy(layout.rows >= 0).reshape(len(samples), -1)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "gate.weight" in name}
    with observe(model, replay.spec) as seen, replay.micro_batch(samples, layout, input_ids):
        logits = model(input_ids, attention_mask=mask.long(), use_cache=False).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    forward_ids = {layer: ids.clone() for layer, ids in seen.items()}
    with observe(model, replay.spec) as seen_again:
        (-(logprobs * mask[:, 1:]).mean()).backward()
    for layer, ids in forward_ids.items():  # the recompute in backward used the same experts, padding included
        assert torch.equal(seen_again[layer], ids)
    optimizer.step()
    assert all((model.get_parameter(name) != value).any() for name, value in before.items())


def test_the_commands_a_user_types(engine: EngineInfo, tiny_model: Path, tmp_path) -> None:
    def r3(*arguments: object, code: int = 0) -> str:
        command = [sys.executable, "-c", "from r3.cli import main; main()", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return " ".join((done.stdout + done.stderr).split())

    asked = ("collect", tiny_model / "prompts.jsonl", "shards", "-s", engine.urls[0], "--limit", 3, "--max-tokens", 16)
    assert "3 samples written to shards, 0 were there" in r3(*asked)
    assert "0 samples written to shards, 3 were there" in r3(*asked)
    assert "made with another temperature" in r3(*asked, "--temperature", 0.5, code=1)
    assert "3 in 3 groups" in r3("inspect", "shards", "--verify")
    assert "returns routes of" in r3("doctor", "--server", engine.urls[0], "--model", tiny_model)
    text = r3("diagnose", "shards", "--model", tiny_model, "--report", "out/report")
    assert "bfloat16 live" in text
    assert "seen at the experts as recorded" in text
    data = json.loads((tmp_path / "out/report.json").read_text())
    assert data["diagnoses"][0]["forwards"]["replay"]["routes"]["share_of_token_layers"] == 0
