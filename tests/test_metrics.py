"""Metrics against the definitions, written out by hand in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3.errors import MetricError
from r3.metrics import RouteMismatch, bootstrap_interval, gap_metrics, k3_terms, log_ratio

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
    expected = 1.96 * math.sqrt(0.25 / 20)
    assert (high - low) / 2 == pytest.approx(expected, rel=0.15)
    assert low < 0.5 < high
