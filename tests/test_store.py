"""The store: what can be listed is whole, whoever writes, dies, deletes or reads at the same moment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import random_sample

from r3 import ShardStore, inspection, shard
from r3.errors import ShardError, SpecError, StoreError
from r3.shard import files

RNG = np.random.default_rng(1)
SPAWN = multiprocessing.get_context("spawn")


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
    process = SPAWN.Process(target=os.getpid)
    process.start()
    process.join()
    host = os.uname().nodename
    dead, alive = (tmp_path / f"{shard.TEMPORARY}{host}.{pid}.abcd" for pid in (process.pid, os.getpid()))
    dead.write_bytes(b"half")
    alive.write_bytes(b"half")
    elsewhere = tmp_path / f"{shard.TEMPORARY}{host}.{process.pid}.1.abcd"  # a container under the same host name
    elsewhere.write_bytes(b"half")
    assert store.sample_ids() == ["s0"]
    assert store.remove_leftovers() == 1
    assert not dead.exists()
    assert alive.exists()
    assert elsewhere.exists()


def _read_all(root: str) -> int:
    return sum(sample.num_tokens for sample in ShardStore(root))


def test_many_processes_read_one_store(tmp_path) -> None:
    store = ShardStore(tmp_path, create=True)
    for i in range(20):
        store.add(random_sample(RNG, sample_id=f"s{i}"))
    with SPAWN.Pool(2) as pool:
        assert pool.map(_read_all, [str(tmp_path)] * 4) == [240] * 4


def _write(root: str, writer: int, count: int, started) -> None:
    store, rng = ShardStore(root, create=True).step(3, create=True), np.random.default_rng(writer)
    started.set()
    for i in range(count):
        store.add(random_sample(rng, num_tokens=400, sample_id=f"w{writer}.{i}"), fsync=False)


def test_two_processes_write_one_step_while_it_is_read(tmp_path) -> None:
    events = [SPAWN.Event(), SPAWN.Event()]
    writers = [SPAWN.Process(target=_write, args=(str(tmp_path / "run"), i, 60, events[i])) for i in (0, 1)]
    for writer in writers:
        writer.start()
    for event in events:
        assert event.wait(30)
    step, seen = ShardStore(tmp_path / "run").step(3), 0
    while any(writer.is_alive() for writer in writers):
        seen = max(seen, sum(sample.num_tokens == 400 for sample in step))  # each that is listed opens and verifies
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert step.sample_ids() == sorted(f"w{w}.{i}" for w in (0, 1) for i in range(60))
    assert sum(1 for _ in step) == 120 >= seen
    assert not [path for path in step.root.iterdir() if path.name.startswith(".")]


def test_a_killed_writer_leaves_whole_shards_and_a_leftover_at_most(tmp_path) -> None:
    event = SPAWN.Event()
    writer = SPAWN.Process(target=_write, args=(str(tmp_path), 0, 100_000, event))
    writer.start()
    assert event.wait(30)
    step = ShardStore(tmp_path).step(3)
    while len(step) < 20:
        time.sleep(0.005)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    assert inspection.verify(tmp_path).bad == {}
    step.remove_leftovers()
    assert all(path.suffix == shard.SUFFIX for path in step.root.iterdir())


def test_the_file_that_a_killed_writer_was_at_is_invisible(tmp_path, monkeypatch) -> None:
    """Killed at the worst moment: all is written, nothing has its name."""
    monkeypatch.setattr(os, "link", lambda *_: os._exit(9))
    pid = os.fork()
    if pid == 0:
        ShardStore(tmp_path).add(random_sample(RNG))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    store = ShardStore(tmp_path)
    (leftover,) = tmp_path.iterdir()
    assert store.sample_ids() == []
    assert store.remove_leftovers() == 1
    assert not leftover.exists()


def test_steps_are_stores_of_their_own(tmp_path) -> None:
    store = ShardStore(tmp_path / "run", create=True)
    for number in (0, 9, 12, 1_000_000):
        store.step(number, create=True).add(random_sample(RNG, sample_id="p.0"))
    (store.root / "step-x").mkdir()
    (store.root / "logs").mkdir()
    assert store.steps() == [0, 9, 12, 1_000_000]
    assert store.step(12).root.name == "step-000012"
    assert [each.root.name for each in store.stores()] == ["step-000000", "step-000009", "step-000012", "step-1000000"]
    assert store.sample_ids() == []
    store.add(random_sample(RNG, sample_id="flat"))
    assert store.stores()[0].sample_ids() == ["flat"]
    assert len(store.stores()) == 5
    with pytest.raises(StoreError, match="no such store"):
        store.step(5)
    with pytest.raises(StoreError, match="numbered from 0"):
        store.step(-1)


def steps_of(root: Path, count: int, samples: int = 3) -> ShardStore:
    store = ShardStore(root, create=True)
    for number in range(count):
        for i in range(samples):
            store.step(number, create=True).add(random_sample(RNG, sample_id=f"p.{i}"), fsync=False)
    return store


def test_old_steps_go_and_the_rest_stays(tmp_path) -> None:
    store = steps_of(tmp_path, 5)
    store.add(random_sample(RNG, sample_id="flat"))
    assert store.keep_steps(2, dry_run=True) == [0, 1, 2]
    assert store.steps() == [0, 1, 2, 3, 4]
    assert store.keep_steps(2) == [0, 1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        store.path_of("flat").name,
        "step-000003",
        "step-000004",
    ]
    assert len(store.step(3)) == len(store.step(4)) == 3
    assert store.keep_steps(2) == []
    with pytest.raises(StoreError, match="the newest step is always kept"):
        store.keep_steps(0)


def test_steps_of_a_run_that_had_come_further_neither_count_nor_go(tmp_path) -> None:
    store = steps_of(tmp_path, 9)
    assert store.keep_steps(2, newest=4) == [0, 1, 2]
    assert store.steps() == [3, 4, 5, 6, 7, 8]


def test_what_a_reader_has_open_outlives_gc(tmp_path) -> None:
    """POSIX: a deleted file lives until its last handle closes."""
    store = steps_of(tmp_path, 3)
    expected = store.step(0).open("p.1")
    with store.step(0).open_file("p.1") as file:
        store.keep_steps(1)
        assert store.steps() == [2]
        assert file.routes().equal(expected.routes)
        assert file.tokens().tolist() == expected.tokens.tolist()
    with pytest.raises(StoreError, match="no such store"):
        store.step(0)


def test_nobody_lists_half_a_step(tmp_path) -> None:
    """A reader lists old steps while they are deleted: each is there with all its samples, or not at all."""
    store = steps_of(tmp_path, 12, samples=40)
    counts, done = [], threading.Event()

    def read() -> None:
        while not done.is_set():
            for number in range(10):
                try:
                    counts.append(len(store.step(number)))
                except StoreError:  # gone before, or while it was listed
                    counts.append(-1)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.05)
    store.keep_steps(2)
    done.set()
    reader.join()
    assert 40 in counts
    assert set(counts) <= {40, -1}


def test_a_listing_that_gc_overtakes_is_an_error_and_not_half_a_list(tmp_path) -> None:
    store = steps_of(tmp_path, 2)
    names = store.step(0)._names()
    assert next(names)
    store.keep_steps(1)
    with pytest.raises(StoreError, match="deleted while it was being listed"):
        list(names)


def test_a_store_that_is_gone_is_an_error_of_the_store(tmp_path) -> None:
    store = ShardStore(tmp_path / "run", create=True)
    store.root.rmdir()
    for ask in (store.steps, store.sample_ids, store.stores, store.leftovers, lambda: store.keep_steps(1)):
        with pytest.raises(StoreError, match="deleted while it was being listed"):
            ask()
    store.root.write_text("a file")
    with pytest.raises(StoreError, match="Not a directory"):
        store.steps()


def test_a_killed_gc_is_completed_by_the_next(tmp_path, monkeypatch) -> None:
    store = steps_of(tmp_path, 4)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.keep_steps(2)
    assert store.steps() == [2, 3]  # what is half deleted is not a step
    store.keep_steps(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_writer_at_a_deleted_step_is_told(tmp_path) -> None:
    store = steps_of(tmp_path, 2)
    late = store.step(0)
    store.keep_steps(1)
    with pytest.raises(StoreError, match="No such file or directory"):
        late.add(random_sample(RNG, sample_id="late"))


def test_verify_names_what_is_bad(tmp_path) -> None:
    store = steps_of(tmp_path, 2, samples=4)
    assert inspection.verify(tmp_path).bad == {}
    damaged, renamed, cut = (store.step(1).path_of(f"p.{i}") for i in range(3))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    renamed.rename(renamed.with_name("q.safetensors"))
    calls: list[tuple[int, int]] = []
    result = inspection.verify(tmp_path, progress=lambda *now: calls.append(now))
    assert {Path(key).name: error.what.split(" (")[0] for key, error in result.bad.items()} == {
        damaged.name: "damaged: a tensor does not match its checksum",
        "q.safetensors": "a shard under another sample's name",
        cut.name: "not a readable shard",
    }
    assert (result.shards, calls[-1], len(calls)) == (8, (8, 8), 8)
    assert inspection.verify(damaged).bad.keys() == {str(damaged)}
    good = store.step(0).path_of("p.0")
    assert inspection.verify(good).bad == {}
    other = random_sample(RNG).spec
    other = type(other)(other.num_layers, other.moe_layers, other.num_experts + 1, other.top_k)
    assert isinstance(inspection.verify(good, spec=other).bad[str(good)], SpecError)
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="no shard in this directory"):
        inspection.verify(tmp_path / "empty")
    assert isinstance(inspection.verify(tmp_path / "absent").bad[str(tmp_path / "absent")], ShardError)


def test_temporary_names_do_not_collide_and_are_not_shards() -> None:
    names = {files.temporary_name() for _ in range(100)}
    assert len(names) == 100
    assert not any(name.endswith(shard.SUFFIX) or files.is_leftover(name) for name in names)
