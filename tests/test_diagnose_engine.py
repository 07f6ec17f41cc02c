"""The diagnosis on real shards: sampled by vLLM from the tiny trained model, scored by transformers.

Faults are injected into those shards, and the result must name them; and what replay leaves is compared with what numerics
alone make of the same routes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from r3 import RolloutSample, ShardStore
from r3.diagnose import FLOAT32_REPLAY, LIVE, R2, REPLAY, Diagnosis, Scored, diagnose
from r3.errors import ReplayError
from r3.rollout.collector import collect
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import read_prompts
from r3.rollout.protocol import Sampling
from r3.testing import SAMPLE_FAULTS
from r3.trainers.score import TransformersScorer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def store(engine: EngineInfo, tiny_model: Path, tmp_path_factory) -> ShardStore:
    store = ShardStore(tmp_path_factory.mktemp("diagnose") / "shards", create=True)
    prompts = read_prompts(tiny_model / "prompts.jsonl")[:40]
    report = asyncio.run(collect(prompts, store, engine, sampling=Sampling(max_tokens=64, seed=3), weight_version=5))
    assert report.written == 40
    return store


@pytest.fixture(scope="module")
def scorer(tiny_model: Path) -> TransformersScorer:
    return TransformersScorer(tiny_model, dtype="bfloat16", device="cpu")


@pytest.fixture(scope="module")
def result(store: ShardStore, scorer: TransformersScorer, tiny_model: Path) -> Diagnosis:
    float32 = TransformersScorer(tiny_model, dtype="float32", device="cpu")
    return diagnose(store, scorer, r2=True, float32=float32)


def changed(
    store: ShardStore, path: Path, change: Callable[[RolloutSample], RolloutSample], count: int = 12
) -> ShardStore:
    out = ShardStore(path, create=True)
    for sample_id in store.sample_ids()[:count]:
        out.add(change(store.open(sample_id)))
    return out


def test_a_real_run_is_healthy_and_says_so(result: Diagnosis) -> None:
    assert [f.id for f in result.findings if f.severity == "error"] == []
    assert result.verdict.level in ("good", "warning")
    assert result.verdict.estimate.high < 0.6
    assert result.run["temperature_fit"]["fitted"] == 1.0
    assert result.replay_coverage == 1.0
    assert result.noise == 0


def test_what_replay_leaves_is_not_routing(result: Diagnosis) -> None:
    """Three statements. The residual is not above the float floor; tokens whose live routes differ carry many times the gap of
    others live, and no more than others once routes are replayed, in bfloat16 and in float32. Wider than the figures in
    docs/kl-diagnostic.md, which are of four times as many sequences."""
    assert result.floor is not None
    assert result.floor.verdict == "within"
    assert result.route_effect[LIVE].low > 5
    for name in (REPLAY, FLOAT32_REPLAY):
        effect = result.route_effect[name]
        assert effect.low < 1.2
        assert effect.high < result.route_effect[LIVE].low / 3


def test_r2_with_the_same_weights_changes_nothing(result: Diagnosis) -> None:
    """It replays what the trainer chooses anyway: the gap between the engines is not its business."""
    assert result.gaps[R2].k3 == pytest.approx(result.gaps[LIVE].k3, rel=1e-6)


@pytest.mark.parametrize("name", ["misrecord_layer", "shift_routes", "shift_logprobs", "forget_rows"])
def test_a_fault_in_real_shards_is_named(tmp_path, store: ShardStore, scorer: TransformersScorer, name: str) -> None:
    rng = np.random.default_rng(0)
    broken = changed(store, tmp_path / "s", lambda s: SAMPLE_FAULTS[name].inject(s, rng))
    found = diagnose(broken, scorer, resamples=200).findings
    assert SAMPLE_FAULTS[name].finding in [f.id for f in found], found
    if name == "misrecord_layer":
        layer = scorer.spec.moe_layers[-1]
        assert any(f"decoder layers [{layer}] are recorded wrongly" in f.text for f in found)


def test_a_layer_that_is_replayed_wrong_is_named(store: ShardStore, tmp_path, scorer: TransformersScorer) -> None:
    """The proof at the experts: one layer of the override answers with other ids than the record's."""
    layer = scorer.spec.moe_layers[2]

    class Broken:
        spec, fingerprint, describe = scorer.spec, scorer.fingerprint, scorer.describe

        def score(self, samples: Any, *, replay: bool, temperature: float) -> list[Scored]:
            wrong = samples
            if replay:
                wrong = [dataclasses.replace(s, routes=other_layer(s, 2)) for s in samples]
            return scorer.score(wrong, replay=replay, temperature=temperature)

    with pytest.raises(ReplayError, match=rf"in decoder layers \[{layer}\]"):
        diagnose(changed(store, tmp_path / "s", lambda s: s, 4), Broken(), resamples=100)


def other_layer(sample: RolloutSample, position: int) -> Any:
    ids = sample.routes.ids.copy()
    ids[position] = ids[(position + 1) % len(ids)]
    return dataclasses.replace(sample.routes, ids=ids)


def rescored(scorer: TransformersScorer, temperature: float) -> Callable[[RolloutSample], RolloutSample]:
    """The sample as an engine of these weights would have returned it with processed log-probs at `temperature`."""

    def change(sample: RolloutSample) -> RolloutSample:
        [scored] = scorer.score([sample], replay=True, temperature=temperature)
        logprobs = np.where(sample.loss_mask, scored.logprobs, np.nan).astype(np.float32)
        return dataclasses.replace(sample, rollout_logprobs=logprobs)

    return change


def test_processed_log_probs_under_another_label_are_named(
    store: ShardStore, tmp_path, scorer, tiny_model: Path
) -> None:
    """Log-probs of a float32 forward at temperature 0.7, labelled raw, then with another temperature."""
    float32 = TransformersScorer(tiny_model, dtype="float32", device="cpu")
    broken = changed(store, tmp_path / "s", rescored(float32, 0.7))
    for label, finding in (
        ({"temperature": 0.7, "logprobs_mode": "raw_logprobs"}, "processed-logprobs"),
        ({"temperature": 0.9, "logprobs_mode": "processed_logprobs"}, "temperature"),
    ):
        name = tmp_path / finding
        relabelled = changed(
            broken,
            name,
            lambda s, label=label: dataclasses.replace(s, provenance=dataclasses.replace(s.provenance, **label)),
        )
        found = diagnose(relabelled, scorer, resamples=200)
        assert [f.id for f in found.findings if f.severity == "error"] == [finding]
        assert found.run["temperature_fit"]["fitted"] == pytest.approx(0.7, rel=0.02)


def test_samples_of_stale_weights_are_named(store: ShardStore, tmp_path, scorer, tiny_model: Path) -> None:
    """Half of the samples carry the log-probs of weights that are 2 % of their size away, under an older version."""
    stale = TransformersScorer(tiny_model, dtype="float32", device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in stale.model.parameters():
            parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter))
    rescore, number = rescored(stale, 1.0), iter(range(99))

    def change(sample: RolloutSample) -> RolloutSample:
        if next(number) % 2:
            return sample
        return dataclasses.replace(rescore(sample), weight_version=np.where(sample.loss_mask, 4, -1).astype(np.int32))

    broken = changed(store, tmp_path / "s", change, 24)
    found = diagnose(broken, scorer)
    named = [f for f in found.findings if f.id == "stale-weights"]
    assert named, found.findings
    assert "samples of weight version 4" in named[0].text
