"""The intervals: they cover what they promise, they are paired, and they say nothing where they know nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from r3.metrics import Bootstrap, Estimate
from r3.metrics.bootstrap import MIN_SEQUENCES, bca
from r3.metrics.sums import token_sums

POPULATION = 5000


def sequences(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Rows of sums of `count` sequences: lengths and scales differ, and a share of the tokens of `live` has a heavy tail, as
    flipped experts do (Laplace)."""
    rows: dict[str, list[np.ndarray]] = {"live": [], "replay": []}
    for n in np.maximum(rng.lognormal(3.5, 0.5, count), 8).astype(int):
        scale = math.exp(rng.normal(0, 0.3))
        rollout, rounding = -rng.exponential(1.0, n), rng.normal(0, 0.01, n)
        flips = (rng.random(n) < 0.05 * scale) * rng.laplace(0, 0.06, n)
        for name, d in (("live", rounding + flips), ("replay", rounding)):
            rows[name].append(token_sums(rollout + d, rollout, d))
    return {name: np.array(of) for name, of in rows.items()}


def covered(count: int, rounds: int, resamples: int) -> dict[str, float]:
    """How often the 95 % interval of `count` sequences holds the value of the population that they are drawn from."""
    population = sequences(np.random.default_rng(0), POPULATION)
    true = Bootstrap(population, resamples=1)
    rng = np.random.default_rng(1)
    hits: dict[str, list[bool]] = {}
    for i in range(rounds):
        picks = rng.integers(0, POPULATION, count)
        b = Bootstrap({name: rows[picks] for name, rows in population.items()}, resamples=resamples, seed=i)
        for name, got, value in (
            ("k3 live", b.estimate("live", "k3"), true.values["live"]["k3"]),
            ("k3 replay", b.estimate("replay", "k3"), true.values["replay"]["k3"]),
            ("F(1.1) live", b.estimate("live", "exceed_1.1"), true.values["live"]["exceed_1.1"]),
            ("ratio", b.ratio("replay", "live", "k3"), true.values["replay"]["k3"] / true.values["live"]["k3"]),
            (
                "difference",
                b.difference("live", "replay", "k3"),
                true.values["live"]["k3"] - true.values["replay"]["k3"],
            ),
        ):
            hits.setdefault(name, []).append(got.low <= value <= got.high)
    return {name: float(np.mean(of)) for name, of in hits.items()}


def test_a_nominal_95_percent_covers_90_to_98_percent() -> None:
    """400 rounds: a true coverage of 94 % is measured within 2.4 points, 19 times of 20."""
    shares = covered(60, 400, 400)
    assert all(0.90 <= share <= 0.98 for share in shares.values()), shares


@pytest.mark.engine
@pytest.mark.parametrize("count", [40, 160])
def test_coverage_at_other_numbers_of_sequences(count: int) -> None:
    """No engine is needed: it takes longer than the tests without one may."""
    shares = covered(count, 2000, 800)
    assert all(0.90 <= share <= 0.98 for share in shares.values()), shares


def test_a_paired_difference_is_narrower_than_its_sides() -> None:
    rows = sequences(np.random.default_rng(3), 80)
    rows["again"] = rows["live"] * 1.0
    b = Bootstrap(rows, resamples=300)
    assert b.difference("live", "again", "k3") == Estimate(0.0, 0.0, 0.0)
    ratio = b.ratio("again", "live", "k3")
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)
    width = {name: (e := b.estimate(name, "k3")).high - e.low for name in ("live", "replay")}
    difference = b.difference("live", "replay", "k3")
    assert difference.high - difference.low < width["live"] + width["replay"]


def test_the_same_seed_gives_the_same_interval() -> None:
    rows = sequences(np.random.default_rng(3), 40)
    one, two, other = (Bootstrap(rows, resamples=200, seed=seed).estimate("live", "k3") for seed in (0, 0, 1))
    assert one == two
    assert one != other


def test_no_interval_where_there_is_none() -> None:
    rows = sequences(np.random.default_rng(3), MIN_SEQUENCES - 1)
    got = Bootstrap(rows).estimate("live", "k3")
    assert math.isfinite(got.value)
    assert not got.known
    assert Bootstrap(sequences(np.random.default_rng(3), MIN_SEQUENCES), resamples=100).estimate("live", "k3").known
    zero = {name: of.copy() for name, of in sequences(np.random.default_rng(3), 20).items()}
    zero["replay"][:, 3] = 0
    assert not Bootstrap(zero, resamples=100).ratio("live", "replay", "k3").known, "a ratio to 0 has no interval"
    rare = Bootstrap(sequences(np.random.default_rng(3), 20), resamples=100)
    assert rare.estimate("replay", "exceed_10").value == 0
    assert not rare.estimate("replay", "exceed_10").known, "no token exceeds: resamples of none bound nothing"
    assert not rare.ratio("replay", "live", "exceed_1.1").known


def test_bca_of_a_normal_mean_is_students_interval() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, 15)
    resampled = x[rng.integers(0, 15, (40_000, 15))].mean(axis=1)
    low, high = bca(resampled, float(x.mean()), (x.sum() - x) / 14)
    half = 2.145 * x.std(ddof=1) / math.sqrt(15)  # t quantile of 14 degrees of freedom
    assert high - low == pytest.approx(2 * half, rel=0.06)
    assert (low + high) / 2 == pytest.approx(x.mean(), abs=0.15 * half)
