"""The diagnosis: with a scorer whose answers are known, the metrics, the proof and the refusals; then a real model."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from helpers import SPEC, random_routes, random_sample
from qwen import build

from r3 import RolloutSample, RoutingSpec, ShardStore, report
from r3.diagnose import FORWARDS, LIVE, REPLAY, Scored, diagnose
from r3.errors import MetricError, ReplayError, SpecError

RNG = np.random.default_rng(3)


class KnownScorer:
    """Live: every log-prob off by `live_gap`, expert 0 in place of whatever stands first in layer 2. Replay: off by
    `replay_gap`, the recorded experts, but for `broken` (token, layer position)."""

    def __init__(self, live_gap: float = 0.5, replay_gap: float = 0.01, broken: tuple[int, int] | None = None) -> None:
        self.spec: RoutingSpec = SPEC
        self.fingerprint = "f00d"
        self.live_gap, self.replay_gap, self.broken = live_gap, replay_gap, broken
        self.batches: list[tuple[list[str], bool, float]] = []

    def describe(self) -> dict[str, str]:
        return {"framework": "known", "transformers": "0", "torch": "0", "dtype": "float64", "device": "none"}

    def score(self, samples: Sequence[RolloutSample], *, replay: bool, temperature: float) -> list[Scored]:
        self.batches.append(([s.sample_id for s in samples], replay, temperature))
        out = []
        for sample in samples:
            ids = sample.routes.ids.copy()
            ids[:, ~sample.routes.recorded] = 7  # rows without a record are live and must not count
            if not replay:
                ids[1] = [6, 7]
            elif self.broken is not None:
                row = ids[self.broken[1], self.broken[0]]
                row[0] = next(e for e in range(8) if e not in row)
            logprobs = np.nan_to_num(sample.rollout_logprobs, nan=-3) - (self.replay_gap if replay else self.live_gap)
            out.append(Scored(logprobs.astype(np.float32), ids))
        return out


def filled(path, count: int = 5, **overrides: Any) -> ShardStore:
    store = ShardStore(path, create=True)
    for i in range(count):
        store.add(random_sample(RNG, num_tokens=8 + i, sample_id=f"s{i}", **overrides))
    return store


def test_numbers_are_those_of_the_forwards(tmp_path) -> None:
    store, scorer = filled(tmp_path / "s"), KnownScorer()
    seen = []
    result = diagnose(store, scorer, batch_tokens=24, progress=lambda done, total: seen.append((done, total)))
    assert result.gaps[LIVE].num_tokens == sum(4 + i for i in range(5))
    assert result.gaps[LIVE].k3 == pytest.approx(math.expm1(-0.5) + 0.5, rel=1e-4)
    assert result.gaps[LIVE].exceed["1.5"] == 1
    assert result.gaps[REPLAY].k3 == pytest.approx(math.expm1(-0.01) + 0.01, rel=1e-3)
    assert result.gaps[REPLAY].exceed["1.1"] == 0
    low, high = result.k3_saved
    assert low == pytest.approx(high, rel=1e-3)
    assert low == pytest.approx(result.gaps[LIVE].k3 - result.gaps[REPLAY].k3, rel=1e-3)
    assert (result.rows, result.recorded) == (50, 45)
    assert result.coverage == 0.9
    assert result.verified == 45 * 3
    assert result.noise == 0
    assert result.mismatch[REPLAY].share == 0
    assert result.mismatch[LIVE].rows == 45
    expected = sum(set(s.routes.ids[1, t].tolist()) != {6, 7} for s in store for t in np.flatnonzero(s.routes.recorded))
    assert result.mismatch[LIVE].differing.tolist() == [0, expected, 0]
    assert seen[-1] == (5, 5)
    # paired: every forward sees the same batches
    by_forward = [[ids for ids, _, _ in scorer.batches[i :: len(FORWARDS)]] for i in range(len(FORWARDS))]
    assert by_forward[0] == by_forward[1] == by_forward[2]
    assert [ids for batch in by_forward[0] for ids in batch] == store.sample_ids()
    assert all(len(ids) <= 2 for ids in by_forward[0])


def test_an_expert_that_was_not_the_recorded_one_is_named(tmp_path) -> None:
    with pytest.raises(ReplayError, match="token 3, layer 2") as error:
        diagnose(filled(tmp_path / "s"), KnownScorer(broken=(3, 1)))
    assert "used other experts than the recorded ones" in str(error.value)


def test_temperature_is_applied_only_where_the_engine_applied_it(tmp_path) -> None:
    for mode, temperature, expected in (("raw_logprobs", 0.7, 1.0), ("processed_logprobs", 0.7, 0.7), ("", 1.0, 1.0)):
        scorer = KnownScorer()
        provenance = dataclasses.replace(
            random_sample(RNG).provenance, logprobs_mode=mode, temperature=temperature, top_p=1.0, top_k=0
        )
        diagnose(filled(tmp_path / f"{mode}{temperature}", provenance=provenance), scorer)
        assert {t for _, _, t in scorer.batches} == {expected}


def mixed(path) -> ShardStore:
    store = filled(path)
    sample = random_sample(RNG, sample_id="t")
    store.add(dataclasses.replace(sample, provenance=dataclasses.replace(sample.provenance, temperature=0.3)))
    return store


def with_mode(mode: str, **changes: Any):
    provenance = dataclasses.replace(random_sample(RNG).provenance, logprobs_mode=mode, **changes)
    return lambda path: filled(path, provenance=provenance)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: ShardStore(path, create=True), "no sample in this store"),
        (mixed, "samples of different rollouts in one store: temperature differs"),
        (with_mode("processed_logprobs", top_p=0.9), "renormalised over the tokens that top-p or top-k left"),
        (with_mode("processed_logprobs", top_p=1.0, top_k=20), "renormalised over the tokens that top-p or top-k left"),
        (with_mode("", temperature=0.5), "do not say which log-probs they hold"),
        (with_mode("raw_logprobs", model_fingerprint="beef"), "the trainer's weights are not the weights that sampled"),
        (lambda path: filled(path, response_logprobs=np.full(99, 1.0)[:0]), None),
    ],
)
def test_what_must_not_be_compared_is_refused(tmp_path, make, message) -> None:
    if message is None:  # prompts alone: nothing was sampled
        store = ShardStore(tmp_path / "s", create=True)
        store.add(random_sample(RNG, num_tokens=4, prompt_length=4))
        with pytest.raises(MetricError, match="no sampled token to compare"):
            diagnose(store, KnownScorer())
        return
    with pytest.raises(MetricError, match=message):
        diagnose(make(tmp_path / "s"), KnownScorer())


def test_other_weights_can_be_allowed_and_are_said(tmp_path) -> None:
    store = with_mode("raw_logprobs", model_fingerprint="beef")(tmp_path / "s")
    result = diagnose(store, KnownScorer(), allow_other_weights=True)
    assert result.rollout["weights"] == "other"
    assert "NOT those that sampled" in report.markdown([result])


def test_routes_of_another_model_are_refused(tmp_path) -> None:
    scorer = KnownScorer()
    scorer.spec = dataclasses.replace(SPEC, num_experts=16)
    with pytest.raises(SpecError, match="sample 's0': the routing differs"):
        diagnose(filled(tmp_path / "s"), scorer)


def test_report_files_say_the_same_as_the_table(tmp_path) -> None:
    result = diagnose(filled(tmp_path / "s"), KnownScorer(), label="seed-1")
    json_file, markdown_file = report.save([result], tmp_path / "out" / "diagnosis")
    data = json.loads(json_file.read_text())
    assert (data["format"], data["version"]) == ("r3-diagnosis", 1)
    [entry] = data["diagnoses"]
    assert entry["label"] == "seed-1"
    assert entry["direction"] == "KL(rollout || train)"
    assert entry["forwards"]["live"]["k3"] == result.gaps[LIVE].k3
    assert entry["forwards"]["live"]["routes"]["share_by_layer"][1] > 0
    assert entry["verified_token_layers"] == 135
    text = markdown_file.read_text()
    assert f"| seed-1 float64 live | {result.gaps[LIVE].k3:.2e} | 5.00e-01 | 1.00000 | 1.00000 |" in text
    assert "135 of 135 recorded (token, layer) seen at the experts as recorded; coverage 90.00% of rows" in text


def test_a_real_model_whose_rollout_is_itself_has_no_gap(tmp_path) -> None:
    """Routes and log-probs recorded from the very model that scores: live and replay agree with it to the last digit."""
    from r3.trainers.score import TransformersScorer

    build().save_pretrained(tmp_path / "model")
    scorer = TransformersScorer(tmp_path / "model", dtype="float32", device="cpu")
    store = ShardStore(tmp_path / "store", create=True)
    blank = [random_sample(RNG, scorer.spec, 6 + 3 * i, sample_id=f"s{i}") for i in range(4)]
    for sample, scored in zip(blank, scorer.score(blank, replay=False), strict=True):
        logprobs = np.where(sample.loss_mask, scored.logprobs, np.nan).astype(np.float32)
        routes = dataclasses.replace(sample.routes, ids=scored.expert_ids)
        provenance = dataclasses.replace(
            sample.provenance, model_fingerprint=scorer.fingerprint, logprobs_mode="raw_logprobs"
        )
        store.add(dataclasses.replace(sample, rollout_logprobs=logprobs, routes=routes, provenance=provenance))
    result = diagnose(store, scorer, batch_tokens=10_000)
    assert result.rollout["weights"] == "same"
    for name in FORWARDS:
        assert result.gaps[name].mean_abs == 0
        assert result.mismatch[name].share == 0
    assert scorer.replay.coverage.replayed == 2 * result.recorded
    assert scorer.replay.coverage.share == result.coverage

    # other routes, same log-probs: now replay is what makes the gap, and the experts still get the recorded ids
    other = ShardStore(tmp_path / "other", create=True)
    for sample in store:
        other.add(dataclasses.replace(sample, routes=random_routes(RNG, scorer.spec, sample.num_tokens)))
    result = diagnose(other, scorer)
    assert result.gaps[LIVE].mean_abs == pytest.approx(0, abs=1e-6)
    assert result.gaps[REPLAY].mean_abs > 1e-4
    assert result.mismatch[REPLAY].share == 0
    assert result.mismatch[LIVE].share > 0.5
