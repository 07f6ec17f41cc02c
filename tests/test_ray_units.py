"""Parts of the rollout pool that need no cluster: the bound of bytes, the guard of processes, the gate, the published version."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from aiohttp import web
from helpers import SPEC
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from r3 import ShardStore
from r3.cli.collecting import _engine
from r3.errors import ConfigError, EngineError, PromptError, StoreError
from r3.rollout.collector import collect
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Completion, Sampling
from r3.rollout.ray import RolloutPool
from r3.rollout.ray.dispatch import Task, given_up
from r3.rollout.ray.engines import Engine, VersionedClient
from r3.rollout.ray.flow import Flow, bound_of
from r3.rollout.ray.guard import guarded, start_time
from r3.rollout.ray.inprocess import InProcessVllm
from r3.rollout.ray.sharing import probe_in
from r3.rollout.ray.telemetry import cause_of
from r3.rollout.ray.worker import _Gate
from r3.rollout.recording import Recorder
from r3.shard import files
from r3.testing import random_rows
from r3.wire import encode_vllm
from r3.wire.checks import refuse

INFO = EngineInfo((), SPEC, "m", engine_version="0.30.0", logprobs_mode="raw_logprobs")


@pytest.mark.parametrize(("prompt_length", "tokens"), [(1, 1), (7, 100), (300, 4000)])
def test_no_shard_is_larger_than_what_was_reserved_for_it(tmp_path: Path, prompt_length: int, tokens: int) -> None:
    prompt = Prompt("p", 0, "prompt_token_ids", list(range(prompt_length)))
    sampling = Sampling(max_tokens=tokens, seed=1)
    rng = np.random.default_rng(0)
    rows = random_rows(rng, SPEC, prompt_length + tokens - 1, hidden=True)
    completion = Completion(
        np.arange(prompt_length),
        rng.integers(0, 2**31 - 1, tokens),
        -rng.random(tokens),
        encode_vllm(rows),
        "length",
        "",
    )
    size = Recorder(ShardStore(tmp_path), INFO, sampling).keep(prompt, "p.0", completion)
    bound = bound_of(prompt, sampling, INFO)
    assert size <= bound
    assert bound < 2 * size + 16_384
    text = Prompt("p", 0, "prompt", "é" * prompt_length)
    assert bound_of(text, sampling, INFO) >= bound
    chat = Prompt("p", 0, "messages", [{"role": "user", "content": "x" * prompt_length}])
    assert bound_of(chat, sampling, INFO) >= bound
    assert bound_of(text, Sampling(max_tokens=10**9), EngineInfo((), SPEC, "m", max_model_len=64)) < 64 * 100 + 16_385


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), max_size=60))
@settings(max_examples=50, deadline=None)
def test_the_budget_is_kept_and_a_sample_larger_than_it_passes_alone(samples: list[tuple[int, float]]) -> None:
    flow, held = Flow(60), []
    for bound, share in samples:
        while not flow.admits(bound):
            flow.give(held.pop(0))
        flow.take(bound)
        actual = int(bound * share)
        flow.resize(bound, actual)
        held.append(actual)
        assert flow.held == sum(held) <= 60
    big = Flow(10)
    assert big.admits(1000)
    big.take(1000)
    assert not big.admits(1)


GUARDED = """
import subprocess, sys, time
from r3.rollout.ray.guard import guard_children
mark = guard_children()
assert guard_children() == mark
child = "import subprocess, sys, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
print(mark, flush=True)
time.sleep(300)
"""


def test_what_a_guarded_process_started_ends_with_it() -> None:
    """A child and a grandchild in sessions of their own; and a stranger lives on."""
    stranger = subprocess.Popen(["sleep", "300"])
    parent = subprocess.Popen([sys.executable, "-c", GUARDED], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        mark = parent.stdout.readline().strip()
        assert wait(lambda: len(guarded(mark)) == 2)
        processes = [psutil.Process(pid) for pid in guarded(mark)]
        processes[0].send_signal(signal.SIGSTOP)  # one that does not notice anything
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert wait(lambda: guarded(mark) == [])
        assert wait(lambda: not any(alive(process) for process in processes))
        assert stranger.poll() is None
        guards = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
        assert psutil.wait_procs(guards, timeout=5)[1] == []  # the guard itself ends, too
    finally:
        for process in (stranger, parent):
            process.kill()
            process.wait()


def test_start_times_tell_processes_of_one_number_apart() -> None:
    process = subprocess.Popen(["true"])
    assert start_time(os.getpid()) == start_time(os.getpid()) != ""
    assert wait(lambda: start_time(process.pid) == "")  # ended and not reaped: it can start nothing any more
    process.wait()
    assert start_time(process.pid) == ""


def alive(process: psutil.Process) -> bool:
    return (
        process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    )  # who reaps an orphan is the machine's affair


def wait(condition: Any, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def test_an_update_is_alone_and_nobody_slips_in() -> None:
    async def main() -> list[str]:
        gate, events = _Gate(), []

        async def request(name: str, seconds: float) -> None:
            async with gate.shared():
                events.append(f"{name} in")
                await asyncio.sleep(seconds)
            events.append(f"{name} out")

        async def update() -> None:
            async with gate.alone():
                events.append("update")
                assert gate.inside == 0

        early = [asyncio.create_task(request(name, 0.02)) for name in "ab"]
        cancelled = asyncio.create_task(request("x", 60))
        await asyncio.sleep(0)
        updates = [asyncio.create_task(update()), asyncio.create_task(update())]
        await asyncio.sleep(0)
        late = asyncio.create_task(request("c", 0))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(*early, *updates, late)
        given_up = asyncio.create_task(request("d", 0.01))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(update())
        await asyncio.sleep(0)
        waiting.cancel()  # an update that is given up while it waits lets the next ones in
        await given_up
        await request("e", 0)
        return events

    events = asyncio.run(main())
    assert events.index("update") > max(events.index("a out"), events.index("b out"))
    assert events.index("c in") > len(events) - 1 - events[::-1].index("update")
    assert events[-2:] == ["e in", "e out"]


def test_versions_that_a_controller_publishes() -> None:
    answers: list[Any] = [3, {"weight_version": 4}, {"version": 5}, "6", True]

    async def main() -> list[Any]:
        async def version(_: web.Request) -> web.Response:
            return web.json_response(answers.pop(0))

        app = web.Application()
        app.router.add_get("/version", version)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        client = VersionedClient(SimpleNamespace(sample=None), f"{url}/version")  # type: ignore[arg-type]
        results: list[Any] = []
        for _ in range(5):
            try:
                results.append(await client.weight_version())
            except EngineError as error:
                results.append(error.what)
        try:
            await VersionedClient(SimpleNamespace(sample=None), f"{url}/nothing").weight_version()  # type: ignore[arg-type]
        except EngineError as error:
            results.append(error.what)
        await runner.cleanup()
        return results

    results = asyncio.run(main())
    assert results[:2] == [3, 4]
    assert results[2:5] == ["not a version of weights"] * 3
    assert "404" in results[5]


def test_custom_engines_that_are_none() -> None:
    from contextlib import AsyncExitStack

    async def opened(path: str) -> None:
        async with AsyncExitStack() as stack:
            await Engine.custom(path).open(Sampling(), stack)

    for path in ("no_such_module:f", "os:no_such_function", "no-colon", ""):
        with pytest.raises(ConfigError, match="no such engine"):
            asyncio.run(opened(path))
    with pytest.raises(ConfigError, match="does not make an engine"):
        asyncio.run(opened("builtins:repr"))


def test_an_id_is_asked_for_once(tmp_path: Path) -> None:
    twice = [Prompt("p", 0, "prompt", "x"), Prompt("p", 0, "prompt", "y")]
    with pytest.raises(PromptError, match="the id is taken"):
        asyncio.run(collect(twice, ShardStore(tmp_path), INFO))


def test_a_prompt_that_the_template_refuses_is_not_the_engines_fault() -> None:
    """Templates raise jinja2's TemplateError where roles do not alternate."""

    class Tokenizer:
        def apply_chat_template(self, *_: Any, **__: Any) -> Any:
            raise TemplateError("roles must alternate")

    vllm = InProcessVllm("m", Sampling())
    vllm._engine = SimpleNamespace(get_tokenizer=Tokenizer)
    with pytest.raises(PromptError, match="roles must alternate"):
        asyncio.run(vllm.sample(Prompt("p", 4, "messages", [{"role": "user", "content": "x"}] * 2)))
    assert vllm._running == 0


def test_a_model_of_this_directory_is_found_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    assert _engine("vllm", [], Path("m"), None, None, {}).target == str(tmp_path / "m")
    assert _engine("server", ["http://x"], Path("m"), None, None, {}).options["model_path"] == str(tmp_path / "m")
    assert _engine("vllm", [], Path("org/name"), None, None, {}).target == "org/name"


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_straggler_is_slower_than_at_once(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ConfigError, match="straggler_s"):
        RolloutPool(Engine.server("http://x"), tmp_path, straggler_s=seconds)


def test_causes_are_said_once_and_tagged_with_few_words() -> None:
    task = Task(Prompt("p", 3, "prompt", "x"), "p.0", 1)
    task.causes = [EngineError("a"), StoreError("b"), EngineError("a")]
    text = str(given_up(task))
    assert text.count("a\n") == 1
    assert "try 1, 3: a" in text
    assert "try 2: b" in text
    assert "line 3" in text
    assert cause_of(refuse("zeros", "every expert id is 0", "x")) == "zeros"
    assert [cause_of(error) for error in (PromptError("x"), StoreError("x"), EngineError("x"))] == [
        "prompt",
        "store",
        "engine",
    ]


@pytest.mark.parametrize("remote", [False, True])
def test_the_probe_of_a_store_is_seen_or_refused_by_node(tmp_path: Path, remote: bool) -> None:
    root = f"memory://probe-{os.getpid()}" if remote else str(tmp_path)
    ShardStore(root, create=True)
    with probe_in(root) as probe:
        assert files.TEMPORARY in probe.path
        probe.require_seen("node1")
        assert ShardStore(root).sample_ids() == []
        for other in (type(probe)(probe.path, "another word"), type(probe)(probe.path + "x", probe.word)):
            with pytest.raises(StoreError, match="not a shared file system") as caught:
                other.require_seen("node1")
            assert "node node1" in str(caught.value)
    with pytest.raises(StoreError):
        probe.require_seen("node1")
