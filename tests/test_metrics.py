"""Metrics against the definitions, written out by hand in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3.errors import MetricError
from r3.metrics import (
    GapAccumulator,
    RouteMismatch,
    TopToken,
    TopTokens,
    bootstrap_interval,
    gap_metrics,
    js_terms,
    k3_terms,
    log_ratio,
)
from r3.metrics.buckets import PROBABILITY_EDGES, Buckets, ByVersion, bucket_of, token_terms
from r3.metrics.shift import RouterShift
from r3.metrics.sketch import LogRatioSketch

RATIOS = st.lists(st.floats(-5, 5), min_size=1, max_size=50)


@given(RATIOS)
def test_gap_metrics_follow_their_definitions(values) -> None:
    d = np.array(values)
    got = gap_metrics(d)
    n = len(values)
    assert got.num_tokens == n
    assert got.k1 == pytest.approx(-sum(values) / n)
    assert got.k2 == pytest.approx(sum(v * v / 2 for v in values) / n)
    assert got.k3 == pytest.approx(sum(math.expm1(v) - v for v in values) / n)
    assert got.mean_abs == pytest.approx(sum(map(abs, values)) / n)
    for tau in (1.1, 1.5, 2, 3, 5, 10):
        share = sum(max(math.exp(v), math.exp(-v)) > tau for v in values if abs(abs(v) - math.log(tau)) > 1e-12) / n
        assert got.exceed[f"{tau:g}"] == pytest.approx(share)
    assert got.max_ratio == pytest.approx(math.exp(max(map(abs, values))))
    ratios = [math.exp(v) for v in values]
    assert got.ess == pytest.approx(sum(ratios) ** 2 / sum(r * r for r in ratios) / n)
    assert got.chi2_token == pytest.approx(sum(r * r for r in ratios) / n - 1)
    assert got.mean_ratio == pytest.approx(sum(ratios) / n)
    assert got.k3_reverse == pytest.approx(sum(math.expm1(-v) + v for v in values) / n)
    assert got.mult_prob == pytest.approx(sum(math.exp(abs(v)) for v in values) / n)
    assert got.unchanged == sum(v == 0 for v in values) / n
    mixtures = [(1 + r) / 2 for r in ratios]  # divided by p_rollout
    against = [r / m - 1 - math.log(r / m) + 1 / m - 1 + math.log(m) for r, m in zip(ratios, mixtures, strict=True)]
    assert got.js == pytest.approx(sum(against) / n / 2, abs=1e-12)
    assert math.isnan(got.pearson), "without the rollout's log-probs nothing is known of probabilities"


def test_k3_is_exact_where_the_naive_form_is_not() -> None:
    d = np.array([1e-9])
    assert k3_terms(d)[0] == pytest.approx(5e-19, rel=1e-2, abs=0)
    assert gap_metrics(np.zeros(3)).k3 == 0


def test_k3_estimates_kl_of_rollout_against_train() -> None:
    """Sampled from p (the rollout), mean k3 converges to sum p log(p / q), not to the reverse."""
    p, q = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    tokens = np.random.default_rng(0).choice(3, 400_000, p=p)
    estimate = gap_metrics(log_ratio(np.log(q[tokens]), np.log(p[tokens]))).k3
    forward, reverse = (p * np.log(p / q)).sum(), (q * np.log(q / p)).sum()
    assert estimate == pytest.approx(forward, rel=0.01)
    assert abs(forward - reverse) > 0.05 * forward


def test_monte_carlo_of_every_estimator_against_the_closed_form() -> None:
    """Two policies over 50 tokens, 200,000 samples of the rollout: each estimator within four standard errors of its value."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=50)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (z, z + 0.3 * rng.normal(size=50)))
    tokens = rng.choice(50, 200_000, p=p)
    d, exact = np.log(q / p), (lambda values: float((p * values).sum()))
    got = gap_metrics(d[tokens], np.log(p)[tokens])
    kl = exact(-d)
    closed = {
        "k1": (kl, -d),
        "k2": (exact(d * d / 2), d * d / 2),
        "k3": (kl, np.expm1(d) - d),
        "k3_reverse": (exact(np.exp(-d) - 1 + d), np.expm1(-d) + d),
        "mean_abs": (exact(np.abs(d)), np.abs(d)),
        "mean_ratio": (1.0, np.exp(d)),
        "chi2_token": (float((q * q / p).sum()) - 1, np.exp(2 * d)),
        "js": (0.5 * float((p * np.log(2 * p / (p + q)) + q * np.log(2 * q / (p + q))).sum()), js_terms(d)),
        "prob_diff_mean": (exact(np.abs(q - p)), np.abs(q - p)),
    }
    for name, (value, terms) in closed.items():
        if name == "js":
            continue  # on samples of one side it is not the divergence: see below
        error = math.sqrt(exact(terms**2) - exact(terms) ** 2) / math.sqrt(200_000)
        assert getattr(got, name) == pytest.approx(value, abs=4 * error), name
    m = (p + q) / 2
    assert got.js == pytest.approx(
        exact(0.5 * (q / m - 1 - np.log(q / m)) + 0.5 * (p / m - 1 - np.log(p / m))), rel=0.02
    )
    assert got.pearson == pytest.approx(np.corrcoef(p[tokens], q[tokens])[0, 1])
    assert got.exceed["1.1"] == pytest.approx(exact(np.abs(d) > math.log(1.1)), abs=0.005)


@pytest.mark.parametrize(
    ("train", "rollout", "message"),
    [
        ([], [], "no sampled token"),
        ([-1.0], [-1.0, -2.0], "unequal shape"),
        ([-1.0, float("nan")], [-1.0, -1.0], "token 1: the trainer gave something that is not a log-prob"),
        ([-1.0, -1.0], [3.0, -1.0], "token 0: the rollout gave something that is not a log-prob"),
    ],
)
def test_what_must_not_be_compared_is_refused(train, rollout, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        log_ratio(train, rollout)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 12), st.integers(1, 3), st.integers(0, 2**32))
def test_route_mismatch_counts_sets(num_layers, rows, top_k, seed) -> None:
    rng = np.random.default_rng(seed)
    a, b = (rng.random((num_layers, rows, 6)).argsort(-1)[..., :top_k].astype(np.uint8) for _ in range(2))
    cut = rows // 2
    got = RouteMismatch(num_layers)
    got.add(a[:, :cut], b[:, :cut])
    got.add(a[:, cut:], b[:, cut:])
    differs = [[set(a[i, t]) != set(b[i, t]) for i in range(num_layers)] for t in range(rows)]
    overlap = [sum(len(set(a[i, t]) & set(b[i, t])) / top_k for t in range(rows)) for i in range(num_layers)]
    assert got.rows == rows
    assert got.rows_with_any == sum(map(any, differs))
    assert got.differing.tolist() == [sum(line[i] for line in differs) for i in range(num_layers)]
    assert got.overlap.tolist() == pytest.approx(overlap)
    same = RouteMismatch(num_layers)
    same.add(a, a[..., ::-1])  # the order in which a router lists its experts does not matter
    assert same.share == 0


def test_bootstrap_resamples_sequences_not_tokens() -> None:
    """Two kinds of sequences, constant inside: the interval must be as wide as 20 sequences make it, whatever their length."""
    sequences = [np.full(1000, float(i % 2)) for i in range(20)]
    low, high = bootstrap_interval(sequences)
    expected = 2.093 * math.sqrt(0.25 / 19)  # Student's t with 19 degrees of freedom
    assert (high - low) / 2 == pytest.approx(expected, rel=0.15)
    assert low < 0.5 < high


@given(
    st.lists(st.floats(-20, 20).filter(lambda v: v == 0 or abs(v) > 1e-9), min_size=1, max_size=200), st.floats(0.01, 1)
)
def test_a_sketch_quantile_is_within_half_a_percent_of_the_value_at_its_rank(values, q) -> None:
    d = np.array(values)
    sketch = LogRatioSketch()
    sketch.add(d)
    rank = max(math.ceil(q * len(d)), 1) - 1
    assert sketch.quantile_abs(q) == pytest.approx(np.sort(np.abs(d))[rank], rel=0.0051)
    assert sketch.quantile(q) == pytest.approx(np.sort(d)[rank], rel=0.0051)


def test_a_sketch_keeps_what_is_beyond_its_bins() -> None:
    sketch = LogRatioSketch()
    sketch.add(np.array([1e-12, -1e-12, 500.0, -500.0]))
    assert sketch.total == 4
    assert sketch.quantile_abs(0.5) == 0
    assert sketch.quantile_abs(1.0) == pytest.approx(100, rel=0.01)
    bins = sketch.plot_bins()
    assert sum(bins["counts"]) == 4
    assert sketch.tail_counts(np.array([1.0])).tolist() == [2]


def test_many_sequences_merged_in_any_order_are_one() -> None:
    """Ranks: three accumulators merged, against one over everything, against numpy on the whole vector."""
    rng = np.random.default_rng(0)
    sequences = [(-rng.exponential(1, n), rng.normal(0, 0.1, n)) for n in rng.integers(1, 60, 30)]
    one, ranks = GapAccumulator(), [GapAccumulator() for _ in range(3)]
    for i, (rollout, d) in enumerate(sequences):
        one.add(rollout + d, rollout)
        ranks[i % 3].add(rollout + d, rollout)
    ranks[2].merge(ranks[0])
    ranks[2].merge(ranks[1])
    a, b = one.metrics().to_dict(), ranks[2].metrics().to_dict()
    assert a.pop("exceed") == b.pop("exceed")
    assert a == pytest.approx(b, rel=1e-12)
    whole = gap_metrics(np.concatenate([d for _, d in sequences]), np.concatenate([r for r, _ in sequences])).to_dict()
    assert whole.pop("exceed") is not None
    assert a == pytest.approx(whole, rel=1e-9)
    per_sequence = one.sequence_metrics()
    assert per_sequence.training_ppl == pytest.approx(np.mean([np.exp(-(r + d).mean()) for r, d in sequences]))
    assert per_sequence.k1_sum["max"] == pytest.approx(max(-d.sum() for _, d in sequences))
    assert per_sequence.k3_mean["p95"] == pytest.approx(np.quantile([k3_terms(d).mean() for _, d in sequences], 0.95))
    assert per_sequence.chi2_seq == pytest.approx(np.mean([np.expm1(2 * d.sum()) for _, d in sequences]))


def test_buckets_partition_the_tokens() -> None:
    rng = np.random.default_rng(0)
    p, d = rng.random(1000), rng.normal(0, 0.5, 1000)
    buckets = Buckets(PROBABILITY_EDGES)
    buckets.add(token_terms(d[:300]), p[:300])
    other = Buckets(PROBABILITY_EDGES)
    other.add(token_terms(d[300:]), p[300:])
    buckets.merge(other)
    found = buckets.to_list()
    assert sum(b["tokens"] for b in found) == 1000
    assert sum(b["tokens"] * b["k3"] for b in found) / 1000 == pytest.approx(gap_metrics(d).k3)
    for b in found:
        inside = (p >= b["low"]) & (p < (b["high"] or 2))
        assert b["tokens"] == inside.sum()
        assert b["mean_abs"] == pytest.approx(np.abs(d[inside]).mean())
        assert b["exceed_2"] == pytest.approx((np.abs(d[inside]) > math.log(2)).mean())
    assert bucket_of(np.array([-1.0, 0.0, 0.9, 1.0, 5.0]), (0, 1)).tolist() == [0, 0, 0, 1, 1]
    versions = ByVersion()
    versions.add(token_terms(d), np.where(p < 0.5, 3, 4).astype(np.int32))
    assert [entry["version"] for entry in versions.to_list()] == [3, 4]
    assert versions.to_list()[0]["k3"] == pytest.approx(k3_terms(d[p < 0.5]).mean())


def test_router_shift_against_its_definition() -> None:
    rng = np.random.default_rng(0)
    new, old = (np.log(rng.dirichlet(np.ones(6), (3, 7))) for _ in range(2))
    ids = rng.random((3, 7, 6)).argsort(-1)[..., :2]
    got = RouterShift(3)
    gamma = got.add(new, old, ids)
    for t in range(7):
        moved = [np.mean([abs(new[i, t, e] - old[i, t, e]) for e in ids[i, t]]) for i in range(3)]
        assert gamma[t] == pytest.approx(math.exp(-np.mean(moved)))
    other = RouterShift(3)
    other.add(old, old, ids)
    got.merge(other)
    data = got.to_dict()
    assert (data["rows"], data["mean"], data["min"]) == (14, pytest.approx((gamma.sum() + 7) / 14), gamma.min())
    assert data["mean_abs_by_layer"][1] == pytest.approx(np.abs(np.take_along_axis(new - old, ids, 2))[1].mean() / 2)


def token(k3: float, name: str = "s") -> TopToken:
    return TopToken(name, 0, 0, 0, k3, -1.0, {"live": -1.0}, -1, -1, (), 0)


@given(st.lists(st.floats(0, 1), max_size=40), st.integers(1, 10))
def test_top_tokens_are_the_largest(values, size) -> None:
    top, rest = TopTokens(size), TopTokens(size)
    for i, value in enumerate(values):
        (top if i % 2 else rest).add(token(value, str(i)))
    top.merge(rest)
    assert [t.k3 for t in top.sorted()] == sorted(values, reverse=True)[:size]


def test_candidates_hold_every_token_that_could_enter() -> None:
    rng = np.random.default_rng(0)
    d = rng.normal(size=500)
    top = TopTokens(5)
    assert set(np.argsort(k3_terms(d))[-5:]) <= set(top.candidates(k3_terms(d)).tolist())
    for value in k3_terms(d)[np.argsort(k3_terms(d))[-5:]]:
        top.add(token(float(value)))
    assert len(top.candidates(k3_terms(d * 0.1))) == 0


def test_route_mismatch_by_expert_and_position() -> None:
    """Layer 0 loses expert 1 to expert 5 in the second row, which stands at position 40."""
    b = np.array([[[0, 1], [2, 1]], [[3, 4], [3, 4]]], np.uint8)
    a = b.copy()
    a[0, 1] = [2, 5]
    got = RouteMismatch(2, 6)
    assert got.add(a, b, np.array([0, 40])).tolist() == [0, 1]
    assert np.argwhere(got.lost).tolist() == [[0, 1]]
    assert np.argwhere(got.gained).tolist() == [[0, 5]]
    assert got.recorded[0].tolist() == [1, 2, 1, 0, 0, 0]
    data = got.to_dict()
    shares = dict(zip(data["by_position"]["low"], data["by_position"]["share"][0], strict=True))
    assert (shares[0], shares[32]) == (0, 1)
    assert data["tokens_by_differing_layers"] == [1, 1, 0]
    assert data["share_disjoint"] == 0
    other = RouteMismatch(2, 6)
    other.add(a, b, np.array([0, 40]))
    got.merge(other)
    assert (got.rows, got.rows_with_any, got.differing.tolist()) == (4, 2, [2, 0])
    with pytest.raises(MetricError, match="different models"):
        got.merge(RouteMismatch(2, 7))
