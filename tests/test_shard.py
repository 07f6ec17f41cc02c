"""Shards and the store: what is written comes back, what is damaged is named, what is half-written is never seen."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from helpers import SPEC, random_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import RolloutSample, RoutingSpec, ShardStore, shard
from r3.errors import SampleError, ShardError, StoreError

RNG = np.random.default_rng(1)
GOLDEN = Path(__file__).parent / "golden" / "v1.safetensors"


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
        assert sorted(file.keys()) == [
            "loss_mask",
            "recorded",
            "rollout_logprobs",
            "routed_experts",
            "tokens",
            "weight_version",
        ]
        assert file.metadata()["format"] == "r3"
        assert json.loads(file.metadata()["spec"])["moe_layers"] == [1, 2, 3]
        assert file.get_tensor("tokens").tolist() == sample.tokens.tolist()
        layer = file.get_slice("routed_experts")[1:2]  # a pipeline stage reads its own layers
        assert layer.numpy().tolist() == sample.routes.ids[1:2].tolist()


def test_the_golden_file_of_version_1_stays_readable() -> None:
    """Written once by the first release; if this fails, shards on users' disks have become unreadable."""
    sample = shard.load_file(GOLDEN)
    assert (sample.sample_id, sample.group_id, sample.prompt_length) == ("golden/0", "golden", 2)
    assert sample.spec == RoutingSpec(3, (1, 2), 300, 2, "qwen3_moe")
    assert sample.tokens.tolist() == [11, 12, 13, 14]
    assert sample.routes.ids[:, :3].tolist() == [[[0, 299], [7, 1], [2, 3]], [[5, 4], [256, 255], [9, 8]]]
    assert sample.routes.recorded.tolist() == [True, True, True, False]
    assert np.isnan(sample.rollout_logprobs[:2]).all()
    assert sample.rollout_logprobs[2:].tolist() == [-0.5, -1.25]
    assert sample.loss_mask.tolist() == [False, False, True, True]
    assert sample.weight_version.tolist() == [-1, -1, 7, 7]
    assert (sample.provenance.engine, sample.provenance.temperature, sample.provenance.extra) == (
        "vllm",
        0.7,
        {"a": "b"},
    )


def test_each_flipped_byte_of_a_tensor_is_found() -> None:
    data = shard.save(random_sample(RNG))
    body = 8 + int.from_bytes(data[:8], "little")
    for position in range(body, len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x01
        with pytest.raises(ShardError, match="damaged: a tensor does not match its checksum"):
            shard.load(bytes(damaged))


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
    # the same value in a row without a record is nobody's business
    ids = sample.routes.ids.copy()
    ids[:, -1] = 99
    dataclasses.replace(sample, routes=dataclasses.replace(sample.routes, ids=ids))


def test_store_lists_opens_and_refuses_doubles(tmp_path) -> None:
    store = ShardStore(tmp_path / "run", create=True)
    names = ["a.0", "b/c d.1", "ü", ".hidden", "..", "100%"]
    for name in names:
        store.add(random_sample(RNG, sample_id=name))
    assert store.sample_ids() == sorted(names)
    assert len(store) == 6
    assert [sample.sample_id for sample in store] == sorted(names)
    assert all(path.parent == store.root for path in map(store.path_of, names))
    assert "a.0" in store
    assert "a.1" not in store
    with pytest.raises(StoreError, match=r"'a\.0' is there already"):
        store.add(random_sample(RNG, sample_id="a.0"))
    with pytest.raises(StoreError, match=r"no sample 'a\.1'"):
        store.open("a.1")
    with pytest.raises(StoreError, match="no such store"):
        ShardStore(tmp_path / "absent")
    with pytest.raises(StoreError, match="not usable as a sample id"):
        store.path_of("x" * 300)


def test_leftovers_of_dead_writers_are_invisible_and_removed(tmp_path) -> None:
    store = ShardStore(tmp_path, create=True)
    store.add(random_sample(RNG))
    process = multiprocessing.get_context("spawn").Process(target=os.getpid)
    process.start()
    process.join()
    host = os.uname().nodename
    dead, alive = (tmp_path / f"{shard.TEMPORARY}{host}.{pid}.abcd" for pid in (process.pid, os.getpid()))
    dead.write_bytes(b"half")
    alive.write_bytes(b"half")
    assert store.sample_ids() == ["s0"]
    assert store.remove_leftovers() == 1
    assert not dead.exists()
    assert alive.exists()


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch) -> None:
    def no_space(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StoreError, match="No space left on device"):
        shard.save_file(random_sample(RNG), tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def _read_all(root: str) -> int:
    return sum(sample.num_tokens for sample in ShardStore(root))


def test_many_processes_read_one_store(tmp_path) -> None:
    store = ShardStore(tmp_path, create=True)
    for i in range(20):
        store.add(random_sample(RNG, sample_id=f"s{i}"))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_read_all, [str(tmp_path)] * 4) == [240] * 4
