"""The decoder of vLLM's payload: what is right comes back exactly, what is wrong is refused with its cause."""

from __future__ import annotations

import base64
import contextlib
import io

import numpy as np
import pytest
from helpers import SPEC, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import RoutingSpec
from r3.errors import WireError
from r3.wire import decode_vllm, encode_vllm, parse_npy, routes_from_rows


@st.composite
def specs(draw: st.DrawFn) -> RoutingSpec:
    num_layers = draw(st.integers(1, 6))
    moe_layers = sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1)))
    num_experts = draw(st.integers(2, 600))
    return RoutingSpec(num_layers, tuple(moe_layers), num_experts, draw(st.integers(2, min(num_experts, 9))))


@settings(max_examples=200, deadline=None)
@given(st.data(), specs(), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_decoding_gives_back_what_was_encoded(data, spec, hidden, full, seed) -> None:
    num_tokens = data.draw(st.integers(1, 20))
    start = data.draw(st.integers(0, num_tokens - 1))
    rows = random_rows(np.random.default_rng(seed), spec, num_tokens - start - (not full), hidden=hidden)
    dtype = data.draw(st.sampled_from(["u1", "<u2", "<i2", "<i4"]))
    if np.iinfo(dtype).max < spec.num_experts:
        dtype = "<i4"

    routes = decode_vllm(encode_vllm(rows.astype(dtype)), spec, num_tokens=num_tokens, start=start)

    moe_rows = rows[:, list(spec.moe_layers)] if rows.shape[1] == spec.num_layers else rows
    assert routes.ids.shape == (spec.num_moe_layers, num_tokens, spec.top_k)
    assert routes.ids.dtype == spec.dtype
    assert routes.recorded.tolist() == [start <= t < start + len(rows) for t in range(num_tokens)]
    for i in range(len(rows)):
        for layer in range(spec.num_moe_layers):
            assert routes.ids[layer, start + i].tolist() == moe_rows[i, layer].tolist()


def npy(array: np.ndarray, **kwargs) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array, **kwargs)
    return base64.b64encode(buffer.getvalue()).decode()


def header(text: str, body: bytes = b"", magic: bytes = b"\x93NUMPY\x01\x00", length: int | None = None) -> str:
    raw = text.encode("latin-1")
    size = (len(raw) if length is None else length).to_bytes(2, "little")
    return base64.b64encode(magic + size + raw + body).decode()


ROWS = random_rows(np.random.default_rng(0), SPEC, 9, hidden=True)  # 10 tokens


def changed(change) -> str:
    rows = ROWS.astype(np.int32)
    change(rows)
    return encode_vllm(rows)


def put(where, value):
    return lambda rows: rows.__setitem__(where, value)


GOOD = encode_vllm(ROWS)
BROKEN = {
    "null": (None, "returned no routes", "--enable-return-routed-experts"),
    "list": (ROWS.tolist(), "not a base64 string", "0.21"),
    "truncated base64": (GOOD[:-1], "not valid base64", "cut"),
    "truncated body": (GOOD[:200], "the .npy body is not what its header announces", "cut"),
    "foreign characters": ("!" + GOOD[1:], "not valid base64", "rewritten"),
    "empty": ("", "not a .npy file", "SGLang"),
    "raw int32, as SGLang sends": (
        base64.b64encode(ROWS.astype("<i4").tobytes()).decode(),
        "not a .npy file",
        "SGLang",
    ),
    "object dtype": (
        npy(np.array([None, {}], dtype=object), allow_pickle=True),
        "a dtype that no engine sends",
        "pickle",
    ),
    "float dtype": (npy(ROWS.astype(np.float32)), "a dtype that no engine sends", "<f4"),
    "big-endian": (npy(ROWS.astype(">i4")), "a dtype that no engine sends", ">i4"),
    "Fortran order": (npy(np.asfortranarray(ROWS)), "not in C order", "fortran_order"),
    "header of 60 KB": (header("{'descr': '|u1'", length=60000), "header is not credible", "60000"),
    "4 GiB shape": (
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (1024, 1024, 4096), }\n"),
        "body is not what its header announces",
        "4294967296 bytes",
    ),
    "negative shape": (
        header("{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 2, 2), }\n"),
        "plain shape",
        "-1",
    ),
    "unknown .npy version": (header("{}", magic=b"\x93NUMPY\x09\x00"), "unknown .npy version", "got 9"),
    "header cut": (base64.b64encode(b"\x93NUMPY\x01").decode(), "header is not credible", "cut"),
    "two dimensions": (encode_vllm(ROWS[:, 0]), r"not \[rows, layers, top-k\]", "3 dimensions"),
    "another top-k": (
        encode_vllm(np.concatenate([ROWS, ROWS], 2)),
        "another number of experts",
        "expected top-2, got top-4",
    ),
    "a layer too few": (encode_vllm(ROWS[:, :2]), "the layer axis fits neither", "expected 4 or 3, got 2"),
    "a row too many": (encode_vllm(np.concatenate([ROWS, ROWS[:2]])), "rows do not fit", "speculative decoding"),
    "a row too few": (encode_vllm(ROWS[:-1]), "rows do not fit", "stop token"),
    "rows of another request": (encode_vllm(ROWS[:4]), "rows do not fit", "different sequences"),
    "physical id": (changed(put((3, 2, 1), 8)), "token 3, layer 2: an expert id is out of range", "expert-parallel"),
    "padding of -1": (changed(put((3, 2, 1), -1)), "token 3, layer 2: an expert id is out of range", "padding"),
    "padding of 255": (changed(put((3, 2, 1), 255)), "token 3, layer 2: an expert id is out of range", "padding"),
    "uint8 read as int8": (changed(put((3, 2, 1), -128)), "token 3, layer 2: an expert id is out of range", "signed"),
    "dense layer with ids": (changed(put((2, 0), [1, 2])), "layer 0: a layer that should be dense", "shifted"),
    "all zero": (changed(put(slice(None), 0)), "every expert id is 0", "capture hook"),
    "leading zero rows": (changed(put(slice(0, 4), 0)), "tokens 0-3: 4 of 9 rows are zeros", "prefix-cache"),
    "trailing zero rows": (changed(put(slice(7, 9), 0)), "tokens 7-8: 2 of 9 rows are zeros", "shard"),
    "zero rows inside": (changed(put([2, 5], 0)), "tokens 2, 5: 2 of 9 rows are zeros", "preempted"),
    "zero layer": (changed(put((slice(None), 2), 0)), "layers 2: 1 of 3 MoE layers are zeros", "pipeline"),
    "repeated id": (changed(put((6, 3), [5, 5])), "token 6, layer 3: an expert is chosen twice", "got [5, 5]"),
    "partly zero row": (changed(put((6, 3), [0, 0])), "token 6, layer 3: an expert is chosen twice", "got [0, 0]"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_payload_is_refused_with_its_cause(case: str) -> None:
    payload, message, cause = BROKEN[case]
    with pytest.raises(WireError, match=message) as error:
        decode_vllm(payload, SPEC, num_tokens=10, where="sample 'x'")
    assert "sample 'x'" in str(error.value)
    assert cause in str(error.value)


def test_the_good_payload_of_these_tests_is_accepted() -> None:
    assert decode_vllm(GOOD, SPEC, num_tokens=10).num_recorded == 9


def test_a_start_that_the_engine_ignored_is_recognised() -> None:
    with pytest.raises(WireError, match="ignored routed_experts_prompt_start"):
        decode_vllm(GOOD, SPEC, num_tokens=10, start=4)


def test_routes_do_not_alias_the_engine_memory() -> None:
    rows = ROWS.copy()
    routes = routes_from_rows(rows, SPEC, num_tokens=10)
    before = routes.ids.copy()
    rows[:] = 0
    assert np.array_equal(routes.ids, before)


def test_a_single_expert_of_one_is_legal() -> None:
    spec = RoutingSpec(1, (0,), 4, 1)
    rows = np.array([0, 0, 3, 0], np.uint8).reshape(4, 1, 1)
    assert routes_from_rows(rows, spec, num_tokens=5).num_recorded == 4
    with pytest.raises(WireError, match="every expert id is 0"):
        routes_from_rows(np.zeros((64, 1, 1), np.uint8), spec, num_tokens=64)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_our_error(data: bytes) -> None:
    for payload in (data, b"\x93NUMPY" + data, b"\x93NUMPY\x01\x00" + data):
        with contextlib.suppress(WireError):
            parse_npy(payload)
