"""A store on S3: a real server (moto's), real processes, and a network that breaks where it is told to."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers import r3, random_sample
from s3 import Server, bucket, server, server_process  # noqa: F401

from r3 import Routes, RoutingSpec, ShardStore, inspection, shard
from r3.errors import ConfigError, PresentError, R3Warning, ShardError, StoreError
from r3.sample import RolloutSample
from r3.shard import container, objects

pytestmark = pytest.mark.engine

RNG = np.random.default_rng(3)
SPAWN = multiprocessing.get_context("spawn")
BIG = RoutingSpec(24, tuple(range(24)), 128, 8)


def sample(name: str, num_tokens: int = 12, **overrides: Any) -> RolloutSample:
    return random_sample(RNG, sample_id=name, num_tokens=num_tokens, **overrides)


@functools.cache
def _big(num_tokens: int) -> RolloutSample:
    first = RNG.integers(0, BIG.num_experts, (BIG.num_moe_layers, num_tokens, 1))
    ids = ((first + np.arange(BIG.top_k)) % BIG.num_experts).astype(np.uint8)
    recorded = np.arange(num_tokens) < num_tokens - 1
    return random_sample(RNG, BIG, num_tokens, routes=Routes(ids * recorded[:, None].astype(np.uint8), recorded))


def big(name: str, num_tokens: int = 8192) -> RolloutSample:
    """A shard of 24 layers, top-8: 1.6 MB."""
    return dataclasses.replace(_big(num_tokens), sample_id=name, group_id=os.urandom(4).hex())


def fill(store: ShardStore, names: list[str]) -> None:
    """Objects of these names, with nothing in them."""
    fs, _ = fsspec.url_to_fs(store.url)
    fs.pipe({store.key_of(name): b"x" for name in names})


@pytest.fixture
def run(bucket: str, server: Server) -> ShardStore:  # noqa: F811
    store = ShardStore(f"{bucket}/run", create=True)
    server.clear()
    return store


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of `big` goes up in four parts."""
    monkeypatch.setattr(objects, "_PART", 1 << 19)


def test_the_whole_of_a_store(run: ShardStore) -> None:
    names = ["a.0", "b/c d.1", "ü", ".hidden", "..", "100%", "x?y#z*[1]", "a+b=c&d"]
    made = {name: sample(name) for name in names}
    for each in made.values():
        run.add(each)
    assert run.sample_ids() == sorted(names)
    assert [each.sample_id for each in run] == sorted(names)
    for name, each in made.items():
        assert shard.save(shard.load_file(run.key_of(name))) == shard.save(each)
        assert name in run
    assert "a.1" not in run
    with pytest.raises(PresentError, match=r"'a\.0' is there already"):
        run.add(sample("a.0"))
    assert abs(run.written_at("a.0") - time.time()) < 60  # type: ignore[operator]
    run.discard("a.0")
    with pytest.raises(StoreError, match=r"no sample 'a\.0'"):
        run.open("a.0")
    run.replace(sample("a.0"))
    assert inspection.verify(run.url).bad == {}
    run.check_writable()
    assert len(run) == len(names)


def test_what_a_call_costs(run: ShardStore, server: Server) -> None:  # noqa: F811
    """Requests are money and milliseconds."""

    def cost(call: Callable[[], Any]) -> list[str]:
        server.clear()
        call()
        return server.methods()

    step = run.step(3, create=True)
    assert cost(lambda: run.add(sample("a"))) == ["HEAD", "PUT"]
    assert cost(lambda: step.add(sample("a"))) == ["HEAD", "PUT", "HEAD"]
    assert cost(lambda: run.open("a")) == ["GET"]
    assert cost(lambda: run.metadata("a")) == ["GET"]
    assert cost(lambda: "a" in run) == cost(lambda: "b" in run) == ["HEAD"]
    assert cost(run.sample_ids) == ["GET"]
    assert cost(step.sample_ids) == ["GET", "HEAD"]
    assert cost(run.steps) == ["GET"]
    assert cost(lambda: ShardStore(run.url)) == ["HEAD"]
    assert cost(lambda: run.step(3)) == ["HEAD", "HEAD"]
    assert cost(lambda: run.step(3, create=True)) == ["HEAD", "HEAD"]
    run.step(4, create=True)
    assert cost(lambda: run.keep_steps(1)) == ["GET", "PUT", "GET", "GET", "HEAD", "POST", "GET"]
    with pytest.raises(PresentError):
        run.add(sample("a"))
    assert server.methods()[-1] == "HEAD"  # no megabytes are sent to be refused


def test_a_rank_reads_its_layers_and_its_tokens(run: ShardStore, server: Server) -> None:  # noqa: F811
    whole = big("a")
    run.add(whole)
    layers = slice(12, 24)
    for tokens, requests, more in (
        (slice(None), 1, 0),  # whole layers lie together
        (slice(2048, 4096), 1, 11 * (8192 - 2048) * 8),  # rows of 64 KB apart: read through
        (slice(0, 64), 1, 11 * (8192 - 64) * 8),
    ):
        server.clear()
        with run.open_file("a") as file:
            part = file.routes(layers, tokens)
        start, stop, _ = tokens.indices(8192)
        assert part.equal(whole.routes.layers(layers).tokens(start, stop))
        done = server.requests()
        assert [each["method"] for each in done] == ["GET"] * (1 + requests)
        assert sum(each["out"] for each in done) == container.HEAD + part.ids.nbytes + more
    long = big("b", 20_000)  # a layer is 160 KB
    run.add(long)
    server.clear()
    with run.open_file("b") as file:
        part = file.routes(layers, slice(0, 2500))
    assert part.equal(long.routes.layers(layers).tokens(0, 2500))
    done = server.requests()
    assert len(done) == 1 + 12
    assert sum(each["out"] for each in done) == container.HEAD + part.ids.nbytes


def test_a_shard_of_many_blocks_is_read_whole(run: ShardStore, server: Server, monkeypatch) -> None:  # noqa: F811
    whole = big("a")
    run.add(whole)
    monkeypatch.setattr(objects, "_BLOCK", 1 << 19)
    server.clear()
    assert run.open("a").routes.equal(whole.routes)
    assert server.methods() == ["GET"] * 4
    fs, path = fsspec.url_to_fs(run.key_of("empty"))
    fs.pipe_file(path, b"")
    for read in (run.open, run.open_file):
        with pytest.raises(ShardError, match="not a readable shard"):
            read("empty")


def test_a_listing_of_many_pages(run: ShardStore, server: Server, monkeypatch) -> None:  # noqa: F811
    names = [f"s{i:02d}" for i in range(30)]
    fill(run, names)
    run.step(1, create=True)
    run.step(2, create=True)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"s3_additional_kwargs": {"MaxKeys": 7}})  # for 1,000
    server.clear()
    assert run.sample_ids() == names
    assert len(server.methods()) == 5
    assert run.steps() == [1, 2]
    server.clear()
    assert next(run._names()) == "s00.safetensors"
    assert len(server.methods()) == 1


# --- the first writer wins


def _write_all(url: str, writer: int, count: int, started: Any, won: Any) -> None:
    store, rng = ShardStore(url), np.random.default_rng(writer)
    started.wait()
    mine = []
    for i in range(count):
        try:
            store.add(random_sample(rng, sample_id=f"s{i}", num_tokens=100 + writer), fsync=False)
            mine.append(f"s{i}")
        except PresentError:
            pass
    won.put((writer, mine))


@pytest.mark.parametrize("place", ["local", "s3"])
def test_two_processes_race_for_every_id(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    url = f"{request.getfixturevalue('bucket')}/race" if place == "s3" else str(tmp_path)
    store, started, won = ShardStore(url, create=True), SPAWN.Barrier(2), SPAWN.Queue()
    writers = [SPAWN.Process(target=_write_all, args=(url, i, 40, started, won)) for i in (0, 1)]
    for writer in writers:
        writer.start()
    winners = dict(won.get(timeout=60) for _ in writers)
    for writer in writers:
        writer.join()
    assert sorted(winners[0] + winners[1]) == sorted(f"s{i}" for i in range(40))  # each is won by exactly one
    assert winners[0]
    assert winners[1]
    for number, mine in winners.items():
        assert all(store.open(name).num_tokens == 100 + number for name in mine)  # and what it wrote stays


def test_of_two_puts_at_once_the_server_takes_one(run: ShardStore, server: Server) -> None:  # noqa: F811
    """Both have looked before either writes: the condition of the put decides."""
    writers = [sample("a", 20 + i) for i in range(8)]
    barrier = threading.Barrier(len(writers))
    has = run._folder.has
    run._folder.has = lambda name: (has(name), barrier.wait())[0]  # type: ignore[method-assign]

    def add(each: RolloutSample) -> int:
        try:
            run.add(each)
        except PresentError:
            return 0
        return each.num_tokens

    with ThreadPoolExecutor(len(writers)) as pool:
        won = [number for number in pool.map(add, writers) if number]
    assert won == [run.open("a").num_tokens]
    assert [each["status"] for each in server.requests() if each["method"] == "PUT"].count(412) == len(writers) - 1


def test_a_server_that_ignores_the_condition_is_named(run: ShardStore, server: Server) -> None:  # noqa: F811
    server.fault("replace", method="PUT", times=100)
    with pytest.warns(R3Warning, match="replaces an object that it was asked not to replace"):
        run.check_writable()
    run.add(sample("a"))
    with pytest.raises(PresentError):  # looked before
        run.add(sample("a"))


# --- failures


@pytest.mark.parametrize("kind", ["SlowDown", "InternalError", "reset", "lost", "ConditionalRequestConflict"])
def test_a_failure_that_passes_is_not_seen(run: ShardStore, server: Server, kind: str) -> None:  # noqa: F811
    server.fault(kind, method="PUT", times=2)
    before = sample("a")
    run.add(before)  # `lost`: the object of our own first put does not make it "there already"
    assert shard.save(run.open("a")) == shard.save(before)
    assert sum(each["status"] == 200 for each in server.requests() if each["method"] == "PUT") == 1


@pytest.mark.parametrize("kind", ["SlowDown", "InternalError", "cut"])
def test_a_read_that_fails_once_is_repeated(run: ShardStore, server: Server, kind: str) -> None:  # noqa: F811
    whole = big("a")
    run.add(whole)
    for read in (lambda: run.open("a").routes, lambda: run.open_file("a").routes(verify=True)):
        server.fault(kind, method="GET")
        assert read().equal(whole.routes)


def test_what_does_not_pass_is_said_at_once(run: ShardStore, server: Server) -> None:  # noqa: F811
    server.fault("AccessDenied", method="PUT")
    with pytest.raises(StoreError, match=r"(?s)not allowed: this cannot be written to.*got AccessDenied.*policy"):
        run.add(sample("a"))
    assert server.methods() == ["HEAD", "PUT"]
    assert "a" not in run
    server.fault("AccessDenied", method="GET", times=3)
    for read in (lambda: run.open("a"), run.sample_ids, lambda: shard.load_file(run.key_of("a"))):
        server.clear()
        server.fault("AccessDenied", method="GET")
        with pytest.raises(StoreError, match=r"not allowed: this cannot be (read|listed)"):
            read()
        assert len(server.methods()) == 1
    for create in (False, True):
        with pytest.raises(StoreError, match=r"(?s)s3://no-such-bucket/run: no such bucket.*r3 makes folders, never"):
            ShardStore("s3://no-such-bucket/run", create=create)
    with pytest.raises(StoreError, match="no such bucket"):
        shard.load_file("s3://no-such-bucket/a.safetensors")


def test_without_credentials(run: ShardStore, monkeypatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(objects, "_alive", {})
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        with pytest.raises(StoreError, match=r"(?s)no credentials.*AWS_ACCESS_KEY_ID"):
            run.open("a")
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_server_that_stays_down(run: ShardStore, server: Server) -> None:  # noqa: F811
    server.fault("InternalError", method="PUT", times=1000)
    with pytest.raises(StoreError, match=r"(?s)cannot be written to.*the client's own retries are used up"):
        run.add(sample("a"))
    assert len(server.requests()) == 1 + 3  # AWS_MAX_ATTEMPTS
    server.clear()
    assert "a" not in run


def uploads(run: ShardStore) -> list[Any]:
    fs, path = fsspec.url_to_fs(run.url)
    return fs.call_s3("list_multipart_uploads", Bucket=path.split("/")[0]).get("Uploads", [])


@pytest.mark.usefixtures("small_parts")
def test_an_upload_in_parts_appears_at_its_end(run: ShardStore, server: Server) -> None:  # noqa: F811
    whole = big("a")
    server.fault("reset", match="partNumber=2")
    server.fault("lost", match="partNumber=3")
    server.fault("SlowDown", method="POST", match="uploadId")
    run.add(whole)
    assert {each["url"].split("partNumber=")[1][0] for each in server.requests() if "partNumber" in each["url"]} == set(
        "1234"
    )
    assert shard.save(run.open("a")) == shard.save(whole)
    assert uploads(run) == []


@pytest.mark.usefixtures("small_parts")
def test_the_end_of_an_upload_whose_answer_is_lost_is_ours(run: ShardStore, server: Server) -> None:  # noqa: F811
    server.fault("lost", method="POST", match="uploadId", times=2)
    run.add(big("a"))
    assert "a" in run
    assert uploads(run) == []


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_comes_second_is_refused_and_taken_away(run: ShardStore, monkeypatch) -> None:
    first = big("a")
    run.add(first)
    monkeypatch.setattr(run._folder, "has", lambda _: False)  # as if the first came while this one was going up
    with pytest.raises(PresentError):
        run.add(big("a"))
    assert shard.save(run.open("a")) == shard.save(first)
    assert uploads(run) == []


@pytest.mark.usefixtures("small_parts")
def test_an_upload_that_fails_in_the_middle_leaves_nothing(run: ShardStore, server: Server) -> None:  # noqa: F811
    server.fault("InternalError", match="partNumber=3", times=100)
    with pytest.raises(StoreError, match="cannot be written to"):
        run.add(big("a"))
    assert run.sample_ids() == []
    with pytest.raises(StoreError, match="no sample"):
        run.open("a")
    assert uploads(run) == []


def _write_big(url: str, part: int) -> None:
    objects._PART = part
    ShardStore(url).add(big("a"))


@pytest.mark.parametrize(("part", "match"), [(32 << 20, "a.safetensors"), (1 << 19, "partNumber=2")])
def test_a_writer_that_is_killed_in_the_middle_wrote_nothing(
    run: ShardStore,
    server: Server,  # noqa: F811
    monkeypatch,
    part: int,
    match: str,
) -> None:
    server.fault("hold", method="PUT", match=match)
    writer = SPAWN.Process(target=_write_big, args=(run.url, part))
    writer.start()
    server.wait_for(1 if "part" in match else 2, match)  # the second of a put is the put itself, after the look
    time.sleep(0.2)
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    assert run.sample_ids() == []
    assert "a" not in run
    with monkeypatch.context() as patch:
        patch.setattr("r3.folders._OLD_S", 1e12)  # moto's uploads are all of 2010
        assert run.remove_leftovers() == 0  # its writer may be alive, for all that S3 tells
    if "part" in match:
        assert len(uploads(run)) == 1
        assert run.remove_leftovers() == 1
    assert uploads(run) == []
    run.add(big("a"))
    assert run.open("a").num_tokens == 8192


# --- deleting steps


def test_nobody_lists_half_a_step(run: ShardStore) -> None:
    """A reader lists old steps while they are deleted: each is there with all its samples, or not at all."""
    for number in range(6):
        fill(run.step(number, create=True), [f"p.{i}" for i in range(40)])
    stores, counts, done = [run.step(number) for number in range(6)], [], threading.Event()

    def read() -> None:
        while not done.is_set():
            for store in stores[:4]:
                try:
                    counts.append(len(store))
                except StoreError:
                    counts.append(-1)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    time.sleep(0.3)
    assert run.keep_steps(2) == [0, 1, 2, 3]
    done.set()
    for reader in readers:
        reader.join()
    assert set(counts) == {40, -1}
    assert run.steps() == [4, 5]


def test_a_deletion_that_is_refused_is_not_taken_for_done(run: ShardStore, server: Server, monkeypatch) -> None:  # noqa: F811
    for number in (0, 1):
        run.step(number, create=True).add(sample("p.0"))
    monkeypatch.setattr(objects.Objects, "remove", lambda *_: None)  # s3fs drops the errors of a bulk deletion
    with pytest.raises(StoreError, match="2 objects of step-000000 were not deleted"):
        run.keep_steps(1)
    monkeypatch.undo()
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}.items():
        monkeypatch.setenv(name, value)
    assert run.steps() == [1]
    assert run.keep_steps(1) == []
    server.clear()


# --- processes, threads, event loops


def test_a_store_survives_a_fork(run: ShardStore) -> None:
    """DataLoader workers and others fork a process that has read from the store."""
    run.add(sample("a"))
    assert run.open("a").num_tokens == 12
    with run.open_file("a") as file:
        children = []
        for i in range(2):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    signal.alarm(20)
                    same = run.open("a").num_tokens == file.routes().num_tokens == 12
                    run.add(sample(f"child.{i}"))
                    code = 0 if same else 2
                finally:
                    os._exit(code)
            children.append(pid)
        assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
        assert file.routes().num_tokens == 12
    assert run.sample_ids() == ["a", "child.0", "child.1"]  # and the parent's own connection goes on


def test_threads_and_event_loops(run: ShardStore) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: run.add(sample(f"s{i}")), range(64)))
        assert sum(pool.map(lambda name: run.open(name).num_tokens, run.sample_ids())) == 64 * 12

    async def inside() -> int:
        await asyncio.to_thread(run.add, sample("thread"))
        return run.open("thread").num_tokens  # blocks the loop, as reading a file does

    for _ in range(2):
        assert asyncio.run(inside()) == 12 or run.discard("thread")
        run.discard("thread")


# --- the command line


def test_the_command_line_takes_urls(run: ShardStore, monkeypatch, capsys, tmp_path: Path) -> None:
    for number in (3, 4):
        run.step(number, create=True).add(sample("p.0"))
    code, text = r3(monkeypatch, capsys, "inspect", run.url, "--verify")
    assert code == 0
    assert "2 (3 to 4)" in text
    code, text = r3(monkeypatch, capsys, "inspect", run.step(3).key_of("p.0"))
    assert code == 0
    assert "p.0 (group g)" in text
    assert "2 of 2 shards are good" in r3(monkeypatch, capsys, "verify", run.url)[1]
    assert "2 samples written" in r3(monkeypatch, capsys, "export", run.url, tmp_path / "out.npz")[1]
    code, text = r3(monkeypatch, capsys, "doctor", "--store", run.url)
    assert "2 shards" in text
    assert "an object of 32 MB is written at" in text
    assert "1 of 2 steps (3 to 3) deleted" in r3(monkeypatch, capsys, "gc", run.url, "--keep-steps", 1)[1]
    assert run.steps() == [4]
    code, text = r3(monkeypatch, capsys, "inspect", run.url + "/absent")
    assert code == 1
    assert "no such store" in text
    code, text = r3(monkeypatch, capsys, "diagnose", run.url, "--model", tmp_path)
    assert code == 1
    assert "where the report goes is not said" in text


def test_a_file_system_that_is_not_installed() -> None:
    with pytest.raises(ConfigError, match=r"(?s)gs://bucket/run: no file system for this URL.*gcsfs"):
        ShardStore("gs://bucket/run")
