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
from r3.diagnose import FORWARDS, LIVE, REPLAY, Diagnosis, Scored, diagnose
from r3.diagnose.accumulate import Accumulator, ScoredSequence
from r3.errors import ConfigError, MetricError, ReplayError, SpecError
from r3.metrics import RouteMismatch

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
    result = diagnose(
        store, scorer, batch_tokens=24, probe_temperature=False, progress=lambda done, total: seen.append((done, total))
    )
    assert result.gaps[LIVE].num_tokens == sum(4 + i for i in range(5))
    assert result.gaps[LIVE].k3 == pytest.approx(math.expm1(-0.5) + 0.5, rel=1e-4)
    assert result.gaps[LIVE].exceed["1.5"] == 1
    assert result.gaps[REPLAY].k3 == pytest.approx(math.expm1(-0.01) + 0.01, rel=1e-3)
    assert result.gaps[REPLAY].exceed["1.1"] == 0
    difference = result.comparison("k3").difference
    assert difference.value == pytest.approx(result.gaps[LIVE].k3 - result.gaps[REPLAY].k3)
    assert not difference.known, "five sequences are too few for an interval"
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


def test_intervals_of_a_constant_gap_have_no_width(tmp_path) -> None:
    result = diagnose(filled(tmp_path / "s", 12), KnownScorer())
    low, high = result.k3_saved
    assert low == pytest.approx(high, rel=1e-3)
    assert low == pytest.approx(result.gaps[LIVE].k3 - result.gaps[REPLAY].k3, rel=1e-3)


def test_what_repeats_a_run_is_in_its_result(tmp_path) -> None:
    store = filled(tmp_path / "s")
    results = [diagnose(store, KnownScorer(), command=["r3", "diagnose"], seed=3) for _ in range(2)]
    assert results[0].to_dict() == results[1].to_dict()
    run = results[0].run
    assert run["bootstrap"] == {"resamples": 2000, "seed": 3, "level": 0.95, "sequences": 5}
    assert (run["source"], run["command"]) == (str(store.root), ["r3", "diagnose"])
    store.add(random_sample(RNG, num_tokens=9, sample_id="s9"))
    assert diagnose(store, KnownScorer()).run["token_digest"] != run["token_digest"]


def test_the_json_of_a_result_is_json(tmp_path) -> None:
    """No NaN, no infinity, nothing that only Python reads; and it says the numbers of the result."""
    result = diagnose(filled(tmp_path / "s"), KnownScorer())
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["direction"] == "KL(rollout || train)"
    assert data["forwards"]["live"]["k3"] == result.gaps[LIVE].k3
    assert data["forwards"]["live"]["intervals"]["k3"] == {"value": result.gaps[LIVE].k3, "low": None, "high": None}
    assert data["forwards"]["live"]["routes"]["share_by_layer"][1] > 0
    assert data["verified_token_layers"] == 135
    assert data["verdict"]["level"] == result.verdict.level


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
        probes, forwards = scorer.batches[:3], scorer.batches[3:]
        assert {t for _, _, t in forwards} == {expected}
        assert [t for _, _, t in probes] == pytest.approx([expected, expected * 1.05, expected / 1.05])


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


def test_a_real_model_whose_rollout_is_itself_has_no_gap(tmp_path) -> None:
    """Routes and log-probs recorded from the very model that scores: live and replay agree with it to the last digit."""
    from r3.trainers.score import TransformersScorer

    build().save_pretrained(tmp_path / "model")
    scorer = TransformersScorer(tmp_path / "model", dtype="float32", device="cpu")
    store = ShardStore(tmp_path / "store", create=True)
    blank = [random_sample(RNG, scorer.spec, 6 + 3 * i, sample_id=f"s{i}") for i in range(8)]
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
    assert result.verdict.text.startswith("There is no gap to close")

    # other routes, same log-probs: now replay is what makes the gap, and the experts still get the recorded ids
    other = ShardStore(tmp_path / "other", create=True)
    for sample in store:
        other.add(dataclasses.replace(sample, routes=random_routes(RNG, scorer.spec, sample.num_tokens)))
    result = diagnose(other, scorer)
    assert result.gaps[LIVE].mean_abs == pytest.approx(0, abs=1e-6)
    assert result.gaps[REPLAY].mean_abs > 1e-4
    assert result.mismatch[REPLAY].share == 0
    assert result.mismatch[LIVE].share > 0.5


def test_accumulators_of_two_ranks_are_one() -> None:
    """Every number of a diagnosis, its intervals and its top tokens: of two halves merged as of the whole."""
    rng = np.random.default_rng(0)

    def sequence(i: int) -> ScoredSequence:
        n = int(rng.integers(0, 30)) if i % 5 else 0
        rollout = -0.5 - rng.exponential(1, n)
        train = {name: rollout + rng.normal(0, 0.05, n) for name in FORWARDS}
        versions, differing = rng.integers(3, 5, n).astype(np.int32), rng.integers(-1, 3, n)
        return ScoredSequence(f"s{i}", np.arange(2, n + 2), rollout, train, versions, np.arange(n + 2), differing)

    def filled_of(total: Accumulator) -> dict[str, Any]:
        result = Diagnosis({}, {})
        total.fill(
            result, routing=dict.fromkeys(FORWARDS, "own"), trainers={name: {} for name in FORWARDS}, resamples=100
        )
        return result.to_dict()

    def empty() -> Accumulator:
        total = Accumulator(FORWARDS)
        total.routes = {name: RouteMismatch(2, 8) for name in FORWARDS}
        return total

    sequences = [sequence(i) for i in range(40)]
    whole, first, second = empty(), empty(), empty()
    ids = rng.integers(0, 8, (2, 2, 9, 2))
    for i, each in enumerate(sequences):
        whole.add(each)
        (first if i < 17 else second).add(each)
    for total in (whole, whole, first, second):
        total.routes[LIVE].add(*ids, np.arange(9))
    whole.missing = 3
    first.missing, second.missing = 1, 2
    first.merge(second)
    one, merged = filled_of(whole), filled_of(first)
    assert one.pop("noise_mean_abs") == pytest.approx(merged.pop("noise_mean_abs"))
    close(one, merged)
    assert len(whole.sample_ids) + len(whole.empty) == 40
    assert whole.offsets.correlations() == pytest.approx(first.offsets.correlations())


def close(a: Any, b: Any, where: str = "") -> None:
    """Equal in structure, and in numbers to rounding of sums in another order."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            close(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, f"{where}[{i}]")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-12), where
    else:
        assert a == b, where


def recorded_store(path, scorer, count: int = 8) -> ShardStore:
    """Samples whose log-probs and routes are the scorer's own."""
    store = ShardStore(path, create=True)
    blank = [random_sample(RNG, scorer.spec, 12, sample_id=f"s{i}") for i in range(count)]
    for sample, scored in zip(blank, scorer.score(blank, replay=False), strict=True):
        store.add(
            dataclasses.replace(
                sample,
                rollout_logprobs=np.where(sample.loss_mask, scored.logprobs, np.nan).astype(np.float32),
                routes=dataclasses.replace(sample.routes, ids=scored.expert_ids),
                provenance=dataclasses.replace(sample.provenance, model_fingerprint=scorer.fingerprint),
            )
        )
    return store


def test_a_padded_output_layer_of_a_real_model_is_named(tmp_path) -> None:
    """The trainer's output layer has 28 rows more than the vocabulary, as one that was padded for tensor parallelism."""
    import torch

    from r3.trainers.score import TransformersScorer

    build().save_pretrained(tmp_path / "model")
    scorer = TransformersScorer(tmp_path / "model", dtype="float32", device="cpu")
    store = recorded_store(tmp_path / "s", scorer)
    head = scorer.model.lm_head
    head.weight = torch.nn.Parameter(torch.cat([head.weight, torch.zeros(28, head.weight.shape[1])]))
    result = diagnose(store, scorer)
    [finding] = [f for f in result.findings if f.id == "vocabulary-padding"]
    assert finding.severity == "error"
    assert finding.numbers["padding_mass"] == pytest.approx(0.22, abs=0.03)
    assert result.gaps[LIVE].mean_ratio == pytest.approx(1 - finding.numbers["padding_mass"], abs=1e-3)


def test_padding_mass_and_temperature_against_a_softmax() -> None:
    import torch

    from r3.trainers.score import padding_mass
    from r3.trainers.transformers import token_logprobs

    logits, ids = torch.randn(2, 5, 12, dtype=torch.float64), torch.randint(0, 9, (2, 5))
    p = (logits / 0.7).softmax(-1)
    mass = padding_mass(logits, 9, 0.7, chunk=3)
    assert np.isnan(mass[:, 0]).all()
    assert mass[:, 1:] == pytest.approx(p[:, :-1, 9:].sum(-1).numpy(), abs=1e-6)
    got = token_logprobs(logits, ids, temperature=0.7, chunk=3)
    assert got[:, 1:] == pytest.approx(p[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).log().numpy(), abs=1e-5)


def test_a_scorer_is_picked_by_name(tmp_path) -> None:
    from r3.trainers.score import TransformersScorer, load_scorer

    build().save_pretrained(tmp_path / "model")
    assert isinstance(load_scorer("transformers", tmp_path / "model", device="cpu"), TransformersScorer)
    with pytest.raises(ConfigError, match="no such backend"):
        load_scorer("deepspeed", tmp_path / "model")


def test_routes_of_another_scorer_are_replayed_as_r2(tmp_path) -> None:
    """The old policy records, the new one replays: R2's pass uses the old policy's routes, the rollout's pass the rollout's."""
    from r3.trainers.score import TransformersScorer

    for seed in (0, 1):
        build(seed).save_pretrained(tmp_path / str(seed))
    old, new = (
        TransformersScorer(tmp_path / str(seed), dtype="float32", device="cpu", router_scores=True) for seed in (0, 1)
    )
    store = recorded_store(tmp_path / "s", old)
    result = diagnose(store, new, r2=old, allow_other_weights=True)
    assert result.mismatch["r2"].share == 0, "the rollout here is the old policy itself"
    assert result.gaps["r2"].k3 == pytest.approx(result.gaps[REPLAY].k3)
    assert result.router_shift["rows"] == result.recorded
    assert 0 < result.router_shift["min"] < result.router_shift["mean"] < 1
    same = diagnose(
        store, old, r2=TransformersScorer(tmp_path / "0", dtype="float32", device="cpu", router_scores=True)
    )
    assert same.router_shift["min"] == 1
    sample = store.open("s0")
    layer = new.spec.moe_layers[0]
    [scored] = new.score([sample], replay=False)
    router = new.model.model.layers[layer].mlp.gate
    seen = []
    handle = router.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    new.score([sample], replay=False)
    handle.remove()
    expected = (seen[0].reshape(12, -1) @ router.weight.T).log_softmax(-1).detach().numpy()
    assert scored.router_logprobs[0] == pytest.approx(expected, abs=1e-5)
    own = diagnose(store, new, r2=True, allow_other_weights=True)
    assert own.router_shift is None
    assert own.mismatch["r2"].share == own.mismatch[LIVE].share > 0.3
    assert own.gaps["r2"].k3 == pytest.approx(own.gaps[LIVE].k3, rel=1e-5)
