"""Ray Data over stores: rows are the shards', in a plan of keys, split for ranks, and replayable."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SPEC, random_sample

from r3 import RolloutSample, ShardStore
from r3.errors import ConfigError, SampleError, ShardError, StoreError
from r3.partial import PartialSample
from r3.trainers.data import LazySample, Snapshot, Versions

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """8 groups of 4, the odd ones of version 4, the others of 3."""
    store = ShardStore(tmp_path_factory.mktemp("ray"))
    rng = np.random.default_rng(0)
    for group in range(8):
        for number in range(4):
            sample = random_sample(
                rng,
                num_tokens=8 + group + number,
                sample_id=f"p{group}.{number}",
                group_id=f"p{group}",
                weight_version=3 + group % 2,
            )
            store.add(sample, fsync=False)
    return store


def require_same(row: dict[str, Any], whole: RolloutSample) -> None:
    assert (row["sample_id"], row["group_id"]) == (whole.sample_id, whole.group_id)
    assert (row["num_tokens"], row["prompt_length"]) == (whole.num_tokens, whole.prompt_length)
    assert (row["weight_version_low"], row["weight_version_high"]) == (int(whole.weight_version.max()),) * 2
    for name in ("tokens", "loss_mask", "weight_version", "rollout_logprobs"):
        assert np.array_equal(row[name], getattr(whole, name), equal_nan=name == "rollout_logprobs")


def test_rows(ray: Any, store: ShardStore) -> None:  # noqa: ARG001
    from r3.trainers.data.ray_source import read_store, sample_of_row

    rows = read_store(store, override_num_blocks=3).take_all()
    assert [row["sample_id"] for row in rows] == store.sample_ids()
    for row in rows:
        require_same(row, store.open(row["sample_id"]))
        assert "routes" not in row
    sample = sample_of_row(rows[5])
    assert isinstance(sample, LazySample)
    assert sample.routes.equal(store.open(sample.sample_id).routes)
    for name in ("tokens", "rollout_logprobs"):
        with pytest.raises(ShardError, match=f"replaced since this row was read.*\n.*expected the {name}"):
            sample_of_row({**rows[5], name: rows[5][name][::-1]})
    assert isinstance(sample_of_row({"key": rows[5]["key"]}), LazySample)
    row = read_store(store, versions=Versions(oldest=4), group_size=4).take(1)[0]
    assert row["weight_version_low"] == 4


@pytest.mark.parametrize("layers", [True, (1, 3)])
def test_routes_on_request_are_replayable_and_our_own(ray: Any, store: ShardStore, layers: Any) -> None:  # noqa: ARG001
    from r3.trainers.data.ray_source import read_store, sample_of_row

    dataset = read_store(store, routes=layers, override_num_blocks=2)
    rows = list(dataset.iter_rows())
    assert len(rows) == len(store)
    for row in rows:
        sample = sample_of_row(row)
        expected = store.open(sample.sample_id)
        assert type(sample) is PartialSample
        assert sample.layers == (SPEC.moe_layers if layers is True else layers)
        assert sample.routes.equal(PartialSample.of(expected, sample.layers).routes)
        for array in (sample.tokens, sample.loss_mask, sample.routes.ids, sample.routes.recorded):
            assert array.flags.writeable  # not a view of the object store
        assert np.array_equal(sample.tokens, expected.tokens)
    with pytest.raises(SampleError, match="not a row of read_store"):
        sample_of_row({**rows[0], "routes_shape": [1, 2, 3]})


def test_a_split_for_two_ranks(ray: Any, store: ShardStore) -> None:  # noqa: ARG001
    from r3.trainers.data.ray_source import read_store

    first, second = read_store(store, override_num_blocks=4).streaming_split(2, equal=True)

    def consume(shard: Any) -> list[str]:
        return [row["sample_id"] for row in shard.iter_rows()]

    with ThreadPoolExecutor(2) as ranks:
        got = list(ranks.map(consume, (first, second)))
    assert len(got[0]) == len(got[1]) == 16
    assert sorted(got[0] + got[1]) == store.sample_ids()


def test_the_plan_holds_keys_and_sizes(ray: Any, tmp_path: Path) -> None:  # noqa: ARG001
    """Sizes told before reading are those of the blocks, within a tenth; a task that reads megabytes is of some KB."""
    from r3.trainers.data.ray_source import ShardDatasource

    store = ShardStore(tmp_path)
    rng = np.random.default_rng(0)
    for i in range(12):
        store.add(random_sample(rng, num_tokens=20_000 + 500 * i, sample_id=f"s{i}"), fsync=False)
    for routes in (False, True, (2,)):
        source = ShardDatasource(Snapshot.take(store), routes)
        tasks = source.get_read_tasks(3)
        told = [task.metadata.size_bytes for task in tasks]
        assert [task.metadata.num_rows for task in tasks] == [4, 4, 4]
        assert abs(sum(told) - source.estimate_inmemory_data_size()) < 10
        assert all(len(pickle.dumps(task.read_fn)) < 4000 for task in tasks)
        read = [sum(table.nbytes for table in task()) for task in tasks]
        assert all(abs(a - b) < 0.1 * b for a, b in zip(told, read, strict=True))
        assert all(task.schema == next(iter(task())).schema for task in tasks)
    assert len(ShardDatasource(Snapshot.take(store)).get_read_tasks(50)) == 12
    assert ShardDatasource(Snapshot.take(store)).get_read_tasks(50)[0].metadata.input_files == (
        str(store.path_of("s0")),
    )


def test_a_shard_that_is_damaged(ray: Any, store: ShardStore, tmp_path: Path) -> None:  # noqa: ARG001
    from r3.trainers.data.ray_source import read_store

    own = ShardStore(tmp_path)
    for name in store.sample_ids()[:8]:
        own.add(store.open(name), fsync=False)
    path = own.path_of("p0.2")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(Exception, match=r"p0\.2"):
        read_store(own, override_num_blocks=2).take_all()
    rows = read_store(own, bad="skip", override_num_blocks=2).take_all()
    assert [row["sample_id"] for row in rows] == [name for name in own.sample_ids() if name != "p0.2"]
    with pytest.raises(StoreError, match="no sample that can be used"):
        read_store(own, versions=Versions(newest=0))
    with pytest.raises(ConfigError, match="where the snapshot is taken"):
        read_store(Snapshot.take(own), steps=[1])


def test_one_row_more_than_a_block_holds(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    from r3.trainers.data import ray_source

    monkeypatch.setattr(ray_source, "BLOCK_BYTES", 3000)
    store = ShardStore(tmp_path)
    for i in range(8):
        store.add(random_sample(np.random.default_rng(i), num_tokens=100, sample_id=f"s{i}"), fsync=False)
    [task] = ray_source.ShardDatasource(Snapshot.take(store), True).get_read_tasks(1)
    assert [table.num_rows for table in task()] == [2, 2, 2, 2]
