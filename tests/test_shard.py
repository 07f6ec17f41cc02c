"""Shards: what is written comes back, what is damaged is named, and a slice reads what it needs and no more."""

from __future__ import annotations

import dataclasses
import http.server
import json
import os
import tempfile
import threading
import tracemalloc
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from golden import make as golden
from helpers import SPEC, random_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import RolloutSample, Routes, RoutingSpec, shard
from r3.errors import ConfigError, SampleError, ShardError, StoreError
from r3.shard import container, format1

RNG = np.random.default_rng(1)


def same(a: RolloutSample, b: RolloutSample) -> bool:
    return (
        (a.sample_id, a.group_id, a.spec, a.prompt_length, a.provenance)
        == (b.sample_id, b.group_id, b.spec, b.prompt_length, b.provenance)
        and a.routes.equal(b.routes)
        and all(
            np.array_equal(getattr(a, name), getattr(b, name), equal_nan=name == "rollout_logprobs")
            and getattr(a, name).dtype == getattr(b, name).dtype
            for name in ("tokens", "rollout_logprobs", "loss_mask", "weight_version")
        )
    )


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([8, 256, 257, 512]),
    st.sampled_from([100, 2**31 + 5]),
    st.text(max_size=20),
)
def test_a_sample_comes_back_from_its_bytes(prompt, response, experts, vocabulary, extra) -> None:
    spec = dataclasses.replace(SPEC, num_experts=experts)
    sample = random_sample(RNG, spec, prompt + response, prompt_length=prompt, vocabulary=vocabulary)
    sample = dataclasses.replace(sample, provenance=dataclasses.replace(sample.provenance, extra={"note": extra}))
    assert same(shard.load(shard.save(sample)), sample)


def test_a_plain_safetensors_reader_can_read_it(tmp_path) -> None:
    sample = random_sample(RNG)
    shard.save_file(sample, tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["rollout_logprobs", "routed_experts", "spans", "tokens"]
        assert file.metadata()["format"] == "r3"
        assert json.loads(file.metadata()["spec"])["moe_layers"] == [1, 2, 3]
        layer = file.get_slice("routed_experts")[1:2]  # a pipeline stage reads its own layers
        assert layer.numpy().tolist() == sample.routes.ids[1:2].tolist()
        tokens = file.get_tensor("tokens").numpy().astype(np.int64)
        assert sum(plane << (8 * b) for b, plane in enumerate(tokens)).tolist() == sample.tokens.tolist()
        # length, recorded, loss_mask, has_logprob, weight_version
        assert file.get_tensor("spans").tolist() == [[4, 1, 0, 0, -1], [7, 1, 1, 1, 3], [1, 0, 1, 1, 3]]
        assert file.get_tensor("rollout_logprobs").tolist() == sample.rollout_logprobs[4:].tolist()


@pytest.mark.parametrize("name", golden.SAMPLES)
def test_golden_files_stay_readable_and_are_still_what_is_written(name) -> None:
    """If the first fails, shards on users' disks have become unreadable; if the second, other readers meet new bytes."""
    sample = golden.SAMPLES[name]
    assert same(shard.load_file(golden.path_of(name)), sample)
    assert shard.save(sample) == golden.path_of(name).read_bytes()


def test_golden_bytes_by_hand() -> None:
    """As docs/shard-format.md walks through it: no code of ours reads here."""
    data = golden.path_of("uint8").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    begin, end = header["routed_experts"]["data_offsets"]
    assert header["routed_experts"]["shape"] == [2, 4, 2]
    assert list(data[start:][begin:end]) == [0, 7, 7, 1, 2, 3, 0, 0, 5, 4, 6, 5, 1, 0, 0, 0]
    begin, end = header["tokens"]["data_offsets"]
    assert list(data[start:][begin:end]) == [11, 0x7F, 13, 0, 0, 0x51, 0, 0, 0, 2, 0, 1]  # 151935 is 0x02517F
    zeroed = data[:52] + b"0" * 16 + data[68:start]
    assert data[52:68].decode() == xxhash.xxh3_64_hexdigest(zeroed)
    layers = header["__metadata__"]["checksum.routed_experts"]
    assert layers == "xxh3_64:" + ",".join(
        xxhash.xxh3_64_hexdigest(bytes(ids)) for ids in ([0, 7, 7, 1, 2, 3, 0, 0], [5, 4, 6, 5, 1, 0, 0, 0])
    )
    wide = np.array([11, 151935, 13, 65536], "<i8").tobytes()
    assert header["__metadata__"]["token_digest"] == "xxh3_128:" + xxhash.xxh3_128_hexdigest(wide)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_each_flipped_byte_of_a_file_is_found(mask) -> None:
    """Also in the metadata, where another temperature or prompt length would go unseen."""
    data = golden.path_of("versions").read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= mask
        with pytest.raises(ShardError):
            assert shard.load(bytes(damaged)) is None, f"byte {position} changed unseen"


def test_a_damaged_tensor_is_named() -> None:
    data = bytearray(shard.save(random_sample(RNG)))
    ids = container.parse(bytes(data)).entries["routed_experts"]
    data[ids.begin + ids.shape[1] * ids.shape[2]] ^= 1  # the first id of the second layer
    with pytest.raises(ShardError, match=r"routed_experts\[1\]: damaged: a tensor does not match its checksum"):
        shard.load(bytes(data), where="a.safetensors")


def test_every_truncation_is_refused(tmp_path) -> None:
    data = shard.save(random_sample(RNG))
    for size in range(0, len(data), 37):
        path = tmp_path / "cut.safetensors"
        path.write_bytes(data[:size])
        with pytest.raises(ShardError, match="not a readable shard"):
            shard.load_file(path)
        with pytest.raises(ShardError):
            shard.load(data[:size])


def test_strangers_are_refused_by_name(tmp_path) -> None:
    other = safetensors.numpy.save({"w": np.zeros(2)})
    with pytest.raises(ShardError, match="not a shard of routed experts"):
        shard.load(other)
    data = shard.save(random_sample(RNG)).replace(b'"version":"1"', b'"version":"2"')
    with pytest.raises(ShardError, match=r"another format version\n  expected version 1, got version 2"):
        shard.load(data)
    with pytest.raises(ShardError, match="no such shard"):
        shard.load_file(tmp_path / "absent.safetensors")


def test_tokens_and_rows_are_cut_together() -> None:
    sample = random_sample(RNG, num_tokens=12)
    cut = sample.truncate(7)
    assert (cut.num_tokens, cut.routes.num_tokens, cut.routes.num_recorded, len(cut.loss_mask)) == (7, 7, 7, 7)
    assert np.array_equal(cut.routes.ids, sample.routes.ids[:, :7])
    assert cut.token_digest != sample.token_digest
    assert same(shard.load(shard.save(cut)), cut)


def test_parts_that_do_not_fit_are_refused() -> None:
    sample = random_sample(RNG)
    with pytest.raises(SampleError, match=r"sample 's0'.*routes do not fit the tokens\n  expected 12, got 11"):
        dataclasses.replace(sample, routes=sample.routes.tokens(0, 11))
    with pytest.raises(SampleError, match="loss_mask does not fit"):
        dataclasses.replace(sample, loss_mask=sample.loss_mask[:-1])
    routes = dataclasses.replace(sample.routes, ids=sample.routes.ids + np.uint8(7))
    with pytest.raises(SampleError, match="expert ids are out of range"):
        dataclasses.replace(sample, routes=routes)
    with pytest.raises(SampleError, match=r"token 3: a token id is negative"):
        dataclasses.replace(sample, tokens=np.where(np.arange(12) == 3, -1, sample.tokens))
    routes = dataclasses.replace(
        sample.routes, ids=np.where(np.arange(12)[:, None] == 3, np.uint8(8), sample.routes.ids)
    )
    with pytest.raises(SampleError, match=r"token 3, layer 1: 6 expert ids are out of range\n  expected 0\.\.7, got 8"):
        dataclasses.replace(sample, routes=routes)
    # the same value in a row without a record is nobody's business
    ids = sample.routes.ids.copy()
    ids[:, -1] = 99
    dataclasses.replace(sample, routes=dataclasses.replace(sample.routes, ids=ids))


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch) -> None:
    def no_space(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StoreError, match="No space left on device"):
        shard.save_file(random_sample(RNG), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_what_version_1_may_add_is_ignored_but_not_unprotected(monkeypatch) -> None:
    """A later writer of version 1 adds a tensor and a metadata key: today's reader reads all it knows."""
    sample = random_sample(RNG)
    tensors, metadata = format1.encode(sample)
    weights = np.arange(5, dtype=np.float32)
    later = [{**tensors, "gate_weights": weights}, metadata | {"later": "key"}, format1.LAYERED]
    data = bytearray(b"".join(container.pack(*later)))
    assert same(shard.load(bytes(data)), sample)
    data[-1] ^= 1
    with pytest.raises(ShardError, match="gate_weights: damaged"):
        shard.load(bytes(data))
    monkeypatch.setattr(
        container,
        "checksum",
        lambda data, parts=1, real=container.checksum: real(data, parts) if data.nbytes != 20 else "",
    )
    with pytest.raises(ShardError, match=r"gate_weights: damaged.*\n.*expected a checksum in the metadata"):
        shard.load(b"".join(container.pack(*later)))


@pytest.mark.parametrize(
    ("prompt", "response", "limit"),
    [(512, 3584, 7.68), (3584, 512, 7.68), (1, 4095, 7.68), (4096, 0, 7.68)],
)
def test_bytes_per_token_at_4k_tokens_are_within_two_percent_of_the_routes(prompt, response, limit) -> None:
    """48 layers, top-8 of 128: 384 bytes of routes. A vocabulary of 151,936; everything included."""
    spec = RoutingSpec(48, tuple(range(48)), 128, 8, "qwen3_moe")
    routes = Routes(np.zeros((48, 4096, 8), np.uint8), np.arange(4096) < 4095)
    sample = random_sample(RNG, spec, 4096, prompt_length=prompt, vocabulary=151936, routes=routes)
    assert response == 4096 - prompt
    assert spec.bytes_per_token == 384
    assert len(shard.save(sample)) / 4096 - 384 < limit


SLICE_SPEC = RoutingSpec(8, tuple(range(1, 8)), 300, 4)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_slice_is_the_slice_of_the_whole(data) -> None:
    spec = data.draw(st.sampled_from([SPEC, SLICE_SPEC]))
    num_tokens = data.draw(st.integers(0, 12))
    sample = random_sample(RNG, spec, num_tokens, prompt_length=min(4, num_tokens))
    layers = data.draw(
        st.one_of(
            st.slices(spec.num_moe_layers),
            st.lists(st.integers(-spec.num_moe_layers, spec.num_moe_layers - 1), max_size=5),
        )
    )
    tokens = data.draw(st.builds(slice, *[st.none() | st.integers(-15, 15)] * 2))
    verify = data.draw(st.sampled_from([None, True, False]))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.safetensors")
        shard.save_file(sample, path, fsync=False)
        with shard.open_file(path) as file:
            part = file.routes(layers, tokens, verify=verify)
            assert file.tokens().tolist() == sample.tokens.tolist()
            assert file.weight_version.tolist() == sample.weight_version.tolist()
            assert file.loss_mask.tolist() == sample.loss_mask.tolist()
    whole = sample.routes.layers(layers)
    assert part.equal(Routes(whole.ids[:, tokens], whole.recorded[tokens]))
    assert part.ids.dtype == spec.dtype
    assert part.ids.flags.writeable


def test_a_slice_verifies_the_layers_that_it_reads(tmp_path) -> None:
    sample = random_sample(RNG)
    data = bytearray(shard.save(sample))
    ids = container.parse(bytes(data)).entries["routed_experts"]
    data[ids.begin + ids.shape[1] * ids.shape[2]] ^= 1  # in layer 1, token 0
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with shard.open_file(path) as file:
        assert file.routes([0, 2]).equal(sample.routes.layers([0, 2]))
        with pytest.raises(ShardError, match=r"routed_experts\[1\]: damaged"):
            file.routes(slice(1, 3))
        assert not file.routes([1], verify=False).equal(sample.routes.layers([1]))
        file.routes([1], slice(0, 5))  # part of a layer cannot be verified, and is not by default
        with pytest.raises(ShardError, match=r"routed_experts\[1\]: damaged"):
            file.routes([1], slice(4, 5), verify=True)
        with pytest.raises(IndexError):
            file.routes([3])
        with pytest.raises(ValueError, match="step 1"):
            file.routes(tokens=slice(0, 4, 2))


class CountingFiles(MemoryFileSystem):
    """fsspec's in-memory file system as an object store: whole objects and byte ranges, counted."""

    protocol = "counting"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    read: ClassVar[list[int]] = []

    def cat_file(self, path, start=None, end=None, **_):
        data = super().cat_file(path, start=start, end=end)
        self.read.append(len(data))
        return data


@pytest.fixture
def counting_url():
    fsspec.register_implementation("counting", CountingFiles, clobber=True)
    CountingFiles.store.clear()
    CountingFiles.read.clear()
    return "counting://bucket/a.safetensors"


def put(url: str, data: bytes) -> None:
    with fsspec.open(url, "wb") as file:
        file.write(data)


def test_a_pipeline_stage_reads_its_layers_from_an_object_store_and_little_more(counting_url) -> None:
    spec = RoutingSpec(48, tuple(range(48)), 128, 8)
    sample = random_sample(RNG, spec, 1024)
    put(counting_url, shard.save(sample))
    with shard.open_file(counting_url) as file:
        assert len(CountingFiles.read) == 1
        stage = file.routes(slice(12, 24))
    assert stage.equal(sample.routes.layers(slice(12, 24)))
    assert len(CountingFiles.read) == 2
    assert sum(CountingFiles.read) <= 1.05 * stage.ids.nbytes
    CountingFiles.read.clear()
    with shard.open_file(counting_url) as file:
        part = file.routes([3, 40], slice(100, 612))
    assert part.equal(sample.routes.layers([3, 40]).tokens(100, 612))
    assert sum(CountingFiles.read) == container.HEAD + part.ids.nbytes
    assert same(shard.load_file(counting_url), sample)


def test_a_head_larger_than_the_first_read(counting_url, tmp_path) -> None:
    """Much metadata, and a loss mask that changes at every token: the spans lie behind the first 4 KB."""
    sample = random_sample(RNG, num_tokens=2000)
    provenance = dataclasses.replace(sample.provenance, extra={"request": "x" * 6000})
    sample = dataclasses.replace(sample, loss_mask=np.arange(2000) % 2 == 1, provenance=provenance)
    shard.save_file(sample, tmp_path / "a.safetensors")
    put(counting_url, shard.save(sample))
    for path in (counting_url, tmp_path / "a.safetensors"):
        assert same(shard.load_file(path), sample)
        with shard.open_file(path) as file:
            assert file.loss_mask.tolist() == sample.loss_mask.tolist()
            assert file.routes([1]).equal(sample.routes.layers([1]))


def test_remote_failures_have_names(counting_url) -> None:
    with pytest.raises(ShardError, match=r"counting://bucket/a\.safetensors: no such shard"):
        shard.open_file(counting_url)
    put(counting_url, shard.save(random_sample(RNG))[:-1])
    with pytest.raises(ShardError, match="not a readable shard"):
        shard.open_file(counting_url)
    with pytest.raises(ConfigError, match="no file system for this URL"):
        shard.open_file("nosuchprotocol://a/b")


class _Ranges(http.server.BaseHTTPRequestHandler):
    data = b""
    honours = True
    sent: ClassVar[list[int]] = []

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.data)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()

    def do_GET(self) -> None:
        asked = self.headers.get("Range") if self.honours else None
        body = self.data
        if asked:
            first, last = asked.removeprefix("bytes=").split("-")
            body = self.data[int(first) : int(last) + 1]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(self.data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.sent.append(len(body))
        self.wfile.write(body)


def test_slices_over_http() -> None:
    sample = random_sample(RNG, RoutingSpec(48, tuple(range(48)), 128, 8), 512)
    handler = type("Handler", (_Ranges,), {"data": shard.save(sample), "sent": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/a.safetensors"
    try:
        with shard.open_file(url) as file:
            stage = file.routes(slice(0, 24))
        assert stage.equal(sample.routes.layers(slice(0, 24)))
        assert sum(handler.sent) <= 1.05 * stage.ids.nbytes
        handler.honours = False
        with pytest.raises(StoreError, match="sends the whole file where a range is asked for"):
            shard.open_file(url)
        assert same(shard.load_file(url), sample)
    finally:
        server.shutdown()
        server.server_close()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_container_accepts_nothing_that_safetensors_refuses(data) -> None:
    """Headers of a valid file with one value replaced, and files cut or lengthened."""
    whole = b"".join(container.pack({"a": np.zeros((2, 3), np.uint8), "b": np.zeros(2, np.uint16)}, {"k": "v"}))
    start = container.header_size(whole)
    header = json.loads(whole[8:start])
    number = st.integers(-3, 12) | st.sampled_from([2**63, 2**64, 1.0, True, None, "x"])
    what = data.draw(st.sampled_from(["shape", "data_offsets", "dtype", "metadata", "bytes"]))
    body = whole[start:]
    if what in ("shape", "data_offsets"):
        header[data.draw(st.sampled_from("ab"))][what] = data.draw(st.lists(number, max_size=3))
    elif what == "dtype":
        header["b"]["dtype"] = data.draw(st.sampled_from(["U8", "U16", "F32", "I8", "F4", "", None, 3]))
    elif what == "metadata":
        header["__metadata__"] = data.draw(st.sampled_from([{}, None, [], {"a": 1}, {"a": None}, "x", {"ü": "ü"}]))
    else:
        body = data.draw(st.binary(max_size=14))
    raw = json.dumps(header).encode()
    raw = len(raw).to_bytes(8, "little") + raw
    try:
        parsed = container.parse(raw)
        accepted = parsed.end == len(raw) + len(body)
    except ValueError:
        accepted = False
    if accepted:
        theirs = safetensors.numpy.load(raw + body)
        assert {name: array.shape for name, array in theirs.items()} == {n: e.shape for n, e in parsed.entries.items()}


def test_a_header_that_claims_much_allocates_nothing(tmp_path) -> None:
    claim = json.dumps({"a": {"dtype": "U8", "shape": [2**32], "data_offsets": [0, 2**32]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(claim).to_bytes(8, "little") + claim)
    huge = (2**40).to_bytes(8, "little") + b"{}"
    deep = b"[" * 100_000
    for data in (path.read_bytes(), huge, len(deep).to_bytes(8, "little") + deep):
        tracemalloc.start()
        with pytest.raises(ShardError, match="not a readable shard"):
            shard.load(data)
        path.write_bytes(data)
        with pytest.raises(ShardError, match="not a readable shard"):
            shard.open_file(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
        tracemalloc.stop()


def test_tensors_that_overlap_or_leave_a_gap_are_refused() -> None:
    for a, b, size in (([0, 6], [2, 6], 6), ([0, 6], [8, 12], 12), ([1, 7], [7, 11], 11), ([4, 10], [0, 4], 10)):
        header = {"a": {"dtype": "U8", "shape": [6], "data_offsets": a}}
        header["b"] = {"dtype": "U16", "shape": [2], "data_offsets": b}
        raw = json.dumps(header).encode()
        raw = len(raw).to_bytes(8, "little") + raw
        if b[1] == a[0]:  # in another order than they are named, which is legal
            assert container.parse(raw).end == len(raw) + size
            continue
        with pytest.raises(ValueError, match="does not begin where the one before it ends"):
            container.parse(raw)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spans", np.array([[12, 2, 0, 0, 0]], np.int32)),
        ("spans", np.array([[11, 1, 0, 0, 0]], np.int32)),
        ("spans", np.array([[13, 1, 0, 0, 0], [-1, 1, 0, 0, 0]], np.int32)),
        ("spans", np.array([[12, 1, 0, 0]], np.int32)),
        ("spans", np.array([[12, 1, 0, 1, 0]], np.int32)),  # 12 log-probs, where 8 are there
        ("spans", np.array([[2**31 - 1, 1, 0, 0, 0]] * 3, np.int32)),  # must not be laid out before it is added up
        ("rollout_logprobs", np.zeros(7, np.float32)),
        ("rollout_logprobs", np.zeros(8, np.float64)),
        ("tokens", np.zeros((0, 12), np.uint8)),
        ("tokens", np.zeros((9, 12), np.uint8)),
        ("tokens", np.full((8, 12), 255, np.uint8)),  # -1
        ("tokens", np.zeros((1, 11), np.uint8)),
        ("routed_experts", np.zeros((3, 12, 3), np.uint8)),
        ("routed_experts", np.zeros((3, 12, 2), np.uint16)),
        ("routed_experts", np.full((3, 12, 2), 8, np.uint8)),
        ("routed_experts", np.zeros(12, np.uint8)),
    ],
)
def test_parts_that_do_not_fit_are_refused_though_their_checksums_are_right(name, value, tmp_path) -> None:
    tensors, metadata = format1.encode(random_sample(RNG))
    layered = format1.LAYERED if value.ndim > 1 else ()
    data = b"".join(container.pack({**tensors, name: value}, metadata, layered))
    for verify in (True, False):
        with pytest.raises(ShardError):
            shard.load(data, verify=verify)
    if name == "spans" and value[0, 3] == 0:
        (tmp_path / "a.safetensors").write_bytes(data)
        with pytest.raises(ShardError):
            shard.open_file(tmp_path / "a.safetensors")


def test_a_file_that_is_cut_while_it_is_open_is_an_error(counting_url, tmp_path) -> None:
    data = shard.save(random_sample(RNG, num_tokens=4000))
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    put(counting_url, data)
    with shard.open_file(path) as local, shard.open_file(counting_url) as remote:
        os.truncate(path, 5000)
        put(counting_url, data[:5000])
        for file in (local, remote):
            with pytest.raises(ShardError, match="this file is cut off"):
                file.routes()
