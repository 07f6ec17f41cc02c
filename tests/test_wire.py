"""The decoders: what is right comes back exactly in every format, what is wrong is refused with its cause."""

from __future__ import annotations

import base64
import contextlib
import io
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from helpers import SPEC
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import RoutingSpec
from r3.errors import ConfigError, R3Warning, WireError
from r3.testing import compact_layers, random_rows
from r3.wire import (
    decode,
    decode_envelope,
    decode_lmdeploy,
    decode_sglang,
    decode_vllm,
    decode_vllm_021,
    encode_envelope,
    encode_lmdeploy,
    encode_sglang,
    encode_vllm,
    encode_vllm_021,
    examine,
    parse_npy,
    routes_from_rows,
)
from r3.wire.checks import Policy
from r3.wire.engines import Context


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
    start = data.draw(st.integers(0, num_tokens - 1).filter(lambda s: not (s == 1 and full)))
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
    with pytest.warns(R3Warning, match="ignored routed_experts_prompt_start"):
        routes = decode_vllm(GOOD, SPEC, num_tokens=10, start=4)
    assert routes.equal(decode_vllm(GOOD, SPEC, num_tokens=10))
    with pytest.raises(WireError, match="ignored routed_experts_prompt_start"):
        decode_vllm(GOOD, SPEC, num_tokens=10, start=4, policy=Policy(start="refuse"))


def test_a_start_of_one_and_a_row_too_many_is_not_guessed_at() -> None:
    with pytest.raises(WireError, match="cannot be told"):  # rows 0..8, or 1..9?
        decode_vllm(GOOD, SPEC, num_tokens=10, start=1)


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


# --- every format ---------------------------------------------------------------------------------------------------------

ENCODERS = {
    "npy": encode_vllm,
    "npy bytes": lambda rows: base64.b64decode(encode_vllm(rows)),
    "int32": encode_sglang,
    "int32 bytes": lambda rows: rows.astype("<i4").tobytes(),
    "int32 flat tensor": lambda rows: torch_like(rows.astype(np.int32).reshape(-1)),
    "lists": encode_lmdeploy,
    "array": lambda rows: rows.astype(np.int32),
    "big-endian array": lambda rows: rows.astype(">i4"),
    "read-only strided array": lambda rows: frozen(rows.repeat(2, axis=2)[..., ::2]),
    "tensor": lambda rows: torch_like(rows),
    "envelope": encode_envelope,
    "base85 envelope": lambda rows: encode_envelope(rows, encoding="base85"),
    "prime-rl envelope": lambda rows: without(
        encode_envelope(rows.astype(np.int32), encoding="base85"), "dtype", "start", "encoding"
    ),
    "sidecar envelope": lambda rows: without(in_bytes(encode_envelope(rows)), "start"),
    "npy envelope": lambda rows: {"data": encode_vllm(rows), "shape": None, "num_layers": 0},
    "meta_info": lambda rows: {"meta_info": {"routed_experts": encode_sglang(rows), "prompt_tokens": 3}},
    "sglext": lambda rows: {"choices": [], "sglext": {"routed_experts": encode_sglang(rows)}},
    "choice": lambda rows: {"index": 0, "routed_experts": encode_vllm(rows)},
    "response": lambda rows: {"choices": [{"routed_experts": encode_vllm(rows)}]},
}


class Tensor:
    """As much of a torch tensor as is touched: on an accelerator, part of a graph."""

    def __init__(self, array: np.ndarray, where: str = "cuda") -> None:
        self.array, self.where = array, where

    def detach(self) -> Tensor:
        return Tensor(self.array, self.where)

    def cpu(self) -> Tensor:
        return Tensor(self.array, "cpu")

    def numpy(self) -> np.ndarray:
        assert self.where == "cpu"
        return self.array


def torch_like(array: np.ndarray) -> Tensor:
    return Tensor(array)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def without(envelope: dict, *names: str) -> dict:
    return {name: value for name, value in envelope.items() if name not in names}


def in_bytes(envelope: dict) -> dict:
    return {**envelope, "data": memoryview(envelope["data"].encode())}


@settings(max_examples=200, deadline=None)
@given(st.data(), specs(), st.sampled_from(sorted(ENCODERS)), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_every_format_gives_back_the_ids(data, spec, name, hidden, full, seed) -> None:
    num_tokens = data.draw(st.integers(1, 12))
    start = data.draw(st.integers(0, num_tokens - 1).filter(lambda s: not (s == 1 and full)))
    rows = random_rows(np.random.default_rng(seed), spec, num_tokens - start - (not full), hidden=hidden)
    if (
        "int32" in name or "meta" in name or "sglext" in name
    ):  # raw bytes: engines that send them send all hidden layers,
        rows = random_rows(
            np.random.default_rng(seed), spec, len(rows), hidden=True
        )  # and so little as to be ambiguous
    if len(rows) == 0:
        return
    payload = ENCODERS[name](rows)
    if "envelope" in name and "start" in payload:
        payload["start"] = start

    done = examine(payload, spec, num_tokens=num_tokens, start=start)

    routes = done.unwrap()
    moe_rows = rows[:, list(spec.moe_layers)] if rows.shape[1] == spec.num_layers else rows
    assert routes.ids.dtype == spec.dtype
    assert routes.recorded.tolist() == [start <= t < start + len(rows) for t in range(num_tokens)]
    assert np.array_equal(routes.ids[:, start : start + len(rows)], moe_rows.transpose(1, 0, 2))
    assert routes.ids.flags.writeable
    assert done.findings == ()
    assert done.num_marked == 0


def test_a_real_torch_tensor() -> None:
    import torch

    for dtype in (torch.int32, torch.uint8, torch.int64):
        tensor = torch.from_numpy(ROWS.copy()).to(dtype)
        assert decode(tensor, SPEC, num_tokens=10).equal(decode(GOOD, SPEC, num_tokens=10))
    assert decode(torch.from_numpy(ROWS.astype(np.int32).reshape(-1)), SPEC, num_tokens=10).num_recorded == 9


def test_wire_does_not_import_torch() -> None:
    code = "import sys, r3.wire, r3.testing; assert not {'torch', 'vllm', 'sglang'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("start", [0, 3])
def test_sglang_by_name(start: int) -> None:
    routes = decode_sglang(encode_sglang(ROWS[start:]), SPEC, num_tokens=10, start=start)
    assert routes.recorded.tolist() == [start <= t < 9 for t in range(10)]
    assert np.array_equal(routes.ids[:, start:9], ROWS[start:, 1:].transpose(1, 0, 2))
    with pytest.warns(R3Warning, match="ignored"):
        assert decode_sglang(encode_sglang(ROWS), SPEC, num_tokens=10, start=5).num_recorded == 9


def test_raw_bytes_are_not_read_with_another_number_of_layers() -> None:
    """3 rows of 4 layers are as many bytes as 4 rows of 3: which they are is not guessed by what would fit."""
    with pytest.raises(WireError, match="rows do not fit"):
        decode_sglang(encode_sglang(ROWS[:4, 1:]), SPEC, num_tokens=5)


def test_sglang_raw_bytes_of_no_whole_row() -> None:
    with pytest.raises(WireError, match="not whole rows of int32"):
        decode_sglang(base64.b64encode(ROWS.astype("<i4").tobytes()[:-4]).decode(), SPEC, num_tokens=10)


def test_lmdeploy_drops_a_row_before_a_stop_token() -> None:
    done = examine(encode_lmdeploy(ROWS[:-1]), SPEC, num_tokens=10, context=Context("lmdeploy"))
    assert done.unwrap().num_recorded == 8
    assert [finding.severity for finding in done.findings] == ["unrecorded"]
    assert decode_lmdeploy(encode_lmdeploy(ROWS[:-1]), SPEC, num_tokens=10).num_recorded == 8
    assert decode_lmdeploy(encode_lmdeploy(ROWS), SPEC, num_tokens=10).num_recorded == 9
    assert decode_lmdeploy(ROWS.astype(np.uint16), SPEC, num_tokens=10).num_recorded == 9
    with pytest.raises(WireError, match="rows do not fit"):
        decode(encode_lmdeploy(ROWS[:-1]), SPEC, num_tokens=10)  # from another engine it is a fault


@pytest.mark.parametrize("key", ["0b2fd4a3-77b3-4c04-8a1f-0f5f5f6f7a11", "0b2fd4a377b34c048a1f0f5f5f6f7a11", "key:1"])
def test_an_object_store_key_is_recognised(key: str) -> None:
    for decoder in (decode, decode_lmdeploy):
        with pytest.raises(WireError, match="object-store key"):
            decoder(key, SPEC, num_tokens=10)


# --- vLLM 0.21 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("lists", [False, True])
def test_vllm_021_splits_prompt_and_response(mtp: bool, lists: bool) -> None:
    rows = random_rows(np.random.default_rng(0), SPEC, 9 + mtp)  # MoE layers alone
    prompt, response = encode_vllm_021(rows, 4) if lists else (rows[:4].astype(np.int16), rows[4:].astype(np.int16))
    routes = decode_vllm_021(prompt, response, SPEC, num_tokens=10)
    assert routes.num_recorded == 9 + mtp
    assert np.array_equal(routes.ids[:, : 9 + mtp], rows.transpose(1, 0, 2))


def test_vllm_021_of_a_later_prompt_of_a_batch() -> None:
    rows = random_rows(np.random.default_rng(0), SPEC, 9)
    routes = decode_vllm_021(None, rows[4:], SPEC, num_tokens=10, context=Context(prompt_tokens=4))
    assert routes.recorded.tolist() == [False] * 4 + [True] * 5 + [False]
    with pytest.raises(WireError, match="where the response begins is not known"):
        decode_vllm_021(None, rows[4:], SPEC, num_tokens=10)
    with pytest.raises(WireError, match="the prompt's rows do not fit its tokens"):
        decode_vllm_021(rows[:3], rows[4:], SPEC, num_tokens=9, context=Context(prompt_tokens=4))
    with pytest.raises(WireError, match="neither prompt nor response"):
        decode_vllm_021(None, None, SPEC, num_tokens=10)


def test_vllm_021_over_http() -> None:
    prompt, response = encode_vllm_021(random_rows(np.random.default_rng(0), SPEC, 9), 4)
    body = {"prompt_routed_experts": prompt, "choices": [{"routed_experts": response}]}
    assert decode(body, SPEC, num_tokens=10).num_recorded == 9


def test_vllm_021_compacts_the_layers_of_dense_first_models() -> None:
    compacted = compact_layers(ROWS, SPEC)
    with pytest.warns(R3Warning, match="moved to the front"):
        routes = decode_vllm_021(compacted[:4], compacted[4:], SPEC, num_tokens=10)
    assert routes.equal(decode(GOOD, SPEC, num_tokens=10))
    with pytest.warns(R3Warning, match="moved to the front"):
        decode(encode_vllm(compacted), SPEC, num_tokens=10, context=Context("vllm", "0.21.0"))
    with pytest.raises(WireError, match="moved to the front"):
        decode_vllm_021(compacted[:4], compacted[4:], SPEC, num_tokens=10, policy=Policy(compacted="refuse"))
    with pytest.raises(WireError, match="either vLLM"):  # nobody said that it is: never shifted on suspicion
        decode(encode_vllm(compacted), SPEC, num_tokens=10)
    dense_last = RoutingSpec(4, (0, 1, 3), 8, 2)  # the same bytes against a spec that they do not fit so clearly
    with pytest.raises(WireError, match="should be dense"):
        decode_vllm_021(ROWS[:4], ROWS[4:], dense_last, num_tokens=10)


def test_layers_routed_by_hash_may_have_ids() -> None:
    spec = RoutingSpec(4, (2, 3), 8, 2, hash_layers=(1,))
    routes = decode(GOOD, spec, num_tokens=10)
    assert np.array_equal(routes.ids[:, :9], ROWS[:, 2:].transpose(1, 0, 2))


# --- envelopes ------------------------------------------------------------------------------------------------------------

ENVELOPE = encode_envelope(ROWS)
BAD_ENVELOPES = {
    "no data": (without(ENVELOPE, "data"), "no routes"),
    "no shape": (without(ENVELOPE, "shape"), "shape is no shape"),
    "negative shape": ({**ENVELOPE, "shape": [-9, -4, 2]}, "shape is no shape"),
    "boolean shape": ({**ENVELOPE, "shape": [9, 4, True]}, "shape is no shape"),
    "4 GiB shape": ({**ENVELOPE, "shape": [1 << 20, 1 << 11, 2]}, "not what its shape announces"),
    "float dtype": ({**ENVELOPE, "dtype": "float32"}, "dtype that no engine sends"),
    "wider dtype": ({**ENVELOPE, "dtype": "int32"}, "not what its shape announces"),
    "negative start": ({**ENVELOPE, "start": -1}, "start is no position"),
    "start beyond": ({**ENVELOPE, "start": 40}, "rows do not fit"),
    "no base64": ({**ENVELOPE, "data": "!" * len(ENVELOPE["data"])}, "not valid base64"),
    "no base85": ({**ENVELOPE, "data": "é" * 90, "encoding": "base85"}, "not valid base85"),
    "not an envelope": (GOOD, "not an envelope"),
}


@pytest.mark.parametrize("case", BAD_ENVELOPES)
def test_a_broken_envelope_is_refused(case: str) -> None:
    payload, message = BAD_ENVELOPES[case]
    with pytest.raises(WireError, match=message):
        decode_envelope(payload, SPEC, num_tokens=10)


def test_an_envelope_s_own_start_is_believed() -> None:
    envelope = encode_envelope(ROWS[5:], start=5)
    assert decode_envelope(envelope, SPEC, num_tokens=10).recorded.tolist() == [False] * 5 + [True] * 4 + [False]
    assert decode_envelope(encode_envelope(ROWS), SPEC, num_tokens=10, start=5).num_recorded == 9
    assert decode_envelope({**ENVELOPE, "dtype": "torch.uint8"}, SPEC, num_tokens=10).num_recorded == 9
    assert decode_envelope({**ENVELOPE, "data": ROWS.tobytes()}, SPEC, num_tokens=10).num_recorded == 9


@pytest.mark.parametrize(
    ("dtype", "num_experts"), [("i1", 256), ("i1", 300), ("<i2", 256), ("<i2", 65536), ("<i4", 256)]
)
def test_a_negative_id_never_turns_into_an_expert(dtype: str, num_experts: int) -> None:
    spec = RoutingSpec(1, (0,), num_experts, 2)
    rows = np.array([[[1, 2]], [[3, -1]]], dtype)
    with pytest.raises(WireError, match="out of range"):
        decode(rows, spec, num_tokens=3)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([[[1, 2], [3]]], "not rectangular"),
        ([[[1.5, 2.0]]], "not integers"),
        ([[[True, False]]], "not integers"),
        ([[["a", "b"]]], "not integers"),
        ([[[None, 1]]], "not integers"),
        ([[[1 << 70, 1]]], "not integers"),
        ([[1, 2]], "3 dimensions"),
        (np.zeros((9, 4, 2), np.float32), "not integers"),
        (np.zeros((9, 4, 2), object), "not integers"),
        (object(), "3 dimensions"),
    ],
)
def test_lists_and_arrays_that_are_no_ids(payload, message: str) -> None:
    with pytest.raises(WireError, match=message):
        decode(payload, SPEC, num_tokens=10)


def test_a_start_outside_of_the_sequence_is_the_caller_s_mistake() -> None:
    for start in (-1, 11):
        with pytest.raises(ConfigError, match="start lies outside"):
            decode(GOOD, SPEC, num_tokens=10, start=start)
    with pytest.raises(ConfigError, match="no such format"):
        decode(GOOD, SPEC, num_tokens=10, format="msgpack")


HUGE = {
    "npy": header("{'descr': '|u1', 'fortran_order': False, 'shape': (1024, 1024, 4096), }\n"),
    "npy of zero bytes": header("{'descr': '|u1', 'fortran_order': False, 'shape': (0, 1073741824, 4), }\n"),
    "envelope": {"data": "AAAA", "shape": [1024, 1024, 4096], "dtype": "uint8"},
    "envelope of zero bytes": {"data": "", "shape": [0, 1 << 39, 1 << 39], "dtype": "int32"},
}


@pytest.mark.parametrize("case", HUGE)
def test_a_size_on_paper_allocates_nothing(case: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(HUGE[case], SPEC, num_tokens=10)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_size_on_paper_is_refused_where_it_could_not_be_allocated() -> None:
    """The same in a process that may not have more than 1 GiB of address space over what it starts with."""
    code = f"""
import resource
from r3 import RoutingSpec, wire
from r3.errors import WireError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
for payload in {list(HUGE.values())!r}:
    try:
        wire.decode(payload, RoutingSpec(4, (1, 2, 3), 8, 2), num_tokens=10)
    except WireError:
        pass
"""
    subprocess.run([sys.executable, "-c", code], check=True)
