"""Rollout workers and the pool on a real Ray cluster of three nodes: nothing is lost, nothing is made twice, whatever dies.

The engines are stand-ins that answer with real wire bytes and fail as they are told (tests/ray_engines.py); the same with real
vLLM, and with workers and nodes that are killed, is in test_ray_vllm.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from fake_vllm import MODEL, FakeVllm
from ray_cluster import options, three_nodes, workers_alive
from ray_engines import journal
from s3 import CREDENTIALS, Server, bucket, server, server_process  # noqa: F401
from typer.testing import CliRunner

from r3 import ShardStore, inspection
from r3.cli import app
from r3.errors import ConfigError, EngineError, PromptError, StoreError, WireError
from r3.fingerprint import model_fingerprint
from r3.rollout.collector import sample_seed
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Sampling
from r3.rollout.ray import Engine, RolloutPool, RolloutWorker
from r3.rollout.ray.sharing import probe_in
from r3.shard import files

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parent.parent
SAMPLING = Sampling(max_tokens=16, seed=1)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with three_nodes() as cluster:
        yield cluster


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    path.mkdir()
    return path


def prompts_of(count: int, length: int = 8) -> list[Prompt]:
    return [Prompt(f"p{i}", 0, "prompt_token_ids", [i % 200, *range(length - 1)]) for i in range(count)]


def stand_in(notes: Path, **changes: Any) -> Engine:
    return Engine.custom("ray_engines:open_engine", journal=str(notes), **changes)


def pool_of(engine: Engine | list[Engine], store: Path, **changes: Any) -> RolloutPool:
    values = {"workers": 2, "slots": 4, "sampling": SAMPLING, "ray_options": options(max_restarts=-1)}
    return RolloutPool(engine, store, **{**values, **changes})


def test_each_sample_once_then_resumed_with_the_same_seeds(tmp_path: Path, notes: Path) -> None:
    asked = prompts_of(20)
    with pool_of(stand_in(notes), tmp_path / "a") as pool:
        run = pool.run(asked, n=2)
        samples = list(run)
        assert sorted(sample.sample_id for sample in samples) == sorted(f"p{i}.{k}" for i in range(20) for k in (0, 1))
        assert all(Path(sample.key).stat().st_size == sample.bytes for sample in samples)
        assert {sample.worker for sample in samples} <= {"rollout-0", "rollout-1"}
        report = run.report()
        assert (report.asked, report.present, report.written, report.failures) == (40, 0, 40, ())
        assert (report.prompt_tokens, report.tokens) == (40 * 8, 40 * 16)
        assert report.bytes == sum(sample.bytes for sample in samples)
        for name in ("p3.0", "p7.1"):
            os.unlink(pool.store.path_of(name))
        again = list(pool.run(asked, n=2))
        assert sorted(sample.sample_id for sample in again if sample.fresh) == ["p3.0", "p7.1"]
        assert len(again) == 40
    with pool_of(stand_in(notes), tmp_path / "b", workers=1, slots=1) as pool:

        async def through() -> list[str]:
            return [sample.sample_id async for sample in pool.run(asked, n=2)]

        assert len(asyncio.run(through())) == 40
    for one, other in zip(ShardStore(tmp_path / "a"), ShardStore(tmp_path / "b"), strict=True):
        assert one.sample_id == other.sample_id
        assert one.routes.equal(other.routes)
        assert one.tokens.tolist() == other.tokens.tolist()
    with (
        pool_of(stand_in(notes), tmp_path / "a", sampling=Sampling(max_tokens=16, seed=1, temperature=0.5)) as pool,
        pytest.raises(StoreError, match="made with another temperature"),
    ):
        pool.run(asked, n=2)
    assert inspection.verify(tmp_path / "a").bad == {}


def test_what_cannot_be_sampled_is_reported_with_its_causes_and_the_rest_goes_on(tmp_path: Path, notes: Path) -> None:
    engine = stand_in(notes, deadly=["p7"], sick=["p9"], bad=["p11"], refused=["p13"], delay_s=0.02)
    with pool_of(engine, tmp_path / "store", workers=3) as pool:
        run = pool.run(prompts_of(60), n=2)
        made = Counter(sample.sample_id for sample in run)
        given_up = {f"p{i}.{k}" for i in (7, 9, 11, 13) for k in (0, 1)}
        assert set(made) == {f"p{i}.{k}" for i in range(60) for k in (0, 1)} - given_up
        assert set(made.values()) == {1}
        errors = {failure.sample_id: failure.error for failure in run.failures}
        assert set(errors) == given_up
        assert pool.lost == []
        assert (
            4 <= pool.restarts <= 8
        )  # p7 at most twice with others beside it, then alone; not again for its second sample
    assert isinstance(errors["p7.0"], EngineError)
    assert "workers that are at it die, also at nothing else" in str(errors["p7.0"])
    assert errors["p7.0"].got.count("the worker died while it was at this") >= 2  # workers differ, so do the causes
    assert isinstance(errors["p9.1"], EngineError)
    assert "prompt 'p9': the engine has failed" in errors["p9.1"].got
    assert isinstance(errors["p11.0"], WireError)
    assert "every expert id is 0" in str(errors["p11.0"])
    assert isinstance(errors["p13.0"], PromptError)
    requests = Counter(name for event, name, _pid in journal(notes) if event == "asked")
    assert 4 <= requests["p9"] <= 8  # fewer than 2 x 4 where it was at a worker that p7 killed
    assert 4 <= requests["p11"] <= 8
    assert requests["p13"] <= 2
    assert requests["p7"] <= 8


def test_a_slow_request_is_asked_again_elsewhere_and_counts_once(tmp_path: Path, notes: Path) -> None:
    engine = stand_in(notes, slow={"p5": 60.0}, delay_s=0.02)
    with pool_of(engine, tmp_path / "store", straggler_s=1.0) as pool:
        run = pool.run(prompts_of(10))
        samples = Counter(sample.sample_id for sample in run)
        assert samples == Counter(f"p{i}.0" for i in range(10))
        assert run.report().seconds < 30
        assert run.retries == 1
    assert [event for event, name, _ in journal(notes) if name == "p5"].count(
        "answered"
    ) == 1  # the other was cancelled


def test_workers_that_do_not_come_up(tmp_path: Path, notes: Path) -> None:
    broken = stand_in(notes, die_on_start=True)
    with pool_of([stand_in(notes), broken], tmp_path / "a") as pool:
        assert len(list(pool.run(prompts_of(10)))) == 10
        deadline = time.monotonic() + 20
        while not pool.lost and time.monotonic() < deadline:
            time.sleep(0.05)
        (lost,) = pool.lost
        assert lost.worker == "rollout-1"
        assert "there is no such accelerator" in str(lost.error)
        assert isinstance(lost.error, EngineError)
        (name,) = pool.add_workers(1, ray_options={"num_gpus": 64, "num_cpus": 0})  # waits for ever
        assert pool.workers[name] == ""
        assert len(list(pool.run(prompts_of(20)))) == 20
    other = stand_in(notes, info={"model": "another"})
    with pool_of([stand_in(notes), other], tmp_path / "b", start_timeout_s=20) as pool:
        assert len(list(pool.run(prompts_of(10)))) == 10
        while not pool.lost:
            time.sleep(0.05)
        assert "the workers differ in model" in str(pool.lost[0].error)
    with pool_of(broken, tmp_path / "c") as pool, pytest.raises(EngineError, match="no worker is left") as caught:
        pool.run(prompts_of(10))
    assert str(caught.value).count("there is no such accelerator") == 2
    with (
        pool_of(stand_in(notes), tmp_path / "d", workers=1, start_timeout_s=1.0, ray_options={"num_gpus": 64}) as pool,
        pytest.raises(EngineError, match="does not come up"),
    ):
        pool.run(prompts_of(1))
    assert [path for name in "cd" for path in (tmp_path / name).iterdir()] == []


def test_a_node_that_does_not_see_the_store_is_refused_by_name(tmp_path: Path, notes: Path) -> None:
    with probe_in(str(tmp_path)) as probe:
        (tmp_path / "elsewhere").mkdir()
        for path, said in ((probe.path, None), (f"{tmp_path}/elsewhere/{Path(probe.path).name}", "no such shard")):
            worker = ray.remote(RolloutWorker).options(**options(2)).remote(stand_in(notes), str(tmp_path), SAMPLING)
            call = worker.start.remote(type(probe)(path, probe.word))
            if said is None:
                ray.get(call)
                continue
            with pytest.raises(StoreError, match=said) as caught:
                ray.get(call)
            node = next(n for n in ray.nodes() if "node2" in n["Resources"])["NodeID"]
            assert "not a shared file system" in str(caught.value)
            assert node[:8] in str(caught.value)
            ray.kill(worker)
    assert not Path(probe.path).exists()


def test_only_keys_go_through_ray(tmp_path: Path, notes: Path) -> None:
    """By Ray's own serializer: what a sample costs, beside its prompt, when its shard is 4 MB."""
    sampling = Sampling(max_tokens=350_000, seed=1)
    worker = ray.remote(RolloutWorker).options(**options()).remote(stand_in(notes), str(tmp_path / "s"), sampling)
    ShardStore(tmp_path / "s", create=True)
    ray.get(worker.start.remote())
    (prompt,) = prompts_of(1)
    outcome = ray.get(worker.sample.remote(prompt, "p0.0", -1))
    context = ray._private.worker.global_worker.get_serialization_context()
    sent, came = (context.serialize(value).total_bytes for value in ((prompt, "p0.0", -1), outcome))
    empty = context.serialize((Prompt("p0", 0, "prompt_token_ids", []), "p0.0", -1)).total_bytes
    assert outcome.sample.bytes > 3_500_000
    assert came < 1024
    assert empty < 512
    assert sent < empty + 16 * len(prompt.payload)
    print(f"bytes through Ray per sample: {empty} + prompt, {came} back, shard {outcome.sample.bytes}")
    ray.kill(worker)


def test_workers_come_and_go_in_the_middle_of_a_run(tmp_path: Path, notes: Path) -> None:
    with pool_of(stand_in(notes, delay_s=0.05), tmp_path / "store", workers=1, slots=2) as pool:
        run = pool.run(prompts_of(150))
        seen = [next(run) for _ in range(5)]
        (added,) = pool.add_workers(1, ray_options=options(1))
        while sum(sample.worker == added for sample in seen) < 10:
            seen.append(next(run))
        pool.remove_worker("rollout-0")
        assert list(pool.workers) == [added]
        rest = list(run)
        assert {sample.worker for sample in rest[10:]} == {added}
        assert Counter(sample.sample_id for sample in [*seen, *rest]) == Counter(f"p{i}.0" for i in range(150))
        with pytest.raises(ConfigError, match="no such worker"):
            pool.remove_worker("rollout-0")


def test_a_slow_consumer_stops_the_sampling(tmp_path: Path, notes: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Samples of 1 MB, a budget of 12: whatever the consumer does, no more bytes are held than that, and no more are sampled."""
    sampling = Sampling(max_tokens=35_000, seed=1)
    with pool_of(stand_in(notes), tmp_path / "store", sampling=sampling, budget_mb=12, slots=8) as pool:
        run = pool.run(prompts_of(60))
        assert re.search("budget_mb=12 admits 14 requests at a time of 16", caplog.text)
        held, ahead = [], []
        taken = 0
        for sample in run:
            taken += 1
            if taken < 15:
                time.sleep(0.15)
            held.append(run._flow.held)
            ahead.append(sum(event == "asked" for event, _, _ in journal(notes)) - taken)
            assert sample.bytes < 1.1e6
        assert taken == 60
        assert 9e6 < max(held) <= 12e6
        assert 12 < max(ahead) * sample.bytes / 1e6 + 8 < 20
        assert run._flow.held == 0 or run._flow.count == 1  # the last one is freed when the next is asked for


def test_a_run_that_was_ended_says_so_and_a_consumer_that_is_cancelled_loses_nothing(
    tmp_path: Path, notes: Path
) -> None:
    asked = prompts_of(30)
    with pool_of(stand_in(notes, delay_s=0.3), tmp_path / "store") as pool:
        first = pool.run(asked)
        next(first)  # and the loop is left
        second = pool.run(asked)
        with pytest.raises(EngineError, match="another run of this pool was begun"):
            list(first)

        async def impatient() -> tuple[list[str], int]:
            names, timeouts = [], 0
            while True:
                try:
                    names.append((await asyncio.wait_for(anext(second), 0.1)).sample_id)
                except TimeoutError:
                    timeouts += 1
                except StopAsyncIteration:
                    return names, timeouts

        names, timeouts = asyncio.run(asyncio.wait_for(impatient(), 60))
        assert timeouts > 0
        assert sorted(names) == sorted(f"p{i}.0" for i in range(30))
        with pytest.raises(PromptError, match="the id is taken"):
            pool.run([asked[0], Prompt("p0", 7, "prompt_token_ids", [1, 2])])
        closed = pool.run(prompts_of(60))
        closed.close()
        list(closed)
        third = pool.run(prompts_of(60)[30:])
        next(third)
    with pytest.raises(EngineError, match="its pool was left"):
        list(third)
    third.close()


def test_new_weights_are_named_in_every_sample_also_by_a_worker_that_starts_again(tmp_path: Path, notes: Path) -> None:
    weights = tmp_path / "step-2"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    (weights / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    engine = stand_in(notes, info={"model_fingerprint": "first"})
    with pool_of(engine, tmp_path / "store", workers=1, weight_version=1) as pool:

        def sampled(count: int) -> set[tuple[int, str]]:
            samples = [sample for sample in pool.run(prompts_of(count)) if sample.fresh]
            shards = [pool.store.open(sample.sample_id) for sample in samples]
            assert [int(s.weight_version[-1]) for s in shards] == [sample.weight_version for sample in samples]
            return {(int(s.weight_version[-1]), s.provenance.model_fingerprint) for s in shards}

        assert sampled(4) == {(1, "first")}
        for i in range(4):
            pool.store.discard(f"p{i}.0")  # consumed
        pool.update_weights(weights, 2)
        second = {(2, model_fingerprint(weights))}
        assert sampled(4) == second
        (worker,) = workers_alive()
        os.kill(worker, signal.SIGKILL)
        assert sampled(8) == second
        assert (pool.lost, pool.restarts) == ([], 1)
        assert pool.add_workers(1) == ["rollout-1"]
        while not all(pool.workers.values()):
            time.sleep(0.05)
        assert sampled(24) == second
        assert pool.lost == []
    loaded = [(name, pid) for event, name, pid in journal(notes) if event == "loaded"]
    assert {name for name, _ in loaded} == {str(weights)}
    assert len({pid for _, pid in loaded}) == 3  # the first, its successor, and the one that came later


def test_a_worker_that_does_not_take_new_weights_in_time_is_started_again_with_them(
    tmp_path: Path, notes: Path
) -> None:
    stuck = tmp_path / "stuck"
    stuck.touch()
    with pool_of([stand_in(notes), stand_in(notes, stuck=str(stuck))], tmp_path / "store", weight_version=1) as pool:
        while not all(pool.workers.values()):
            time.sleep(0.05)
        pool._start_timeout_s = 0.5  # of the update alone
        with pytest.raises(EngineError, match="1 of 2 workers did not take the weights") as caught:
            pool.update_weights(tmp_path, 2)
        assert "rollout-1" in caught.value.got
        assert "no answer" in caught.value.got
        assert {sample.weight_version for sample in pool.run(prompts_of(8))} == {2}
        stuck.unlink()
        while not all(pool.workers.values()):
            time.sleep(0.05)
        assert {sample.weight_version for sample in pool.run(prompts_of(40)) if sample.fresh} == {2}
        pool.remove_worker("rollout-0")
        stuck.touch()
        with pytest.raises(EngineError, match="1 of 1 workers"):
            pool.update_weights(tmp_path, 3)
        stuck.unlink()
        assert {sample.weight_version for sample in pool.run(prompts_of(48)) if sample.fresh} == {
            2
        }  # the old ones stay
        assert pool.lost == []


def test_a_bucket(notes: Path, server: Server, bucket: str) -> None:  # noqa: F811
    """Workers write to an object store, which refuses one upload, does another and does not say so, and at last denies all."""
    environment = {name: os.environ[name] for name in (*CREDENTIALS, "AWS_ENDPOINT_URL", "AWS_MAX_ATTEMPTS")}
    given = options(max_restarts=-1, runtime_env={"env_vars": environment})
    with pool_of(stand_in(notes), f"{bucket}/run", ray_options=given, tries=2) as pool:
        pool.engine()
        server.fault("InternalError", method="PUT", match="p3.0")
        server.fault("lost", method="PUT", match="p5.0")
        samples = list(pool.run(prompts_of(12)))
        assert sorted(sample.key for sample in samples) == sorted(pool.store.key_of(f"p{i}.0") for i in range(12))
        assert all(sample.key.startswith(f"{bucket}/run/") for sample in samples)
        assert inspection.verify(f"{bucket}/run").bad == {}
        pool.store.discard("p4.0")
        assert sorted(sample.prompt_id for sample in pool.run(prompts_of(14)) if sample.fresh) == ["p12", "p13", "p4"]
        server.fault("AccessDenied", method="PUT", match="/run/", times=1000)
        with pytest.raises(StoreError, match="AccessDenied"):
            list(pool.run(prompts_of(20)))
        assert pool.lost == []
    assert len(ShardStore(f"{bucket}/run")) == 14


def require_nothing_left(store: Path) -> None:
    """No worker lives, and the store holds whole shards alone."""
    deadline = time.monotonic() + 10
    while workers_alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_alive() == []
    assert inspection.verify(store).bad == {}
    assert not [path for path in store.iterdir() if path.name.startswith(files.TEMPORARY)]


def test_leaving_ends_everything_and_leaves_nothing_half(tmp_path: Path, notes: Path) -> None:
    with pool_of(stand_in(notes, delay_s=0.1), tmp_path / "store") as pool:
        run = pool.run(prompts_of(100))
        for _ in range(10):
            next(run)
        assert len(workers_alive()) >= 2
    require_nothing_left(tmp_path / "store")
    assert sum(event == "closed" for event, _, _ in journal(notes)) == 2  # engines were closed, not only killed
    with pool_of(stand_in(notes), tmp_path / "store") as pool:
        run = pool.run(prompts_of(100))
        assert len(list(run)) == 100
        assert run.report().present >= 10


def test_versions_that_somebody_else_changes_are_never_mixed(tmp_path: Path, notes: Path) -> None:
    published = tmp_path / "version"
    published.write_text("7")
    engine = stand_in(notes, versions=str(published), delay_s=0.3)
    with pool_of(engine, tmp_path / "store", workers=1, slots=8) as pool:
        run = pool.run(prompts_of(24))
        samples = [next(run)]
        time.sleep(0.15)  # the next eight requests are in the middle
        published.write_text("8")
        samples += list(run)
        assert len(samples) == 24
        assert {sample.weight_version for sample in samples} == {7, 8}
        assert run.retries >= 1
    answered = Counter(name for event, name, _ in journal(notes) if event == "answered")
    assert sum(answered.values()) > 24  # those in whose time it changed were made again
    store = ShardStore(tmp_path / "store")
    for sample in samples:
        assert set(store.open(sample.sample_id).weight_version.tolist()) - {-1} == {sample.weight_version}


def test_metrics_at_the_real_endpoints(tmp_path: Path, notes: Path) -> None:
    engine = stand_in(notes, bad=["p3"], sick=["p4"])
    with pool_of(engine, tmp_path / "store", name="scraped", tries=2, budget_mb=50) as pool:
        run = pool.run(prompts_of(30))
        samples = list(run)
        expected = {
            "ray_r3_rollout_samples_total": 28.0,
            "ray_r3_rollout_tokens_total": 28.0 * 16,
            "ray_r3_rollout_bytes_total": float(sum(sample.bytes for sample in samples)),
            "ray_r3_rollout_engine_seconds_count": 28.0,
            "ray_r3_rollout_write_seconds_count": 28.0,
            "ray_r3_rollout_rejected_total": 4.0,
            "ray_r3_rollout_workers": 2.0,
            "ray_r3_rollout_queue_depth": 0.0,
        }
        deadline = time.monotonic() + 40
        while (found := scraped("scraped")) != {**found, **expected} and time.monotonic() < deadline:
            time.sleep(0.5)
    assert {name: found.get(name) for name in expected} == expected
    text = metrics_text()
    assert re.search(r'ray_r3_rollout_rejected_total\{[^}]*cause="zeros"', text)
    assert re.search(r'ray_r3_rollout_retries_total\{[^}]*cause="engine"', text)
    assert "ray_r3_rollout_in_flight_bytes" in text


def metrics_text() -> str:
    texts = []
    for node in ray.nodes():
        if node["Alive"]:
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as response:
                texts.append(response.read().decode())
    return "\n".join(texts)


def scraped(pool: str) -> dict[str, float]:
    """Sums by metric over the workers and the driver of a pool."""
    sums: dict[str, float] = {}
    for line in metrics_text().splitlines():
        if "r3_rollout" in line and f'"{pool}' in line and not line.startswith("#"):
            name, value = line.partition("{")[0], float(line.rsplit(" ", 1)[1])
            sums[name] = sums.get(name, 0.0) + value
    return sums


CTRL_C = """
import sys
from pathlib import Path
import ray
from ray_engines import journal
from typer.testing import CliRunner
from test_ray import SAMPLING, pool_of, prompts_of, stand_in

notes, store, address = sys.argv[1:]
ray.init(address=address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": sys.path[0]}})
with pool_of(stand_in(Path(notes), delay_s=0.2), Path(store)) as pool:
    for i, sample in enumerate(pool.run(prompts_of(500))):
        if i == 5:
            print("running", flush=True)
"""


def test_ctrl_c(cluster: Any, tmp_path: Path, notes: Path) -> None:
    command = [sys.executable, "-c", CTRL_C, str(notes), str(tmp_path / "store"), cluster.address]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, cwd=Path(__file__).parent
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    require_nothing_left(tmp_path / "store")


def test_servers(tmp_path: Path) -> None:
    """A worker that asks HTTP servers, after a preflight. One worker: each loads transformers to read the model's config."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "mlp_only_layers": [0], "decoder_sparse_step": 1}))
    with FakeVllm() as one, FakeVllm() as two:
        engine = Engine.server([one.url, two.url], model_path=str(tmp_path))
        with pool_of(engine, tmp_path / "store", workers=1) as pool:
            assert len(list(pool.run(prompts_of(40)))) == 40
            with pytest.raises(EngineError, match="cannot be changed from here"):
                pool.update_weights(tmp_path, 2)
            assert len(list(pool.run(prompts_of(45)))) == 45
        assert all(len(server.requests) > 10 for server in (one, two))
        assert {body["seed"] for body in (*one.requests, *two.requests) if body["max_tokens"] == 16} == {
            sample_seed(1, f"p{i}.0") for i in range(45)
        }
    store = ShardStore(tmp_path / "store")
    assert {sample.provenance.logprobs_mode for sample in store} == {"raw_logprobs"}
    assert {sample.provenance.model for sample in store} == {MODEL}


@pytest.mark.parametrize("name", ["single-node", "multi-node"])
def test_the_command_line_and_its_configurations(tmp_path: Path, notes: Path, name: str) -> None:
    """The files as they are, but for the engine and the GPUs that are not here."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt_token_ids": [1, 2, {i}]}}\n' for i in range(10)))
    arguments = ["--config", str(ROOT / "configs" / "ray" / f"{name}.yaml"), "collect", str(tmp_path / "prompts.jsonl")]
    arguments += [
        str(tmp_path / "store"),
        "--engine",
        "ray_engines:open_engine",
        "--workers",
        "2",
        "--max-tokens",
        "16",
    ]
    arguments += ["--worker-options", '{"num_cpus": 1}', "--engine-args", json.dumps({"journal": str(notes)})]
    result = CliRunner().invoke(app, arguments)
    n = {"single-node": 8, "multi-node": 16}[name]
    assert result.exit_code == 0, result.output
    assert f"{10 * n} samples written to {tmp_path / 'store'}" in " ".join(result.output.split())
    assert {int(s.weight_version[-1]) for s in ShardStore(tmp_path / "store")} == {12}
    if name == "multi-node":
        return
    again = CliRunner().invoke(app, arguments)
    assert f"0 samples written to {tmp_path / 'store'}, {10 * n} were there" in " ".join(again.output.split())


def test_the_command_line_joins_a_cluster_by_its_address(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"id": "p{i}", "prompt_token_ids": [{i}]}}\n' for i in range(8)))
    command = [
        sys.executable,
        "-c",
        "from r3.cli import main; main()",
        "collect",
        "prompts.jsonl",
        "store",
        "--ray",
        cluster.address,
    ]
    command += ["--engine", "ray_engines:open_engine", "--max-tokens", "8", "--on-bad-prompt", "skip"]
    command += ["--engine-args", json.dumps({"refused": ["p3"]})]
    command += [
        "--worker-options",
        json.dumps({"runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}}),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "7 samples written" in done.stdout
    assert "missing p3.0: prompt 'p3' (line 4): too long" in done.stderr
    assert len(ShardStore(tmp_path / "store")) == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "vllm"], "needs Ray"),
        ([], "no server to ask"),
        (["--ray", "local"], "no server to ask"),
        (["--ray", "local", "--engine", "vllm"], "no model to load"),
        (["--ray", "local", "--engine", "sglang"], "no such engine"),
        (["--ray", "local", "--engine", "vllm", "-s", "http://x"], "goes with --engine server"),
    ],
)
def test_what_the_command_line_refuses(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    result = CliRunner().invoke(app, ["collect", str(tmp_path / "p.jsonl"), str(tmp_path / "store"), *arguments])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
