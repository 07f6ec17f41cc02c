"""Which samples a job goes through, and who gets which: dealing as a function of names, and snapshots of real stores."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import random_sample
from hypothesis import given
from hypothesis import strategies as st

from r3 import ShardStore
from r3.errors import ConfigError, ShardError, StoreError
from r3.trainers.data import Snapshot, Versions
from r3.trainers.data.dealing import deal
from r3.trainers.data.snapshot import id_of

NAMES = [f"0|p{i}" for i in range(40)]


def fill(store: ShardStore, *ids: str, **overrides: Any) -> ShardStore:
    """Samples named `<group>.<number>`, of their group."""
    rng = np.random.default_rng(len(ids))
    for one in ids:
        group = one.partition(".")[0]
        store.add(random_sample(rng, sample_id=one, **{"group_id": group, **overrides}), fsync=False)
    return store


def ids(snapshot: Snapshot) -> list[str]:
    return [ref.sample_id for ref in snapshot.refs()]


@given(
    count=st.integers(1, 40),
    world_size=st.integers(1, 9),
    uneven=st.sampled_from(["raise", "drop", "pad"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_deal(count: int, world_size: int, uneven: str, shuffle: bool, seed: int) -> None:
    left = list(range(0, 40, 40 // count))[:count]
    over = count % world_size
    how: dict[str, Any] = {"seed": seed, "epoch": 1, "shuffle": shuffle, "world_size": world_size, "uneven": uneven}
    if over and (uneven == "raise" or (uneven == "drop" and count < world_size)):
        with pytest.raises(ConfigError, match=r"evenly|leaves no rank"):
            deal(NAMES, left, **how)
        return
    dealt = deal(NAMES, left, **how)
    everyone = [unit for share in dealt.shares for unit in share]
    assert len({len(share) for share in dealt.shares}) == 1
    assert set(everyone) | set(dealt.dropped) == set(left)
    assert len(dealt.dropped) == (over if uneven == "drop" else 0)
    assert dealt.padded == (world_size - over if over and uneven == "pad" else 0)
    assert len(everyone) == count - len(dealt.dropped) + dealt.padded
    if not shuffle:
        assert list(dealt.shares[0]) == left[::world_size][: len(dealt.shares[0])]


def test_the_order_is_by_seed_epoch_and_name_alone() -> None:
    """Written down: another order after an update of numpy or r3 would give a resumed job some samples twice."""

    def order(names: list[str], seed: int, epoch: int) -> list[str]:
        dealt = deal(names, range(len(names)), seed=seed, epoch=epoch, shuffle=True, world_size=1, uneven="raise")
        return [names[unit] for unit in dealt.shares[0]]

    assert [id_of(name) for name in order(NAMES[:6], 0, 0)] == ["p3", "p0", "p2", "p1", "p4", "p5"]
    assert order(NAMES[::-1], 7, 3) == order(NAMES, 7, 3)
    assert len({tuple(order(NAMES, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_samples_of_stores_and_of_a_run_of_steps(tmp_path: Path) -> None:
    run = ShardStore(tmp_path / "run", create=True)
    for step in (11, 12):
        fill(run.step(step, create=True), f"a{step}.0", f"b{step}.0")
    other = fill(ShardStore(tmp_path / "other", create=True), "c.0")
    assert ids(Snapshot.take([run, other])) == ["a11.0", "b11.0", "a12.0", "b12.0", "c.0"]
    assert ids(Snapshot.take(str(tmp_path / "run"), steps=[12])) == ["a12.0", "b12.0"]
    with pytest.raises(StoreError, match="no such store"):
        Snapshot.take(run, steps=[13])
    with pytest.raises(StoreError, match="no sample that can be used"):
        Snapshot.take(ShardStore(tmp_path / "empty", create=True))
    before = Snapshot.take(run)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert Snapshot.take(tmp_path / "moved").digest == before.digest  # another mount point deals alike


def test_groups(tmp_path: Path) -> None:
    store = fill(ShardStore(tmp_path), "a.0", "b.0", "a.1", "b.1", "c.0")
    with pytest.raises(StoreError, match="1 of 3 groups do not have 2 samples") as error:
        Snapshot.take(store, group_size=2)
    assert error.value.where == "group '0|c'"
    snapshot = Snapshot.take(store, group_size=2, incomplete="drop")
    assert [[ref.sample_id for ref in unit.refs] for unit in snapshot.units] == [["a.0", "a.1"], ["b.0", "b.1"]]
    assert snapshot.report.incomplete == {"0|c": 1}
    assert str(snapshot.report) == "4 samples, 1 left out: incomplete group"
    fill(store, "d.0", group_id="")
    with pytest.raises(StoreError, match="belongs to no group") as error:
        Snapshot.take(store, group_size=2, incomplete="drop")
    assert "d.0" in str(error.value.where)


def test_groups_of_one_name_in_two_steps_are_two(tmp_path: Path) -> None:
    run = ShardStore(tmp_path)
    for step in (1, 2):
        fill(run.step(step, create=True), "a.0", "a.1")
    assert [unit.name for unit in Snapshot.take(run, group_size=2).units] == ["0/step-000001|a", "0/step-000002|a"]


def test_weight_versions(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    for version in (-1, 3, 4, 5, 6):
        fill(store, f"v{version}.0", weight_version=version)
    snapshot = Snapshot.take(store, versions=Versions.within(5, staleness=1))
    assert ids(snapshot) == ["v4.0", "v5.0"]
    assert snapshot.report.left_out == {"too old": 1, "too new": 1, "unknown version": 1}
    assert ids(Snapshot.take(store, versions=Versions(oldest=5))) == ["v5.0", "v6.0"]
    assert len(ids(Snapshot.take(store))) == 5
    with pytest.raises(StoreError, match="no sample that can be used") as error:
        Snapshot.take(store, versions=Versions(newest=2))
    assert error.value.got == "0 samples, 4 left out: too new, 1 left out: unknown version"


def test_a_sample_of_two_versions_counts_by_its_oldest_and_newest_token() -> None:
    assert Versions.within(7, 1).verdict(6, 7) == ""
    assert Versions.within(7, 1).verdict(5, 7) == "too old"
    assert Versions.within(7, 1).verdict(7, 8) == "too new"


def test_a_shard_that_cannot_be_read(tmp_path: Path) -> None:
    store = fill(ShardStore(tmp_path), "a.0", "b.0", "c.0")
    bad = store.path_of("b.0")
    bad.write_bytes(bad.read_bytes()[:-3])
    assert len(ids(Snapshot.take(store))) == 3  # a listing opens nothing
    with pytest.raises(ShardError, match=r"b\.0"):
        Snapshot.take(store, group_size=1)
    snapshot = Snapshot.take(store, bad="skip")
    assert ids(snapshot) == ["a.0", "c.0"]
    assert list(snapshot.report.bad) == [str(bad)]
    assert "1 unreadable" in str(snapshot.report)


def test_a_packed_snapshot(tmp_path: Path) -> None:
    snapshot = Snapshot.take(fill(ShardStore(tmp_path), "a.0", "a.1", "b|x.0", "b|x.1"), group_size=2)
    again = Snapshot.unpack(snapshot.packed)
    assert (again.units, again.digest, again.unit_size, again.grouped) == (snapshot.units, snapshot.digest, 2, True)
    assert [id_of(unit.name) for unit in again.units] == ["a", "b|x"]


@pytest.mark.parametrize("wrong", [{"incomplete": "skip"}, {"bad": "drop"}, {"group_size": 0}])
def test_unknown_settings(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Snapshot.take(ShardStore(tmp_path), **wrong)
