"""Stitching: however a sequence is cut into legs, the sample is that of one leg; contradictions are errors by position."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
from helpers import SPEC
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import Routes, shard
from r3.errors import R3Warning, SampleError
from r3.stitch import Leg, stitch
from r3.testing import random_rows

RNG = np.random.default_rng(3)


class Truth:
    """A sequence with one row per token, of which every leg is a view, and what each position must come out as."""

    def __init__(self, num_tokens: int) -> None:
        self.tokens = RNG.integers(0, 1000, num_tokens)
        self.rows = random_rows(RNG, SPEC, num_tokens)  # [T, L, K]
        self.logprobs = -RNG.random(num_tokens)
        self.row_of: dict[int, np.ndarray] = {}
        self.sampled: dict[int, int] = {}  # position: weight version


def legs_of(draw, truth: Truth, num_turns: int) -> list[Leg]:
    """Legs as engines and tools make them; `truth` keeps, position by position, what they say together."""
    legs, known = [], 0
    for version in range(num_turns):
        num_new = draw(st.integers(0, 4))  # prompt, tool or user tokens
        num_sampled = draw(st.integers(0, 4))
        end = min(known + num_new + num_sampled, len(truth.tokens))
        num_sampled = min(num_sampled, end - known)
        start = draw(st.sampled_from([0, known, draw(st.integers(0, known))]))
        rows = None
        routes_start = draw(st.sampled_from([0, max(known - 1, 0), start, draw(st.integers(0, end))]))
        if draw(st.integers(0, 4)) and routes_start <= end:
            stop = draw(st.sampled_from([end, max(end - 1, routes_start)]))
            # each prefill rounds a little differently: rows of different legs differ, and the latest counts
            rows = random_rows(RNG, SPEC, stop - routes_start)
            truth.row_of |= {routes_start + i: row for i, row in enumerate(rows)}
        span = range(end - num_sampled, end)
        truth.sampled |= dict.fromkeys(span, version)
        mask = np.isin(np.arange(start, end), span)
        legs.append(
            Leg(
                tokens=truth.tokens[start:end],
                start=start,
                sampled=draw(st.sampled_from([num_sampled, mask])),
                logprobs=truth.logprobs[span.start : span.stop],
                routes=rows if rows is None or draw(st.booleans()) else Routes.from_rows(rows, len(rows), SPEC),
                routes_start=routes_start,
                weight_version=version,
            )
        )
        known = end
    return legs


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_each_position_has_the_row_of_the_last_leg_that_recorded_it(data) -> None:
    """Against the obvious reference: one dictionary entry per position, written by every leg in turn."""
    truth = Truth(24)
    legs = legs_of(data.draw, truth, data.draw(st.integers(0, 6)))
    num_tokens = max((leg.start + len(leg.tokens) for leg in legs), default=0)
    limit = data.draw(st.none() | st.integers(0, 30))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", R3Warning)
        sample = stitch(legs, SPEC, sample_id="s", max_tokens=limit)
    num_tokens = min(num_tokens, num_tokens if limit is None else limit)
    positions = range(num_tokens)
    assert sample.tokens.tolist() == truth.tokens[:num_tokens].tolist()
    assert sample.routes.recorded.tolist() == [t in truth.row_of for t in positions]
    for t in positions:
        if t in truth.row_of:
            assert sample.routes.ids[:, t].tolist() == truth.row_of[t].tolist()
    assert sample.loss_mask.tolist() == [t in truth.sampled for t in positions]
    assert sample.weight_version.tolist() == [truth.sampled.get(t, -1) for t in positions]
    expected = [np.float32(truth.logprobs[t]) if t in truth.sampled else np.nan for t in positions]
    assert np.array_equal(sample.rollout_logprobs, np.array(expected, np.float32), equal_nan=True)
    before = min(truth.sampled, default=max((leg.start + len(leg.tokens) for leg in legs), default=0))
    assert sample.prompt_length == min(before, num_tokens)
    total = max((leg.start + len(leg.tokens) for leg in legs), default=0)
    missing = [t for t in positions if t not in truth.row_of and t != total - 1]
    assert bool(caught) == bool(missing)
    if missing:
        assert f"{len(missing)} of {num_tokens} rows have no record" in str(caught[0].message)


@pytest.mark.parametrize("cut", range(1, 10))
@pytest.mark.parametrize("full", [True, False])
def test_stitching_equals_the_single_leg_at_every_cut(cut, full) -> None:
    """An engine that was interrupted after `cut` tokens: same rows, whether the second leg returns all or only new ones."""
    truth, prompt = Truth(10), 4
    rows = truth.rows[:9]
    one = stitch([Leg(truth.tokens, 0, 6, truth.logprobs[4:], rows)], SPEC, sample_id="s")
    first = max(cut - prompt, 0)
    legs = [Leg(truth.tokens[:cut], 0, first, truth.logprobs[4 : 4 + first], rows[: cut - 1])]
    start = 0 if full else cut - 1  # the row of the first leg's last token comes from the second leg
    rest = 6 - first
    legs.append(
        Leg(
            truth.tokens[0 if full else cut :],
            0 if full else cut,
            rest,
            truth.logprobs[10 - rest :],
            rows[start:],
            start,
        )
    )
    two = stitch(legs, SPEC, sample_id="s")
    assert shard.save(two) == shard.save(one)


def test_a_gap_is_a_gap_and_not_a_shift() -> None:
    """The second leg leaves out the boundary row (it starts at its first new token): that row alone is missing."""
    truth = Truth(8)
    legs = [
        Leg(truth.tokens[:5], 0, 2, truth.logprobs[3:5], truth.rows[:4]),
        Leg(truth.tokens[5:], 5, 3, truth.logprobs[5:], truth.rows[5:7]),
    ]
    with pytest.warns(R3Warning, match=r"sample 's': 1 of 8 rows have no record \(1 of leg 0\)"):
        sample = stitch(legs, SPEC, sample_id="s")
    assert sample.routes.recorded.tolist() == [True] * 4 + [False] + [True] * 2 + [False]
    assert np.array_equal(sample.routes.ids[:, 5:7], truth.rows[5:7].transpose(1, 0, 2))


def test_a_full_array_replaces_but_an_unrecorded_row_of_it_does_not() -> None:
    truth, later = Truth(6), random_rows(RNG, SPEC, 5)
    routes = Routes.from_rows(later, 5, SPEC)
    routes.recorded[1] = False  # e.g. zeros behind a prefix-cache hit
    legs = [
        Leg(truth.tokens[:4], 0, 1, truth.logprobs[3:4], truth.rows[:3], weight_version=1),
        Leg(truth.tokens, 0, 2, truth.logprobs[4:], routes, weight_version=2),
    ]
    sample = stitch(legs, SPEC, sample_id="s")
    expected = later.copy()
    expected[1] = truth.rows[1]
    assert np.array_equal(sample.routes.ids[:, :5], expected.transpose(1, 0, 2))
    assert sample.weight_version.tolist() == [-1, -1, -1, 1, 2, 2]


def test_legs_without_routes_are_counted_aloud() -> None:
    truth = Truth(9)
    legs = [
        Leg(truth.tokens[:3], 0, 1, truth.logprobs[2:3]),
        Leg([], 3),  # aborted before the first token
        Leg(truth.tokens[3:5], 3),  # a tool's answer
        Leg(truth.tokens[5:], 5, 4, truth.logprobs[5:], truth.rows[4:8], 4),
    ]
    with pytest.warns(
        R3Warning, match=r"4 of 9 rows have no record \(3 of leg 0, 1 of leg 2\); these tokens will route live"
    ):
        sample = stitch(legs, SPEC, sample_id="s")
    assert sample.routes.recorded.tolist() == [False] * 4 + [True] * 4 + [False]
    assert sample.prompt_length == 2


def leg(truth: Truth, **changes) -> Leg:
    whole = Leg(truth.tokens, 0, 4, truth.logprobs[4:], truth.rows[:7])
    return dataclasses.replace(whole, **changes)


def test_contradictions_are_errors_with_a_place() -> None:
    truth = Truth(8)
    first = Leg(truth.tokens[:6], 0, 2, truth.logprobs[4:6], truth.rows[:5])
    drifted = truth.tokens.copy()
    drifted[3] = 5000
    cases = {
        rf"leg 1, position 3 \(token 3 of the leg\): 1 tokens of this leg's context are not those of the legs before\n"
        rf"  expected token {truth.tokens[3]}, got token 5000": leg(truth, tokens=drifted, sampled=2),
        r"leg 1: a leg begins after the end of what came before.*\n  expected start in 0\.\.6, got 7": Leg([1], 7),
        r"leg 1, position 4: 2 tokens were sampled by an earlier leg": leg(truth),
        r"leg 1: every sampled token needs its log-prob\n  expected 2 log-probs, got 4": leg(truth, sampled=2),
        r"leg 1: more tokens sampled than the leg has": leg(truth, sampled=9),
        r"leg 1: the mask of sampled tokens does not fit": leg(truth, sampled=np.zeros(3, np.bool_)),
        r"leg 1: rows beyond the tokens of this leg\n  expected rows of positions 0\.\.7, got 7 rows from position 6": leg(
            truth, sampled=2, logprobs=None, routes_start=6
        ),
        r"leg 1: expert ids are out of range\n  expected 0\.\.7, got 0\.\.264": leg(
            truth,
            sampled=2,
            logprobs=None,
            routes=np.where(truth.rows[:7] == 7, 264, 0),  # 264 would be 8 in a byte
        ),
        r"leg 1: rows do not fit the tokens and the spec": leg(
            truth, sampled=2, logprobs=None, routes=truth.rows[:7, :2]
        ),
    }
    for message, bad in cases.items():
        with pytest.raises(SampleError, match=r"sample 's': " + message):
            stitch([first, bad], SPEC, sample_id="s")


def test_log_probs_that_nobody_gave_are_nan() -> None:
    truth = Truth(8)
    sample = stitch([leg(truth, logprobs=None)], SPEC, sample_id="s", group_id="g")
    assert np.isnan(sample.rollout_logprobs).all()
    assert sample.loss_mask.sum() == 4
    assert sample.group_id == "g"
