"""Guards: each fault is injected into an otherwise healthy run, and the finding that names it must appear; nothing else may be
called an error. The policies are synthetic, so that what is right is known; test_diagnose_engine.py does the same to real shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from diagnoses import synthetic
from helpers import SPEC
from policies import Engine, Trainer

from r3 import RolloutSample, Routes, ShardStore
from r3.diagnose import LIVE, R2, REPLAY, Diagnosis, diagnose
from r3.diagnose.accumulate import Accumulator
from r3.diagnose.cautions import replay_itself
from r3.diagnose.evidence import Evidence
from r3.errors import MetricError, ReplayError
from r3.metrics import Estimate
from r3.testing import SAMPLE_FAULTS

COUNT = 16  # sequences of a broken store: enough for an interval


def run(store: ShardStore, trainer: Trainer | None = None, **options) -> Diagnosis:
    return diagnose(store, trainer or Trainer(), resamples=150, **options)


def errors(result: Diagnosis) -> list[str]:
    return [finding.id for finding in result.findings if finding.severity == "error"]


def ids(result: Diagnosis) -> list[str]:
    return [finding.id for finding in result.findings]


def changed(store: ShardStore, path: Path, change: Callable[[RolloutSample], RolloutSample]) -> ShardStore:
    out = ShardStore(path, create=True)
    for sample_id in store.sample_ids()[:COUNT]:
        out.add(change(store.open(sample_id)))
    return out


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> ShardStore:
    return Engine(fingerprint="w0").store(tmp_path_factory.mktemp("healthy") / "s", count=40, num_tokens=50)


def test_a_healthy_run_has_no_finding_and_a_good_verdict(healthy: ShardStore) -> None:
    result = run(healthy, Trainer(fingerprint="w0"))
    assert result.findings == []
    assert result.verdict.level == "good"
    assert "Replay lowers the gap by" in result.verdict.text
    compared = result.comparison("k3")
    assert compared is not None
    assert compared.ratio.high < 0.2
    assert result.verdict.estimate == compared.ratio
    assert f"{result.gaps[LIVE].k3:.2e} live" in result.verdict.text
    effect = result.route_effect
    assert effect[LIVE].low > 10
    assert effect[REPLAY].low < 1 < effect[REPLAY].high


def test_the_verdict_is_silent_where_the_interval_is(healthy: ShardStore) -> None:
    same = run(healthy, Trainer(flips=0.0))
    assert same.verdict.level == "unknown"
    assert "No effect of replay that these sequences can show" in same.verdict.text or same.gaps[LIVE].k3 == 0
    few = run(healthy, limit=5)
    assert few.verdict.level == "unknown"
    assert "Too few sequences" in few.verdict.text
    assert "few-sequences" in ids(few)
    assert not few.forwards[LIVE].intervals["k3"].known


@pytest.mark.parametrize(
    ("trainer", "finding", "says"),
    [
        (Trainer(shift=1), "token-shift", "one token later"),
        (Trainer(shift=-1), "token-shift", "one token earlier"),
        (Trainer(padding=24), "vocabulary-padding", "wider than the vocabulary"),
    ],
    ids=["late", "early", "padding"],
)
def test_faults_of_the_trainer(healthy: ShardStore, trainer: Trainer, finding: str, says: str) -> None:
    result = run(healthy, trainer, limit=COUNT)
    assert finding in errors(result)
    assert says in next(f.text for f in result.findings if f.id == finding)
    assert result.verdict.level == "bad"


def test_a_trainer_that_is_not_deterministic_is_named(healthy: ShardStore) -> None:
    result = run(healthy, Trainer(noise=0.01), limit=COUNT)
    assert ids(result).count("noisy-trainer") == 1
    assert errors(result) == []


@pytest.mark.parametrize(
    ("engine", "relabel", "finding"),
    [
        (Engine(temperature=0.6, processed=True), {}, None),
        (Engine(temperature=0.6, processed=True), {"logprobs_mode": "raw_logprobs"}, "processed-logprobs"),
        (Engine(temperature=0.6), {"logprobs_mode": "processed_logprobs"}, "raw-logprobs"),
        (Engine(temperature=0.6, processed=True), {"temperature": 0.9}, "temperature"),
        (Engine(temperature=0.6), {}, None),
        (Engine(top_p=0.8, processed=True), {"logprobs_mode": "raw_logprobs"}, "processed-logprobs"),
        (Engine(top_p=0.8, processed=True), {"top_p": 1.0}, "not-normalised"),
        (Engine(top_p=0.8), {}, None),
    ],
)
def test_metadata_that_lie_about_log_probs_are_found_out(
    tmp_path, engine: Engine, relabel, finding: str | None
) -> None:
    store = engine.store(tmp_path / "a")
    if relabel:
        store = changed(
            store,
            tmp_path / "b",
            lambda s: dataclasses.replace(s, provenance=dataclasses.replace(s.provenance, **relabel)),
        )
    assert errors(run(store)) == ([] if finding is None else [finding])


def test_the_fitted_temperature_is_the_engines(tmp_path) -> None:
    result = run(Engine(temperature=0.6, processed=True).store(tmp_path / "a"), Trainer())
    assert result.run["temperature_fit"]["fitted"] == 0.6
    store = changed(
        Engine(temperature=0.6, processed=True).store(tmp_path / "b"),
        tmp_path / "c",
        lambda s: dataclasses.replace(s, provenance=dataclasses.replace(s.provenance, temperature=1.3)),
    )
    assert run(store).run["temperature_fit"]["fitted"] == pytest.approx(0.6, rel=0.01)


def test_sampling_that_is_not_the_compared_policy_is_said(tmp_path) -> None:
    result = run(Engine(temperature=0.6).store(tmp_path / "a"))
    assert "other-sampler" in ids(result)
    assert "other-sampler" not in ids(run(Engine().store(tmp_path / "b")))


ROUTE_FAULTS = {
    "shift_routes": "route-shift",
    "swap_sample_layers": "layer-misrecorded",
    "misrecord_layer": "layer-misrecorded",
    "scramble_routes": "routes-of-other-tokens",
    "forget_rows": "coverage",
    "shift_logprobs": "token-shift",
    "drop_logprobs": "missing-logprobs",
    "empty_mask": "empty-mask",
}


def test_every_sample_fault_has_a_finding() -> None:
    assert set(ROUTE_FAULTS) == set(SAMPLE_FAULTS)


@pytest.mark.parametrize("name", ROUTE_FAULTS)
def test_faults_of_samples(tmp_path, healthy: ShardStore, name: str) -> None:
    """The trainer routes by itself as the healthy record says, so a broken record is what differs."""
    rng = np.random.default_rng(0)
    right = {sample.sample_id: sample for sample in healthy}
    store = changed(healthy, tmp_path / "s", lambda s: SAMPLE_FAULTS[name].inject(s, rng))
    assert SAMPLE_FAULTS[name].finding == ROUTE_FAULTS[name]

    class OwnRoutes(Trainer):
        def _one(self, sample, replay, temperature):
            if replay:
                return super()._one(sample, True, temperature)
            scored = super()._one(right[sample.sample_id], False, temperature)
            return dataclasses.replace(scored)

    result = run(store, OwnRoutes())
    assert ROUTE_FAULTS[name] in ids(result), result.findings
    others = [e for e in errors(result) if e != ROUTE_FAULTS[name]]
    assert others == []


def test_a_layer_that_is_named_is_the_layer_that_is_wrong(tmp_path, healthy: ShardStore) -> None:
    right = {sample.sample_id: sample for sample in healthy}
    rng = np.random.default_rng(0)
    store = changed(healthy, tmp_path / "s", lambda s: SAMPLE_FAULTS["misrecord_layer"].inject(s, rng))

    class OwnRoutes(Trainer):
        def _one(self, sample, replay, temperature):
            return super()._one(sample if replay else right[sample.sample_id], replay, temperature)

    [text] = [f.text for f in run(store, OwnRoutes()).findings if f.id == "layer-misrecorded"]
    assert f"decoder layers [{SPEC.moe_layers[-1]}] are recorded wrongly" in text


def test_a_layer_that_is_replayed_wrong_is_named_by_the_proof(healthy: ShardStore) -> None:
    class Broken(Trainer):
        def _one(self, sample, replay, temperature):
            scored = super()._one(sample, replay, temperature)
            if replay:
                scored.expert_ids[1] = (scored.expert_ids[1] + 1) % SPEC.num_experts
            return scored

    with pytest.raises(ReplayError, match=r"in decoder layers \[2\]"):
        run(healthy, Broken())


def test_some_samples_with_other_routes_are_named(tmp_path, healthy: ShardStore) -> None:
    right = {sample.sample_id: sample for sample in healthy}
    rng = np.random.default_rng(0)
    store = changed(
        healthy,
        tmp_path / "s",
        lambda s: SAMPLE_FAULTS["scramble_routes"].inject(s, rng) if s.sample_id in ("s003", "s007") else s,
    )

    class OwnRoutes(Trainer):
        def _one(self, sample, replay, temperature):
            return super()._one(sample if replay else right[sample.sample_id], replay, temperature)

    [finding] = [f for f in run(store, OwnRoutes()).findings if f.id == "samples-misrouted"]
    assert finding.numbers["samples"] == 2
    assert "'s003'" in finding.text or "'s007'" in finding.text


def test_stale_weights_are_named_by_version(tmp_path) -> None:
    store = Engine(weights=5).store(tmp_path / "s", count=12, version=4)
    for i in range(12, 24):
        store.add(Engine().sample(f"s{i:03d}", 40, version=5))
    result = run(store)
    assert errors(result) == ["stale-weights"]
    assert "samples of weight version 4 were not sampled by these weights" in result.findings[0].text
    assert "mixed-weight-versions" in ids(result)
    by_version = {entry["version"]: entry["k3"] for entry in result.forwards[LIVE].by_version}
    assert by_version[4] > 5 * by_version[5]
    mixed = Engine().store(tmp_path / "m", count=12, version=4)
    for i in range(12, 24):
        mixed.add(Engine().sample(f"s{i:03d}", 40, version=5))
    assert ids(run(mixed)).count("mixed-weight-versions") == 1
    assert errors(run(mixed)) == []


def test_routing_that_replay_leaves_is_named(healthy: ShardStore) -> None:
    class Leaky(Trainer):
        """The experts are the recorded ones, the log-probs are not theirs: gate weights, or a context that was not replayed."""

        def _one(self, sample, replay, temperature):
            live = super()._one(sample, False, temperature)
            return dataclasses.replace(live, expert_ids=sample.routes.ids) if replay else live

    assert "routing-left" in ids(run(healthy, Leaky(flips=0.1)))


def test_half_of_the_rows_unrecorded_tells_both_halves(tmp_path, healthy: ShardStore) -> None:
    rng = np.random.default_rng(0)
    store = changed(healthy, tmp_path / "s", lambda s: SAMPLE_FAULTS["forget_rows"].inject(s, rng))
    [finding] = [f for f in run(store, Trainer(flips=0.1)).findings if f.id == "coverage"]
    assert finding.numbers["replay_coverage"] == pytest.approx(0.5, abs=0.05)
    assert finding.numbers["k3_unrecorded"] > 5 * finding.numbers["k3_recorded"]


def test_r2_replays_the_trainers_own_routes_and_cannot_close_the_engines_gap(healthy: ShardStore) -> None:
    class ReplaysRoutes(Trainer):
        """Its log-probs depend on the routes that it is given: by the recorded ones unless told otherwise."""

        def _one(self, sample, replay, temperature):
            right = by_id[sample.sample_id]
            if replay and not np.array_equal(sample.routes.ids, right.routes.ids):
                live = super()._one(right, False, temperature)
                assert np.array_equal(
                    live.expert_ids[:, right.routes.recorded], sample.routes.ids[:, right.routes.recorded]
                )
                return live
            return super()._one(sample, replay, temperature)

    by_id = {sample.sample_id: sample for sample in healthy}
    result = run(healthy, ReplaysRoutes(), r2=True)
    assert list(result.forwards) == ["live", "replay", "replay again", "r2"]
    assert result.forwards[R2].routes == "r2"
    assert result.gaps[R2].k3 == result.gaps[LIVE].k3
    assert result.comparison("k3", LIVE, R2).ratio.value == 1
    assert result.mismatch[R2].share == result.mismatch[LIVE].share > 0


def test_the_float_floor_is_twice_the_rounding_of_one_side(healthy: ShardStore) -> None:
    """Engine and trainer round independently and equally in these policies, so the residual is the floor: the ratio is 1, where
    an engine that rounds twice as coarsely lies above it."""
    result = run(healthy, Trainer(), float32=Trainer(rounding=0.0, dtype="float32"))
    floor = result.floor
    assert floor is not None
    assert floor.floor.value == pytest.approx(2 * floor.rounding.value)
    assert floor.ratio.low < 1 < floor.ratio.high
    assert floor.residual.value == pytest.approx(result.gaps[REPLAY].k3)
    assert "float32 replay" in result.forwards


@pytest.mark.parametrize(("engine_rounding", "verdict"), [(0.0, "within"), (0.01, "above")])
def test_the_float_floor_speaks_where_its_interval_does(tmp_path, engine_rounding: float, verdict: str) -> None:
    store = Engine(rounding=engine_rounding).store(tmp_path / "s")
    result = run(store, Trainer(), float32=Trainer(rounding=0.0, dtype="float32"))
    assert result.floor.verdict == verdict
    assert result.floor.text[1:] in result.verdict.text


def test_greedy_sampling_has_nothing_to_compare(tmp_path) -> None:
    store = changed(
        Engine().store(tmp_path / "a", count=1),
        tmp_path / "b",
        lambda s: dataclasses.replace(
            s, provenance=dataclasses.replace(s.provenance, temperature=0.0, logprobs_mode="processed_logprobs")
        ),
    )
    with pytest.raises(MetricError, match="sampled greedily"):
        run(store)


@pytest.mark.parametrize(("effect", "found"), [((1.28, 1.12, 1.52), False), ((2.4, 1.6, 3.1), True)])
def test_selection_is_not_routing_that_is_left(effect: tuple[float, float, float], found: bool) -> None:
    """1.28 [1.12, 1.52] is a complete replay of a trained model in bfloat16, on 160 sequences that vLLM sampled."""
    result = synthetic()
    result.route_effect[REPLAY] = Estimate(*effect)
    assert any(f.id == "routing-left" for f in replay_itself(result, Evidence(Accumulator([LIVE])))) is found


def test_a_record_of_the_last_row_does_not_hide_a_missing_one(tmp_path, healthy: ShardStore) -> None:
    """Nothing is predicted from the last row: a record there is not coverage."""

    def moved(sample: RolloutSample) -> RolloutSample:
        chosen, recorded = sample.routes.ids.copy(), sample.routes.recorded.copy()
        chosen[:, -1], recorded[-1] = chosen[:, 5], True
        chosen[:, 5], recorded[5] = 0, False
        return dataclasses.replace(sample, routes=Routes(chosen, recorded))

    result = run(changed(healthy, tmp_path / "s", moved))
    assert result.replay_coverage == pytest.approx(1 - 1 / 49)
    assert "coverage" in ids(result)
