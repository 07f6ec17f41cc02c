"""collector: every sample asked for is written once, and is what the engine sent, whatever servers, disks and kills do."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pybase64
import pytest
from aiohttp import web
from fake_vllm import MODEL, FakeVllm, cut_in_the_middle, status, too_long
from helpers import SPEC

from r3 import RolloutSample, Routes, ShardStore
from r3.errors import ConfigError, EngineError, PromptError, R3Error, StoreError, WireError
from r3.rollout.client import Retry
from r3.rollout.collector import CollectReport, collect_sync, sample_seed
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import Prompt, read_prompts
from r3.rollout.protocol import Sampling
from r3.testing import random_rows
from r3.wire import encode_vllm

TESTS = Path(__file__).resolve().parent
TEXT = [Prompt(f"p{i}", i + 1, "prompt", f"text {i}") for i in range(6)]
TOKENS = Prompt("t", 7, "prompt_token_ids", [5, 6, 7])
CHAT = Prompt("c", 8, "messages", [{"role": "user", "content": "hi"}])
FAST = Retry(attempts=5, first_s=0.01, longest_s=0.05)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm() as fake:
        yield fake


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "store", create=True)


def gather(
    store: ShardStore, server: FakeVllm | None, prompts: list[Prompt], info: EngineInfo | None = None, **options: Any
) -> CollectReport:
    options = {"sampling": Sampling(max_tokens=8, seed=0), "retry": FAST, "fsync": False, **options}
    if info is None:
        assert server is not None
        info = server.info()
    return collect_sync(prompts, store, info, **options)


def same(a: RolloutSample, b: RolloutSample) -> bool:
    names = ("tokens", "rollout_logprobs", "loss_mask", "weight_version")
    arrays = all(np.array_equal(getattr(a, n), getattr(b, n), equal_nan=n == "rollout_logprobs") for n in names)
    return arrays and a.routes.equal(b.routes) and a.provenance == b.provenance


# What a sample holds


def test_every_sample_is_what_the_server_sent(store: ShardStore, server: FakeVllm) -> None:
    sent: list[dict[str, Any]] = []
    server.edit = sent.append
    report = gather(store, server, [*TEXT, TOKENS, CHAT], n=2, weight_version=7, concurrency=1)
    assert store.sample_ids() == sorted(f"{p.prompt_id}.{k}" for p in [*TEXT, TOKENS, CHAT] for k in range(2))
    assert (report.asked, report.present, report.written, report.failures) == (16, 0, 16, ())
    assert report.tokens == 16 * 8
    assert report.bytes == sum(path.stat().st_size for path in store.root.iterdir())
    for body, choice in zip(server.requests, sent, strict=True):
        prompt = next(p for p in [*TEXT, TOKENS, CHAT] if p.payload == body.get("prompt", body.get("messages")))
        (sample,) = (
            s for s in store if s.group_id == prompt.prompt_id and s.tokens[-8:].tolist() == choice["token_ids"]
        )
        assert sample.prompt_length + 8 == sample.num_tokens == report_tokens(body) + 8
        assert sample.routes.recorded.tolist() == [True] * (sample.num_tokens - 1) + [False]
        assert encode_vllm(hidden_rows(sample.routes)) == choice["routed_experts"]
        assert np.isnan(sample.rollout_logprobs[: sample.prompt_length]).all()
        assert np.isfinite(sample.rollout_logprobs[sample.prompt_length :]).all()
        assert sample.loss_mask.sum() == 8
        assert set(sample.weight_version[sample.loss_mask]) == {7}
        assert set(sample.weight_version[~sample.loss_mask]) == {-1}


def report_tokens(body: dict[str, Any]) -> int:
    """Prompt tokens that the fake server makes of a request."""
    prompt = body.get("prompt", body.get("messages"))
    return len(prompt) if prompt == TOKENS.payload else len(json.dumps(prompt).encode())


def hidden_rows(routes: Routes) -> np.ndarray:
    rows = np.zeros((routes.num_tokens - 1, SPEC.num_layers, SPEC.top_k), SPEC.dtype)
    rows[:, list(SPEC.moe_layers)] = routes.ids[:, :-1].transpose(1, 0, 2)
    return rows


def test_the_requests(store: ShardStore, server: FakeVllm) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, top_k=5, max_tokens=8, extra={"stop": ["x"], "min_p": 0.1})
    gather(store, server, [TEXT[0], TOKENS, CHAT], sampling=sampling, concurrency=1)
    neutral = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }  # not generation_config.json's
    ours = {"model": MODEL, "n": 1, "stream": False, "return_token_ids": True}
    asked = {"max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "stop": ["x"], "min_p": 0.1}
    common = {**neutral, **ours, **asked}
    assert server.requests == [
        {**common, "prompt": "text 0", "logprobs": 0},
        {**common, "prompt": [5, 6, 7], "logprobs": 0},
        {**common, "messages": CHAT.payload, "logprobs": True, "top_logprobs": 0},
    ]
    provenance = store.open("t.0").provenance
    assert (provenance.temperature, provenance.top_p, provenance.top_k) == (0.7, 0.9, 5)
    assert (provenance.engine, provenance.engine_version, provenance.logprobs_mode) == (
        "vllm",
        "0.30.0",
        "raw_logprobs",
    )
    assert (provenance.model, provenance.finish_reason) == (MODEL, "length")


def test_seeds_follow_from_the_sample_alone(store: ShardStore, server: FakeVllm) -> None:
    gather(store, server, TEXT[:2], n=3)
    seeds = {(body["prompt"], body["seed"]) for body in server.requests}
    assert seeds == {(p.payload, sample_seed(0, f"{p.prompt_id}.{k}")) for p in TEXT[:2] for k in range(3)}
    assert len({seed for _, seed in seeds}) == 6
    assert sample_seed(0, "p0.0") == 6154919510454488  # the same in every release
    assert all(0 <= seed < 2**53 for _, seed in seeds)
    assert sample_seed(None, "p0.0") is None


@pytest.mark.parametrize(
    "values",
    [
        *({"temperature": v} for v in (-0.1, float("nan"), float("inf"))),
        *({"top_p": v} for v in (0.0, 1.1)),
        *({"top_k": -1}, {"max_tokens": 0}, {"extra": {"n": 4}}, {"extra": {"logprobs": 5}}),
    ],
)
def test_sampling_out_of_range(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Sampling(**values)


@pytest.mark.parametrize("values", [{"n": 0}, {"concurrency": 0}])
def test_nothing_to_do(store: ShardStore, server: FakeVllm, values: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        gather(store, server, TEXT, **values)


def test_requests_in_flight_are_bounded(store: ShardStore, server: FakeVllm) -> None:
    server.delay_s = 0.05
    gather(store, server, TEXT, n=4, concurrency=5)
    assert server.most_in_flight == 5
    assert len(store) == 24


def test_progress_is_told_sample_by_sample(store: ShardStore, server: FakeVllm) -> None:
    told: list[CollectReport] = []
    report = gather(store, server, TEXT, progress=told.append)
    assert [each.written for each in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1].tokens == report.tokens == 48
    assert report.tokens_per_second > 0


# Going on where a run ended


def test_a_resumed_collection_asks_only_for_what_is_missing(tmp_path: Path, server: FakeVllm) -> None:
    whole, parts = (ShardStore(tmp_path / name, create=True) for name in ("whole", "parts"))
    gather(whole, server, TEXT, n=3)
    gather(parts, server, TEXT[3:], n=2)
    server.requests.clear()
    report = gather(parts, server, TEXT, n=3)
    assert (report.asked, report.present, report.written) == (18, 6, 12)
    assert len(server.requests) == 12
    assert all(same(parts.open(name), whole.open(name)) for name in whole.sample_ids())
    assert gather(parts, server, TEXT, n=3).written == 0
    assert len(server.requests) == 12


@pytest.mark.parametrize(
    ("name", "options", "info", "prompts"),
    [
        ("temperature", {"sampling": Sampling(max_tokens=8, temperature=0.5)}, {}, TEXT),
        ("top_p", {"sampling": Sampling(max_tokens=8, top_p=0.5)}, {}, TEXT),
        ("top_k", {"sampling": Sampling(max_tokens=8, top_k=5)}, {}, TEXT),
        ("max_tokens", {"sampling": Sampling(max_tokens=9)}, {}, TEXT),
        ("request", {"sampling": Sampling(max_tokens=8, extra={"stop": ["x"]})}, {}, TEXT),
        ("weight_version", {"weight_version": 4}, {}, TEXT),
        ("logprobs_mode", {}, {"logprobs_mode": "processed_logprobs"}, TEXT),
        ("model", {}, {"model": "another"}, TEXT),
        ("model_fingerprint", {}, {"model_fingerprint": "another"}, TEXT),
        ("prompt_digest", {}, {}, [Prompt(p.prompt_id, 0, "prompt", p.payload + "!") for p in TEXT]),
    ],
)
def test_samples_of_different_making_are_not_mixed(
    store: ShardStore, server: FakeVllm, name: str, options: dict[str, Any], info: dict[str, Any], prompts: list[Prompt]
) -> None:
    first = {} if name == "model" else {"model_fingerprint": "f00d"}
    gather(store, server, TEXT[:1], server.info(**first))
    server.requests.clear()
    with pytest.raises(StoreError, match=f"made with another {name}") as caught:
        gather(store, server, prompts, server.info(**{**first, **info}), **options)
    assert "another directory" in str(caught.value)
    assert not server.requests


def test_a_damaged_shard_is_told_before_sampling(store: ShardStore, server: FakeVllm) -> None:
    gather(store, server, TEXT[:1])
    path = store.path_of("p0.0")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(R3Error, match="not a readable shard"):
        gather(store, server, TEXT)


def test_leftovers_of_a_dead_writer_are_removed(store: ShardStore, server: FakeVllm) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    leftover = store.root / f".r3-tmp.{socket.gethostname()}.{dead.pid}.0"
    leftover.touch()
    gather(store, server, TEXT[:1])
    assert not leftover.exists()


def test_two_collectors_of_one_store_write_each_sample_once(store: ShardStore, server: FakeVllm) -> None:
    def write_first() -> None:
        with FakeVllm() as other:
            gather(store, other, TEXT[:1])

    async def answer(_: FakeVllm, __: web.Request) -> web.StreamResponse | None:
        await asyncio.to_thread(write_first)
        return None

    server.answer = answer
    report = gather(store, server, TEXT[:1])
    assert (report.asked, report.present, report.written) == (1, 1, 0)
    assert store.sample_ids() == ["p0.0"]


# Prompts and payloads that cannot be used


LONG_TEXT, LONG_TOKENS = Prompt("long", 3, "prompt", "x" * 300), Prompt("long", 3, "prompt_token_ids", [1] * 249)


@pytest.mark.parametrize("long", [LONG_TEXT, LONG_TOKENS])
def test_a_prompt_that_is_too_long_stops_after_what_is_in_flight(
    store: ShardStore, server: FakeVllm, long: Prompt
) -> None:
    async def refuse_first(_: FakeVllm, request: web.Request) -> None:
        await asyncio.sleep(0 if (await request.json())["prompt"] == long.payload else 0.5)

    server.answer = refuse_first
    with pytest.raises(PromptError) as caught:
        gather(store, server, [*TEXT[:2], long, *TEXT[2:]], n=2, concurrency=5)
    message = str(caught.value)
    assert "prompt 'long' (line 3)" in message
    assert "256" in message
    assert "249" in message or "302" in message
    assert "max_tokens" in message
    assert store.sample_ids() == ["p0.0", "p0.1", "p1.0", "p1.1"]
    assert "4 samples of this run are written and complete; 10 are missing" in message


@pytest.mark.parametrize("long", [LONG_TEXT, LONG_TOKENS])
def test_a_prompt_that_is_too_long_can_be_skipped(store: ShardStore, server: FakeVllm, long: Prompt) -> None:
    report = gather(store, server, [*TEXT[:2], long, *TEXT[2:]], n=2, concurrency=1, on_bad_prompt="skip")
    assert (report.asked, report.written) == (14, 12)
    assert [failure.sample_id for failure in report.failures] == ["long.0", "long.1"]
    assert "line 3" in str(report.failures[0].error)
    # Refused once, not once a sample; of token ids the length is known without asking.
    assert sum(body["prompt"] == long.payload for body in server.requests) == (long.kind == "prompt")


def test_an_id_that_is_too_long_for_a_file(store: ShardStore, server: FakeVllm) -> None:
    with pytest.raises(PromptError, match="too long for a file name") as caught:
        gather(store, server, [*TEXT, Prompt("ä" * 60, 7, "prompt", "x")])
    assert "line 7" in str(caught.value)
    assert not server.requests


def test_the_servers_own_words_are_in_the_error(store: ShardStore, server: FakeVllm) -> None:
    server.answer = status(400, times=1)
    with pytest.raises(PromptError, match="refuses this prompt: busy"):
        gather(store, server, TEXT[:1])
    server.answer = status(404, times=1)
    with pytest.raises(EngineError, match="HTTP 404: busy"):
        gather(store, server, TEXT[:1])
    assert "maximum context length" in too_long(1, 2, 3)  # the words that the remedy for long prompts goes by


def cut(choice: dict[str, Any]) -> None:
    choice["routed_experts"] = choice["routed_experts"][:-3]


def with_object_dtype(choice: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], object), allow_pickle=True)
    choice["routed_experts"] = pybase64.b64encode_as_string(buffer.getvalue())


def zeros(choice: dict[str, Any]) -> None:
    choice["routed_experts"] = encode_vllm(np.zeros((15, SPEC.num_layers, SPEC.top_k), np.uint8))


def of_another_sample(choice: dict[str, Any]) -> None:
    choice["routed_experts"] = encode_vllm(random_rows(np.random.default_rng(0), SPEC, 40, hidden=True))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (cut, "not valid base64"),
        (with_object_dtype, "dtype that no engine sends"),
        (zeros, "every expert id is 0"),
        (of_another_sample, "rows do not fit the tokens"),
        (lambda choice: choice.update(routed_experts=None), "no routes (null)"),
    ],
)
def test_routes_that_cannot_be_used(store: ShardStore, server: FakeVllm, edit: Any, said: str) -> None:
    def edit_one(choice: dict[str, Any]) -> None:
        if len(server.requests) == 2:
            edit(choice)

    server.edit = edit_one
    with pytest.raises(WireError) as caught:
        gather(store, server, TEXT, concurrency=1)
    assert said in str(caught.value)
    assert "sample 'p1.0' of prompt 'p1' (line 2)" in str(caught.value)
    assert store.sample_ids() == ["p0.0"]
    server.requests.clear()
    report = gather(store, server, TEXT, concurrency=1, on_bad_prompt="skip")
    assert [failure.sample_id for failure in report.failures] == ["p2.0"]  # the second request of this run
    assert len(store) == 5


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda choice: choice.update(logprobs=None), "no logprobs"),
        (lambda choice: choice["logprobs"]["token_logprobs"].pop(), "expected 8 finite log-probs, got 7 finite of 7"),
        (lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, None), "got 7 finite of 8"),
        (lambda choice: choice.pop("token_ids"), "no token_ids"),
        (lambda choice: choice.update(token_ids=[1.5] * 8), "not numbers"),
        (lambda choice: choice.pop("prompt_token_ids"), "no prompt_token_ids"),
    ],
)
def test_responses_that_are_not_whole(store: ShardStore, server: FakeVllm, edit: Any, said: str) -> None:
    server.edit = edit
    with pytest.raises(EngineError) as caught:
        gather(store, server, TEXT)
    assert said in str(caught.value)
    assert len(store) == 0


# Servers that fail


@pytest.mark.parametrize(
    "fault", [*(status(code, times=3) for code in (429, 500, 502, 503, 504)), cut_in_the_middle(3)]
)
def test_failures_that_pass_are_outlived(store: ShardStore, server: FakeVllm, fault: Any) -> None:
    server.answer = fault
    assert gather(store, server, TEXT).written == 6
    assert len(server.requests) == 9


def test_an_aborted_generation_is_asked_again(store: ShardStore, server: FakeVllm) -> None:
    def abort_first(choice: dict[str, Any]) -> None:
        if len(server.requests) == 1:
            choice["finish_reason"] = "abort"

    server.edit = abort_first
    gather(store, server, TEXT[:1])
    assert len(server.requests) == 2
    assert store.open("p0.0").provenance.finish_reason == "length"


def test_a_server_that_only_fails_is_given_up(store: ShardStore, server: FakeVllm) -> None:
    server.answer = status(503, times=-1)
    with pytest.raises(EngineError, match="no answer after 5 tries; the last: HTTP 503: busy") as caught:
        gather(store, server, TEXT, concurrency=2)
    assert 5 <= len(server.requests) <= 10
    assert server.url in str(caught.value)
    assert "0 samples of this run are written and complete, 2 that were in flight are lost" in str(caught.value)


def test_a_server_that_is_gone_or_too_slow_is_given_up(store: ShardStore) -> None:
    with FakeVllm(delay_s=5) as server:
        with pytest.raises(EngineError, match="the last: timed out"):
            gather(store, server, TEXT, timeout_s=0.05)
        server.stop()
        with pytest.raises(EngineError, match="the last: ClientConnectorError"):
            gather(store, server, TEXT)


def test_retry_after_is_honoured(store: ShardStore, server: FakeVllm) -> None:
    server.answer = status(429, times=1, **{"Retry-After": "1"})
    begin = time.monotonic()
    assert gather(store, server, TEXT).written == 6
    assert 1.0 <= time.monotonic() - begin < 3.0


def test_when_one_of_two_servers_dies_the_other_takes_over(store: ShardStore, server: FakeVllm) -> None:
    server.delay_s = 0.02
    with FakeVllm(delay_s=0.02) as second:

        async def die(fake: FakeVllm, request: web.Request) -> web.StreamResponse | None:
            if len(fake.requests) >= 5:
                for site in list(fake._runner.sites):
                    await site.stop()
                assert request.transport is not None
                request.transport.abort()
            return None

        second.answer = die
        info = server.info(urls=(server.url, second.url))
        report = gather(store, server, TEXT, info, n=8, concurrency=8)
    assert report.written == len(store) == 48
    assert 5 <= len(second.requests) < 24
    assert len(server.requests) > 24


def test_work_is_shared_by_load(store: ShardStore, server: FakeVllm) -> None:
    server.delay_s = 0.01
    with FakeVllm(delay_s=0.05) as slow:
        gather(store, server, TEXT, server.info(urls=(slow.url, server.url)), n=10, concurrency=6)
        assert 4 <= len(slow.requests) < len(server.requests) / 2
        assert max(slow.most_in_flight, server.most_in_flight) <= 4


# Disks, rights and kills


def script(code: str, *arguments: object) -> list[str]:
    head = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from test_collector import *\n"
    return [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)]


def in_subprocess(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(script(code, *arguments), capture_output=True, text=True, timeout=60, **options)


@contextlib.contextmanager
def running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = script(code, *arguments)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_full_disk_stops_the_run_at_once(store: ShardStore) -> None:
    # RLIMIT_FSIZE makes the third write fail as ENOSPC would: the first two samples are short.
    code = """
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        prompts = [Prompt(f"p{i}", i + 1, "prompt_token_ids", [1] * (20 if i < 2 else 8000)) for i in range(6)]
        with FakeVllm() as server:
            server.models[0]["max_model_len"] = 10000
            try:
                gather(ShardStore(sys.argv[1]), server, prompts, server.info(max_model_len=None), concurrency=1)
            except StoreError as error:
                print(error)
                print(len(server.requests))
    """
    done = in_subprocess(code, store.root)
    assert "(File too large)" in done.stdout, done.stderr
    assert (
        "2 samples of this run are written and complete, 1 that were in flight are lost; 4 are missing" in done.stdout
    )
    assert done.stdout.splitlines()[-1] == "3"
    assert sorted(os.listdir(store.root)) == ["p0.0.safetensors", "p1.0.safetensors"]
    assert all(sample.num_tokens == 28 for sample in store)


class FailingStore(ShardStore):
    """The sample p0.0 cannot be written; the others take a while."""

    def add(self, sample: RolloutSample, *, fsync: bool = True) -> Path:
        if sample.sample_id == "p0.0":
            time.sleep(0.1)
            raise StoreError("no space", where="here")
        time.sleep(0.3)
        return super().add(sample, fsync=fsync)


def test_a_failed_write_ends_requests_in_flight_but_not_writes(store: ShardStore, server: FakeVllm) -> None:
    async def later_ones_take_long(fake: FakeVllm, _: web.Request) -> None:
        await asyncio.sleep(0 if len(fake.requests) <= 3 else 30)

    server.answer = later_ones_take_long
    begin = time.monotonic()
    with pytest.raises(StoreError, match="no space") as caught:
        gather(FailingStore(store.root), server, TEXT, n=10, concurrency=5)
    assert time.monotonic() - begin < 5
    assert len(server.requests) == 5
    assert store.sample_ids() == ["p0.1", "p0.2"]
    assert "2 samples of this run are written and complete, 3 that were in flight are lost; 58 are missing" in str(
        caught.value
    )


def test_an_api_key_is_sent(store: ShardStore, server: FakeVllm) -> None:
    server.api_key = "secret"
    assert gather(store, server, TEXT, api_key="secret").written == 6


def without_right_to_override() -> None:
    """In the child before exec: root without CAP_DAC_OVERRIDE (1), for which file modes hold as for anyone."""
    assert ctypes.CDLL(None).prctl(24, 1, 0, 0, 0) in (0, -1)  # PR_CAPBSET_DROP; -1 if we are not root anyway


def test_a_store_without_write_permission_is_told_before_sampling(store: ShardStore) -> None:
    store.root.chmod(0o555)
    code = """
        with FakeVllm() as server:
            try:
                gather(ShardStore(sys.argv[1]), server, TEXT)
            except StoreError as error:
                print(error)
                print(len(server.requests))
    """
    done = in_subprocess(code, store.root, preexec_fn=without_right_to_override)
    store.root.chmod(0o755)
    assert "cannot write to this store (Permission denied)" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "0"


def test_ctrl_c_leaves_whole_shards_only(store: ShardStore, server: FakeVllm) -> None:
    server.delay_s = 0.02
    code = """
        import signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
        info = EngineInfo(urls=(sys.argv[2],), spec=SPEC, model=MODEL, max_model_len=256)
        told = lambda report: report.written == 4 and print("four", flush=True)
        try:
            gather(ShardStore(sys.argv[1]), None, TEXT, info, n=100, concurrency=4, progress=told)
        except KeyboardInterrupt:
            raise SystemExit(130)
    """
    with running(code, store.root, server.url) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "four\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    assert 4 <= len(store) < 600
    assert all(name.endswith(".safetensors") for name in os.listdir(store.root))
    assert all(sample.num_tokens > 8 for sample in store)  # opens and verifies every one
    deadline = time.monotonic() + 5
    while server.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.in_flight == 0  # requests in flight were cancelled


def fork_on_demand(root: str, url: str, n: int) -> None:
    """For each line read: fork a collector, print its process id, wait for it. Imports are paid for once."""
    info = EngineInfo(urls=(url,), spec=SPEC, model=MODEL, engine_version="0.30.0", max_model_len=256)
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            gather(ShardStore(root), None, TEXT, info, n=n, concurrency=4, fsync=True)
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


@pytest.mark.engine
def test_fifty_kills_leave_whole_shards_and_a_resume_completes_them(store: ShardStore, server: FakeVllm) -> None:
    """No engine is needed: it takes longer than the tests without one may."""
    n, kills = 300, 50
    server.delay_s = 0.01
    rng = random.Random(0)
    known: dict[str, bytes] = {}
    with running("fork_on_demand(sys.argv[1], sys.argv[2], int(sys.argv[3]))", store.root, server.url, n) as forker:
        assert forker.stdin is not None
        assert forker.stdout is not None
        working = 0
        for number in range(kills):
            before = len(server.requests)
            forker.stdin.write("go\n")
            forker.stdin.flush()
            pid = int(forker.stdout.readline())
            while (
                number % 2 and len(server.requests) == before
            ):  # every second one is killed at work, however busy the machine
                time.sleep(0.001)
            time.sleep(rng.uniform(0.0, 0.15))
            os.kill(pid, signal.SIGKILL)
            assert forker.stdout.readline() == f"{-signal.SIGKILL}\n", "done before it was killed: ask for more samples"
            working += len(server.requests) > before
            assert [sample.sample_id for sample in store] == store.sample_ids()  # opens and verifies every one
            known.update(
                {path.name: path.read_bytes() for path in store.root.glob("*.safetensors") if path.name not in known}
            )
        assert working >= kills / 2
        forker.stdin.close()
    assert kills < len(known) < 6 * n
    report = gather(store, server, TEXT, server.info(logprobs_mode=""), n=n, concurrency=16)
    assert report.present == len(known)
    assert report.present + report.written == len(store) == 6 * n
    assert all((store.root / name).read_bytes() == content for name, content in known.items())  # none written twice
    assert sorted(os.listdir(store.root)) == sorted(f"p{i}.{k}.safetensors" for i in range(6) for k in range(n))
    assert Counter(sample.group_id for sample in store) == {f"p{i}": n for i in range(6)}


# The real engine


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> list[Prompt]:
    return read_prompts(tiny_model / "prompts.jsonl")


@pytest.mark.engine
def test_a_real_rollout(store: ShardStore, engine: EngineInfo, prompts: list[Prompt]) -> None:
    asked = [*prompts[:6], Prompt("ids", 0, "prompt_token_ids", list(range(65, 95))), CHAT]
    report = collect_sync(asked, store, engine, n=4, sampling=Sampling(max_tokens=32, seed=1), weight_version=2)
    assert (report.written, report.failures) == (32, ())
    assert len(store) == 32
    for sample in store:
        assert sample.num_tokens == sample.prompt_length + sample.loss_mask.sum()
        assert sample.routes.num_recorded == sample.num_tokens - 1
        assert sample.provenance.model_fingerprint == engine.model_fingerprint
        assert sample.provenance.finish_reason == ("length" if sample.loss_mask.sum() == 32 else "stop")
        assert (sample.rollout_logprobs[sample.prompt_length :] <= 0).all()
    for prompt in asked:  # one prompt, one routing of it, computed once and kept by the prefix cache
        group = [sample for sample in store if sample.group_id == prompt.prompt_id]
        rows = group[0].prompt_length - 1
        assert all(np.array_equal(s.tokens[:rows], group[0].tokens[:rows]) for s in group)
        agree = [np.mean(s.routes.ids[:, :rows] == group[0].routes.ids[:, :rows]) for s in group]
        assert min(agree) > 0.9
        assert len({s.token_digest for s in group}) > 1
    assert bytes(store.open("ids.0").tokens[:30].tolist()) == bytes(range(65, 95))


@pytest.mark.engine
def test_real_samples_are_drawn_again_by_their_seed(tmp_path: Path, engine: EngineInfo, prompts: list[Prompt]) -> None:
    one, two = (ShardStore(tmp_path / name, create=True) for name in ("one", "two"))
    sampling = Sampling(max_tokens=16, seed=3)
    collect_sync(prompts[:4], one, engine, sampling=sampling, concurrency=1)
    collect_sync(prompts[:2], two, engine, sampling=sampling, concurrency=1)
    collect_sync(prompts[:4], two, engine, sampling=sampling, concurrency=1)
    agree = [np.array_equal(one.open(name).tokens, two.open(name).tokens) for name in one.sample_ids()]
    assert sum(agree) >= 3  # bfloat16 rounding of a cached prompt may tip one


@pytest.mark.engine
def test_a_real_stop_string(store: ShardStore, engine: EngineInfo, prompts: list[Prompt]) -> None:
    sampling = Sampling(max_tokens=64, seed=0, extra={"stop": ["\n"]})
    collect_sync(prompts[:8], store, engine, sampling=sampling)
    stopped = [sample for sample in store if sample.provenance.finish_reason == "stop"]
    assert stopped
    for sample in stopped:
        assert sample.routes.num_recorded == sample.num_tokens - 1
        assert b"\n" in bytes(t for t in sample.tokens[sample.prompt_length :].tolist() if t < 256)


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["prompt", "messages"])
def test_a_real_prompt_that_is_too_long(store: ShardStore, engine: EngineInfo, kind: Any) -> None:
    text = "x" * 5000
    payload = text if kind == "prompt" else [{"role": "user", "content": text}]
    with pytest.raises(PromptError, match="maximum context length") as caught:
        collect_sync([Prompt("long", 9, kind, payload)], store, engine, sampling=Sampling(max_tokens=8))
    assert "line 9" in str(caught.value)
    assert "--max-model-len" in str(caught.value)
    report = collect_sync(
        [Prompt("long", 9, kind, payload), TOKENS], store, engine, sampling=Sampling(max_tokens=8), on_bad_prompt="skip"
    )
    assert (report.written, len(report.failures)) == (1, 1)
