"""A store behind a URL is the store that a directory is: the same calls, the same answers, the same errors.

Here fsspec's memory file system, which is an object store as r3 uses it, and a file system with folders and renames and no
conditional put. S3 itself: test_store_s3.py.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from helpers import random_sample
from rich.console import Console

from r3 import ShardStore, export, inspection, shard
from r3.errors import ConfigError, NoShardError, PresentError, R3Error, ShardError, StoreError
from r3.folders import UrlFolder
from r3.sample import RolloutSample
from r3.shard import files, objects
from r3.store import id_in, is_store

RNG = np.random.default_rng(5)


class SharedFiles(LocalFileSystem):
    """Local files as fsspec has them: folders, renames, and `pipe_file` that others see half-written."""

    protocol = "shared"
    local_file = False
    renamed: ClassVar[list[str]] = []

    def mv(self, path1: str, path2: str, **keywords: Any) -> None:
        self.renamed.append(path2)
        super().mv(path1, path2, **keywords)


@pytest.fixture(params=["local", "memory", "shared"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    fsspec.register_implementation("shared", SharedFiles, clobber=True)
    yield {"local": str(tmp_path), "memory": f"memory://{tmp_path}", "shared": f"shared://{tmp_path}"}[request.param]
    MemoryFileSystem.store.clear()


def sample(name: str, **overrides: Any) -> RolloutSample:
    return random_sample(RNG, sample_id=name, **overrides)


def test_the_whole_of_a_store(root: str) -> None:
    store = ShardStore(f"{root}/run/", create=True)
    names = ["a.0", "b/c d.1", "ü", ".hidden", "..", "100%", "x?y#z*[1]"]
    made = {name: sample(name) for name in names}
    sizes = [store.add(each) for each in made.values()]
    assert sizes == [len(shard.save(each)) for each in made.values()]
    assert store.sample_ids() == sorted(names)
    assert len(store) == len(names)
    assert [each.sample_id for each in store] == sorted(names)
    assert (store.name, "a.0" in store, "a.1" in store) == ("run", True, False)
    for name, each in made.items():
        key = store.key_of(name)
        assert key.startswith(f"{root}/run/")
        assert id_in(key) == name
        assert shard.load_file(key).routes.equal(each.routes)
        assert store.metadata(name)["sample_id"] == name
    with store.open_file("ü") as file:
        assert file.routes([0, 2], slice(3, 7)).equal(made["ü"].routes.layers([0, 2]).tokens(3, 7))
        assert file.size == sizes[2]
    before = shard.save(store.open("a.0"))
    with pytest.raises(PresentError, match=r"run: sample 'a\.0' is there already"):
        store.add(sample("a.0"))
    assert shard.save(store.open("a.0")) == before
    store.replace(other := sample("a.0"))
    assert shard.save(store.open("a.0")) == shard.save(other)
    assert store.written_at("a.1") is None
    assert store.written_at("a.0") >= store.written_at("ü") > 1.7e9  # type: ignore[operator]
    store.discard("a.0")
    store.discard("a.0")
    for read in (store.open, store.open_file, store.metadata):
        with pytest.raises(StoreError, match=r"no sample 'a\.0'"):
            read("a.0")
    with pytest.raises(NoShardError):
        shard.load_file(store.key_of("a.0"))
    with pytest.raises(StoreError, match="not usable as a sample id"):
        store.key_of("x" * 300)
    store.check_writable()
    assert store.remove_leftovers() == 0
    assert sorted(store.sample_ids()) == sorted(set(names) - {"a.0"})


def test_a_store_is_there_before_its_first_sample_and_not_before_it_is_made(root: str) -> None:
    with pytest.raises(StoreError, match="absent: no such store"):
        ShardStore(f"{root}/absent")
    ShardStore(f"{root}/run", create=True)
    assert ShardStore(f"{root}/run").sample_ids() == []
    assert ShardStore(f"{root}/run", create=True).stores() == []


def test_steps_come_and_go(root: str) -> None:
    store = ShardStore(f"{root}/run", create=True)
    for number in (0, 9, 12, 1_000_000):
        store.step(number, create=True).add(sample("p.0"))
    store.add(sample("flat"))
    ShardStore(f"{root}/run/step-x", create=True)
    assert store.steps() == [0, 9, 12, 1_000_000]
    assert [each.name for each in store.stores()] == [
        "run",
        "step-000000",
        "step-000009",
        "step-000012",
        "step-1000000",
    ]
    late = store.step(0)
    with pytest.raises(StoreError, match="no such store"):
        store.step(5)
    assert store.keep_steps(2, dry_run=True) == [0, 9]
    assert store.keep_steps(2, newest=12) == [0]
    assert store.keep_steps(2) == [9]
    assert store.steps() == [12, 1_000_000]
    assert (store.has_step(0), store.has_step(12)) == (False, True)
    with pytest.raises(StoreError, match="no such store"):
        store.step(9)
    with pytest.raises(StoreError, match="deleted"):
        late.sample_ids()
    with pytest.raises(StoreError, match=r"deleted|No such file"):
        late.add(sample("late"))
    again = store.step(0, create=True)  # a run that is resumed from a checkpoint before
    assert again.sample_ids() == []
    again.add(sample("p.0"))
    assert store.steps() == [0, 12, 1_000_000]
    assert store.keep_steps(2) == [0]
    assert store.sample_ids() == ["flat"]


def test_a_listing_that_a_deletion_overtakes_is_an_error_and_not_half_a_list(root: str) -> None:
    store = ShardStore(root, create=True)
    for number in (0, 1):
        for i in range(3):
            store.step(number, create=True).add(sample(f"p.{i}"))
    names = store.step(0)._names()
    next(names)
    store.keep_steps(1)
    with pytest.raises(StoreError, match="deleted while it was being listed"):
        list(names)


@pytest.mark.parametrize("completed_by", ["the next deletion", "making the step anew"])
def test_a_deletion_that_was_killed_is_invisible_and_completed(root: str, completed_by: str, monkeypatch) -> None:
    store = ShardStore(root, create=True)
    for number in range(3):
        for i in range(3):
            store.step(number, create=True).add(sample(f"p.{i}"))
    with monkeypatch.context() as patch:
        for name in ("shutil.rmtree", "r3.shard.objects.Objects.remove"):
            patch.setattr(name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.keep_steps(2)
    assert store.steps() == [1, 2]
    if completed_by == "making the step anew":
        assert store.step(0, create=True).sample_ids() == []
        return
    assert store.keep_steps(2) == []
    fs, path = fsspec.url_to_fs(root)
    assert not [each for each in fs.find(path) if "step-000000/" in each]


@pytest.mark.parametrize("root", ["memory", "shared"], indirect=True)
def test_two_workers_make_a_deleted_step_anew(root: str, monkeypatch) -> None:
    """The slower one has seen the mark when the faster one makes the step and writes: what that wrote stays."""
    store = ShardStore(root, create=True)
    for number in (1, 2):
        store.step(number, create=True).add(sample("old"))
    store.keep_steps(1)
    clear = UrlFolder._clear

    def late(folder: UrlFolder) -> None:
        monkeypatch.setattr(UrlFolder, "_clear", clear)
        store.step(1, create=True).add(sample("new"))
        clear(folder)

    monkeypatch.setattr(UrlFolder, "_clear", late)
    assert store.step(1, create=True).sample_ids() == ["new"]


def test_a_url_that_is_a_pattern_is_refused() -> None:
    for url in ("memory://run[1]", "s3://bucket/run*", "memory://run?"):
        with pytest.raises(ConfigError, match="for a pattern"):
            ShardStore(url, create=True)


def test_a_store_travels_to_another_process(root: str) -> None:
    store = ShardStore(root, create=True)
    store.add(sample("a"))
    assert pickle.loads(pickle.dumps(store)).sample_ids() == ["a"]
    assert len(pickle.dumps(store)) < 400 + len(root)


def test_what_looks_at_stores_takes_urls(root: str, tmp_path: Path) -> None:
    store = ShardStore(f"{root}/run", create=True)
    store.add(sample("flat"))
    store.step(3, create=True).add(sample("p.0"))
    console = Console(width=200, file=open(os.devnull, "w"), record=True)  # noqa: SIM115
    console.print(inspection.store_table(store, verify=True))
    console.print(inspection.shard_table(store.key_of("flat")))
    text = console.export_text()
    assert "2 in 1 groups" in text
    assert "1 (3 to 3)" in text
    assert "flat (group g)" in text
    assert is_store(f"{root}/run")
    assert not is_store(store.key_of("flat"))
    result = inspection.verify(f"{root}/run")
    assert (result.shards, result.bad) == (2, {})
    assert result.bytes == sum(len(shard.save(each.open(i))) for each in store.stores() for i in each.sample_ids())
    store.replace(sample("other"), "flat")
    assert [error.what for error in inspection.verify(f"{root}/run").bad.values()] == [
        "a shard under another sample's name"
    ]
    assert export.export(f"{root}/run", tmp_path / "out.npz") == 2
    assert "step-000003/p.0/tokens" in np.load(tmp_path / "out.npz")


def test_a_store_without_a_directory_says_so_where_one_is_needed() -> None:
    store = ShardStore("memory://needs/a/directory", create=True)
    for ask in (lambda: store.root, lambda: store.path_of("a")):
        with pytest.raises(StoreError, match="needs a directory, and the store is a URL"):
            ask()


def test_a_url_that_was_made_a_path_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="s3:/bucket/run: a URL that was made a path"):
        ShardStore(Path("s3://bucket/run"), create=True)
    with pytest.raises(ConfigError, match="a URL that was made a path"):
        shard.load_file(Path("memory://bucket/a.safetensors"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    store = ShardStore(f"file://{tmp_path}/run", create=True)
    store.add(sample("a"))
    assert store.root == tmp_path / "run"
    assert shard.load_file(f"file://{tmp_path}/run/a.safetensors").sample_id == "a"


def test_without_a_conditional_put_a_shard_still_appears_whole(tmp_path: Path, monkeypatch) -> None:
    fsspec.register_implementation("shared", SharedFiles, clobber=True)
    store = ShardStore(f"shared://{tmp_path}/run", create=True)
    SharedFiles.renamed.clear()
    store.add(sample("a"))
    assert SharedFiles.renamed == [f"{tmp_path}/run/a.safetensors"]
    monkeypatch.setattr(SharedFiles, "mv", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(StoreError, match="cannot be written to"):
        store.add(sample("b"))
    assert sorted(os.listdir(tmp_path / "run")) == [".r3-store", "a.safetensors"]
    monkeypatch.setattr(SharedFiles, "size", lambda *_: 7)
    with pytest.raises(StoreError, match=r"cannot be written to.*bytes were written, 7 are there"):
        store.add(sample("b"))
    (tmp_path / "run" / f"{shard.TEMPORARY}{os.uname().nodename}.999999999.abcd").write_bytes(b"half")
    assert store.remove_leftovers() == 1


def test_a_file_system_that_cannot_be_written_says_so() -> None:
    with pytest.raises(R3Error, match=r"http://127\.0\.0\.1:9/run"):
        UrlFolder("http://127.0.0.1:9/run").check_writable()


def test_slices_that_lie_close_are_one_request(monkeypatch) -> None:
    store, asked = ShardStore("memory://slices", create=True), []
    whole = sample("a", num_tokens=2000)
    store.add(whole)
    ranges = objects.Objects.ranges

    def counted(self: Any, path: str, begins: list[int], ends: list[int]) -> list[bytes]:
        asked.append(list(zip(begins, ends, strict=True)))
        return ranges(self, path, begins, ends)

    monkeypatch.setattr(objects.Objects, "ranges", counted)
    for gap, requests in ((1 << 20, 1), (0, 3)):
        monkeypatch.setattr(objects, "_GAP", gap)
        with store.open_file("a") as file:
            del asked[:]
            found = file.routes([2, 0, 1], slice(100, 1000))
        assert found.equal(whole.routes.layers([2, 0, 1]).tokens(100, 1000))
        assert len(asked) == 1
        assert len(asked[0]) == requests
    with store.open_file("a") as file:
        assert file.routes([1, 1]).equal(whole.routes.layers([1, 1]))


def test_an_empty_or_cut_object_is_a_damaged_shard() -> None:
    store = ShardStore("memory://damaged", create=True)
    fs = fsspec.filesystem("memory")
    data = shard.save(sample("a"))
    for content in (b"", data[:5], data[:-1]):
        fs.pipe_file("/damaged/a.safetensors", content)
        with pytest.raises(ShardError):
            store.open("a")
        with pytest.raises(ShardError):
            store.open_file("a")


def test_no_hard_links(tmp_path: Path, monkeypatch) -> None:
    """FUSE, FAT, SMB: looked, then renamed."""
    store = ShardStore(tmp_path)

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first = sample("a")
    store.add(first)
    with pytest.raises(PresentError):
        files.write_atomically(tmp_path / "a.safetensors", b"other", exclusive=True)
    assert shard.save(store.open("a")) == shard.save(first)
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch) -> None:
    """NFS: the client sends a call again that was carried out, and is told that the name is taken."""
    link = os.link

    def linked_and_refused(source: Any, target: Any) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", linked_and_refused)
    store = ShardStore(tmp_path)
    store.add(sample("a"))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_opening_a_store_in_a_directory_imports_no_fsspec(tmp_path: Path) -> None:
    code = "import sys; from r3 import ShardStore; len(ShardStore(sys.argv[1])); assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
