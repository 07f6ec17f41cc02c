"""What a run's routes take: sizes against the code that writes and reads, the budget against hand arithmetic, the simulation
against known queues and against a real collection."""

from __future__ import annotations

import asyncio
import math
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from helpers import random_routes
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from r3 import RolloutSample, Routes, RoutingSpec, ShardStore, shard, wire
from r3.budget import (
    DEFAULTS,
    PRESETS,
    Collection,
    Limits,
    Model,
    Parallel,
    Step,
    Workload,
    budget,
    measure,
    model_of,
    plan,
    reads,
    shard_bytes,
    simulate,
    sizes,
    standins,
    step_of,
    wire_bytes,
)
from r3.budget.simulation import THREADS
from r3.budget.standin import completion, routes_of
from r3.cli import app
from r3.cli.budgeting import number
from r3.errors import ConfigError
from r3.rollout.protocol import parse_completion
from r3.sample import Provenance
from r3.wire import encode_vllm

ROOT = Path(__file__).resolve().parent.parent
QWEN = PRESETS["qwen3-30b-a3b"]
SMALL = Model("small", RoutingSpec(4, (1, 2, 3), 300, 4, "qwen3_moe"), 70000, "by hand")
PROVENANCE = Provenance("vllm", "0.30.0", "a/b", "", 0.7, 0.95, 20, "raw_logprobs", "stop", {"k": "v"})


# Sizes -------------------------------------------------------------------------------------------------------------------


@given(
    prompt=st.sampled_from([0, 1, 9, 10, 300]),
    response=st.sampled_from([1, 2, 3, 99, 1000]),
    experts=st.sampled_from([8, 256, 257]),
    vocabulary=st.sampled_from([200, 257, 70000, 2**24 + 1]),
)
@settings(max_examples=40, deadline=None)
def test_a_shard_has_the_size_that_the_packer_gives_it(prompt, response, experts, vocabulary) -> None:
    model = Model("any", RoutingSpec(5, (1, 2, 4), experts, 2), vocabulary, "")
    tokens = prompt + response
    rng = np.random.default_rng(0)
    sample = RolloutSample.from_rollout(
        sample_id="p7.3",
        group_id="p7",
        spec=model.spec,
        prompt_tokens=np.zeros(prompt, np.int64),
        response_tokens=np.full(response, vocabulary - 1),
        response_logprobs=np.zeros(response),
        routes=random_routes(rng, model.spec, tokens),
        weight_version=3,
        provenance=PROVENANCE,
    )
    foreseen = shard_bytes(model, prompt, response, provenance=PROVENANCE, sample_id="p7.3")
    assert foreseen == len(shard.save(sample))


@pytest.mark.parametrize("tokens", [1, 2, 3, 50])
@pytest.mark.parametrize("model", [SMALL, PRESETS["deepseek-v3"]], ids=lambda model: model.name)
def test_routes_on_the_wire_have_the_size_that_vllm_gives_them(model, tokens) -> None:
    rows = np.zeros((tokens - 1, model.spec.num_layers, model.spec.top_k), model.spec.dtype)
    assert sizes.base64_bytes(sizes.npy_bytes(model, tokens)) == len(encode_vllm(rows))


@pytest.mark.parametrize(("prompt", "response"), [(0, 64), (64, 1), (512, 3000), (300, 7)])
def test_a_response_has_nearly_the_size_of_one(prompt, response) -> None:
    body = completion(QWEN.vocabulary, prompt, response, routes=routes_of(QWEN.spec, prompt + response, 1), seed=1)
    assert wire_bytes(QWEN, prompt, response) == pytest.approx(len(body), rel=0.01)


def test_a_stand_in_sends_what_the_decoder_accepts() -> None:
    for model in (SMALL, PRESETS["gpt-oss-120b"]):
        parsed = parse_completion(completion(model.vocabulary, 30, 100, routes=routes_of(model.spec, 130, 0)), "url")
        routes = wire.decode_vllm(parsed.routed_experts, model.spec, num_tokens=130)
        assert routes.num_recorded == 129
        assert parsed.token_ids.max() < model.vocabulary


@pytest.mark.engine  # for the seconds that transformers takes to import
def test_presets_are_what_transformers_knows_of_them() -> None:
    from transformers import AutoConfig

    for name, family in (("deepseek-v3", "deepseek_v3"), ("gpt-oss-120b", "gpt_oss"), ("glm-4.5-air", "glm4_moe")):
        config = AutoConfig.for_model(family)
        assert RoutingSpec.from_config(config) == PRESETS[name].spec
        assert config.vocab_size == PRESETS[name].vocabulary


@pytest.mark.engine
def test_a_model_on_disk_is_read_and_another_is_refused(tmp_path) -> None:
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(vocab_size=999, num_hidden_layers=3, num_experts=16, num_experts_per_tok=4).save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        model = model_of(str(path))
        assert (model.vocabulary, model.spec.brief()) == (999, "3 of 3 layers route, top-4 of 16 experts (qwen3_moe)")
    with pytest.raises(ConfigError, match=r"no such model: 'llama'[\s\S]*kimi-k2"):
        model_of("llama")


# What ranks read ---------------------------------------------------------------------------------------------------------

LONG = Model("long", RoutingSpec(8, tuple(range(1, 8)), 300, 8, "qwen3_moe"), 70000, "by hand")
TOKENS = 8192  # of 16 bytes a layer: 128 KiB, from which on ranges are read
CASES = [
    Parallel(),
    Parallel(pipeline=4),
    Parallel(tensor=2, pipeline=2),
    Parallel(tensor=2, pipeline=2, sequence_parallel=False),
    Parallel(context=2),
    Parallel(tensor=2, context=2, pipeline=2),
    Parallel(tensor=2, context=2, sequence_parallel=False, virtual=2, pipeline=2),
]


def long_sample(tokens: int = TOKENS) -> RolloutSample:
    rows = wire.parse_npy(wire.decode_base64(routes_of(LONG.spec, tokens, 0), "here"))
    return RolloutSample.from_rollout(
        sample_id="s",
        spec=LONG.spec,
        prompt_tokens=np.zeros(100, np.int64),
        response_tokens=np.full(tokens - 100, LONG.vocabulary - 1),
        response_logprobs=np.zeros(tokens - 100),
        routes=Routes.from_rows(rows[:, list(LONG.spec.moe_layers)], tokens, LONG.spec),
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> ShardStore:
    store = ShardStore(tmp_path_factory.mktemp("long"))
    store.add(long_sample())
    store.add(replace(long_sample(512), sample_id="short"))
    return store


def drive(store: ShardStore, sample_id: str, tokens: int, parallel: Parallel, together: int = 1) -> None:
    """What every rank of a replica reads of a micro-batch, of one sample so many times, by the driver's own parts."""
    from r3.trainers.megatron import driver
    from r3.trainers.megatron.batch import Form, Rank

    chunks = parallel.pipeline * parallel.virtual
    for chunk in range(chunks):
        layers = [layer for layer in LONG.spec.moe_layers if layer * chunks // LONG.spec.num_layers == chunk]
        for tensor in range(parallel.tensor):
            for context in range(parallel.context):
                rank = Rank(tensor, parallel.tensor, context, parallel.context, parallel.sequence_parallel)
                placed = Form(multiple=rank.multiple).place([tokens] * together, rank)
                seen = driver._tokens_seen(rank.router_rows(placed.layout))
                for needed in np.split(seen, together):
                    with store.open_file(sample_id) as file:
                        driver._read(sample_id, file, layers, needed)
                        if chunk == chunks - 1:
                            file.rollout_logprobs()


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """Bytes that are read from files from now on."""
    read = [0]
    for name in ("pread", "preadv"):
        original = getattr(os, name)

        def counting(*arguments: Any, original: Any = original) -> Any:
            got = original(*arguments)
            read[0] += got if isinstance(got, int) else len(got)
            return got

        monkeypatch.setattr(os, name, counting)
    return read


@pytest.mark.parametrize("parallel", CASES, ids=str)
@pytest.mark.parametrize(("sample_id", "tokens"), [("s", TOKENS), ("short", 512)])
def test_ranks_read_what_the_driver_reads(store, read, parallel, sample_id, tokens) -> None:
    drive(store, sample_id, tokens, parallel)
    assert read[0] == reads(LONG, 100, tokens - 100, parallel).bytes


@pytest.mark.parametrize(("sample_id", "tokens"), [("s", TOKENS), ("short", 512)])
@pytest.mark.parametrize("context", [1, 2])
def test_of_several_samples_in_a_line_a_rank_reads_those_that_it_sees(store, read, context, sample_id, tokens) -> None:
    for tensor, together in ((2, 3), (4, 5), (4, 1)):  # no cut falls between two samples
        read[0] = 0
        parallel = Parallel(tensor=tensor, context=context)
        drive(store, sample_id, tokens, parallel, together)
        foreseen = reads(LONG, 100, tokens - 100, parallel, together=together)
        assert read[0] == pytest.approx(together * foreseen.bytes, abs=together)
    alone = Workload(samples=64, prompt=100, response=924, micro_batch_tokens=1024)
    sized = [size(LONG, replace(alone, micro_batch_tokens=tokens))["read_step"] for tokens in (1024, 16384)]
    assert sized[0] > 2 * sized[1]


@pytest.mark.parametrize("parallel", CASES, ids=str)
def test_requests_to_an_object_store_are_those_that_are_made(monkeypatch, parallel) -> None:
    from r3.shard import objects

    store = ShardStore("memory://budget", create=True)
    if "s" not in store:
        store.add(long_sample())
    made = [0, 0]
    ranges, size = objects.Objects.ranges, objects.Objects.size

    def count_ranges(self: Any, path: str, begins: list[int], ends: list[int]) -> list[bytes]:
        made[0] += len(begins)
        made[1] += sum(ends) - sum(begins)
        return ranges(self, path, begins, ends)

    def count_size(self: Any, path: str) -> int | None:
        made[0] += 1
        return size(self, path)

    monkeypatch.setattr(objects.Objects, "ranges", count_ranges)
    monkeypatch.setattr(objects.Objects, "size", count_size)
    drive(store, "s", TOKENS, parallel)
    foreseen = reads(LONG, 100, TOKENS - 100, parallel, objects=True)
    assert made == [foreseen.requests, foreseen.bytes]


def test_numbers_that_are_written_twice_are_equal() -> None:
    from r3.rollout import collector
    from r3.rollout.ray.results import Committed, Outcome
    from r3.shard import objects
    from r3.trainers.megatron import driver

    assert sizes.RANGES_FROM == driver.RANGES_FROM
    assert (sizes.GAP, sizes.BLOCK) == (objects._GAP, objects._BLOCK)
    assert THREADS == collector._THREADS
    key = "/shared/run/step-000012/prompt-0123456789abcdef.0.safetensors"
    node = "0123456789abcdef" * 3 + "01234567"
    names = ("prompt-0123456789abcdef.0", "prompt-0123456789abcdef", key)
    outcome = Outcome(Committed(*names, 6406000, 1024, 15360, 12, 240.5, 0.0125, "worker-003", node, True))
    assert len(pickle.dumps(outcome)) == pytest.approx(plan.KEY_BYTES, rel=0.1)


# The budget --------------------------------------------------------------------------------------------------------------


def size(model: Model = QWEN, work: Workload | None = None, **changes: Any) -> Any:
    parts = {"collection": Collection(), "parallel": Parallel(4, 4, 2, 8), "limits": Limits(), "ray": True}
    parts |= {"costs": DEFAULTS, **changes}
    ray = parts.pop("ray")
    return budget(model, work or Workload(), **parts, ray=ray)


def test_the_lines_are_those_of_hand_arithmetic() -> None:
    sized = size()
    assert sized["routes_token"] == 48 * 8
    assert sized["wire_token"] == pytest.approx(48 * 8 * 4 / 3, rel=1e-4)
    assert sized["disk_token"] == pytest.approx(48 * 8 + 3 + 4 * 15360 / 16384, rel=1e-3)
    assert sized["disk_step"] == pytest.approx(sized["disk_token"] * 16384 * 32768 / 1e9)
    assert sized["disk_kept"] == pytest.approx(4 * sized["disk_step"] / 1e3)
    assert sized["rate"] == pytest.approx(32768 / 600)
    assert sized["net_in"] == pytest.approx(sized["wire_sample"] * 8e-3 * sized["rate"] / 8)
    assert sized["cores"] == pytest.approx(sized["rate"] * sized["sample_ms"] / 1e3)
    assert sized["read_rank"] * 8 * 32 >= sized["read_step"]
    assert sized["ray_keys"] * 1e4 < sized["ray_routes"] * 1e3
    assert [load.share for load in sized.loads] == sorted((load.share for load in sized.loads), reverse=True)


def test_the_routes_of_a_micro_batch_are_as_large_as_on_the_device() -> None:
    import torch

    from r3.microbatch import MicroBatch
    from r3.trainers.megatron.batch import Form, Rank

    rank = Rank(1, 2, 0, 2, True)
    layout = rank.router_rows(Form(multiple=rank.multiple).place([512], rank).layout)
    batch = MicroBatch([long_sample(512)], layout, LONG.spec, torch.device("cpu"), layers=[4, 5, 6, 7])
    sized = size(LONG, Workload(micro_batch_tokens=512), parallel=Parallel(tensor=2, pipeline=2, context=2))
    assert sized["gpu_batch"] * 1e6 == batch._ids.nbytes


def test_more_is_more() -> None:
    base, twice = size(), size(work=Workload(samples=65536))
    for key in ("wire_step", "disk_step", "rate", "cores", "net_in", "write", "read_step"):
        assert twice[key] == pytest.approx(2 * base[key])
    assert size(ray=False).lines[-1].group != "Ray"
    objects = size(limits=Limits(objects=True))
    assert {load.key for load in objects.loads} >= {"puts", "gets"}
    assert objects["price"] == pytest.approx(
        (32768 * 0.005 + objects["gets"] * 600 * 0.0004) / 1000,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Workload(samples=0),
        lambda: Workload(step_seconds=0),
        lambda: Collection(processes=2, hosts=4),
        lambda: Workload(step_seconds=math.nan),
        lambda: Limits(cores=0),
        lambda: Limits(nic_gbit_s=math.nan),
        lambda: Parallel(context=0),
        lambda: size(parallel=Parallel(pipeline=16, virtual=4)),  # of 48 layers
        lambda: measure(0.1, "nowhere"),
        lambda: size(work=Workload(samples=4)),
        lambda: CliRunner().invoke(app, ["budget", "kimi-k2", "--directory", "."], catch_exceptions=False),
        lambda: simulate(replace(STEP, servers=0)),
        lambda: simulate(replace(STEP, nic_bytes_s=0)),
    ],
)
def test_what_cannot_be_sized_is_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        wrong()


# The simulation ----------------------------------------------------------------------------------------------------------

STEP = Step(
    samples=400,
    servers=2,
    slots=8,
    generate_s=0.0,
    processes=1,
    hosts=1,
    concurrency=16,
    cores=64,
    loop_s=0.010,
    threads_s=0.006,
    wire_bytes=1e7,
    shard_bytes=6e6,
    nic_bytes_s=1e15,
    storage_bytes_s=1e15,
)


@pytest.mark.parametrize(
    ("changes", "rate", "first"),
    [
        ({}, 1 / 0.016, "interpreter of a collector process"),
        ({"locked": 0.0}, 1 / 0.010, "interpreter of a collector process"),
        ({"processes": 4}, 4 / 0.016, "interpreter of a collector process"),
        ({"processes": 4, "hosts": 2, "cores": 1}, 2 / 0.016, "cores of a collector host"),
        ({"nic_bytes_s": 2e8}, 20, "network of a collector host"),
        ({"storage_bytes_s": 6e7}, 10, "storage, written"),
        ({"generate_s": 0.8}, 20, "server slots"),
        ({"generate_s": 0.8, "concurrency": 4}, 5, "server slots"),  # four in flight of sixteen slots
    ],
)
def test_a_step_saturates_where_a_queue_must(changes, rate, first) -> None:
    outcome = simulate(replace(STEP, **changes))
    assert outcome.rate == pytest.approx(rate, rel=0.06)
    if changes.get("concurrency") is None:
        assert outcome.first == first
    assert all(0 <= share <= 1 + 1e-9 for share in outcome.busy.values())
    assert outcome.samples == 400
    assert outcome.in_memory <= 16
    assert outcome.lag_s >= 0


def test_ranks_that_read_slower_than_is_written_fall_behind() -> None:
    outcome = simulate(replace(STEP, generate_s=0.8, read_bytes=2e7, read_bytes_s=2e8))
    assert outcome.seconds == pytest.approx(20, rel=0.07)  # and the first and the last one's way
    assert outcome.read_s == pytest.approx(40, rel=0.05)
    assert outcome.first == "storage, read"
    assert simulate(STEP).read_s == simulate(STEP).seconds


def test_a_step_of_lengths_that_differ_ends_with_the_longest() -> None:
    alike, spread = (simulate(replace(STEP, generate_s=0.8, spread=s)) for s in (0.0, 0.5))
    assert spread.seconds > alike.seconds
    assert simulate(replace(STEP, spread=0.5, seed=1)).seconds != simulate(replace(STEP, spread=0.5)).seconds
    assert simulate(replace(STEP, spread=0.5)) == simulate(replace(STEP, spread=0.5))


@pytest.mark.parametrize("samples", [64, 2048])  # fewer than the servers' slots, and as many
def test_a_budget_that_is_not_full_does_not_lengthen_the_step(samples) -> None:
    step = step_of(size(work=Workload(samples=samples, step_seconds=600)), spread=0.0)
    outcome = simulate(step)
    assert outcome.seconds == pytest.approx(600, rel=0.02)
    assert outcome.first == "server slots"


# The command and the page ------------------------------------------------------------------------------------------------


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["budget", *arguments], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_prints_what_the_library_says() -> None:
    values = orjson.loads(command("kimi-k2", "--json", "--simulate", "--samples", "512", "--no-ray", "--object-store"))
    sized = size(PRESETS["kimi-k2"], Workload(samples=512), limits=Limits(objects=True), ray=False)
    assert values["lines"] == {
        k: {"value": v.value, "unit": v.unit, "how": v.how} for v in sized.lines for k in [v.key]
    }
    assert values["loads"][0]["key"] == sized.loads[0].key
    assert values["simulation"]["first"] in values["simulation"]["busy"]
    text = command("qwen3-30b-a3b", "--simulate", "--nic", "0.001", "--samples", "512")
    assert "48 of 48 layers route, top-8 of 128 experts" in text
    assert "FULL" in text
    assert "the last shard" in text
    with pytest.raises(ConfigError, match="no such model"):
        CliRunner().invoke(app, ["budget", "nothing"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (512.0, "512"),
        (1234567, "1,234,567"),
        (0.01234, "0.012"),
        (12.345, "12.3"),
        (317.8, "318"),
        (1e-5, "1.0e-05"),
        (math.inf, "inf"),
    ],
)
def test_numbers_have_three_digits(value, text) -> None:
    assert number(value) == text


def test_the_tables_of_the_page_are_what_the_command_prints() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text()
    table = page.partition("<!-- r3 budget -->")[2].partition("\n\n")[0].strip().splitlines()
    models = [cell.strip().strip("`") for cell in table[0].strip("|").split("|")][2:]
    results = [size(model_of(name)) for name in models]
    assert len(models) == 3
    checked = 0
    for row in table[2:]:
        key, _, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        key = key.strip("`")
        units = {line.key: line.unit for line in results[0].lines}
        assert [f"{number(result[key])} {units[key]}".strip() for result in results] == cells, key
        checked += 1
    assert checked >= 20
    printed = re.findall(r"<!-- (r3 budget [^>]+) -->\n([^\n]+)", page)
    assert len(printed) >= 3
    for arguments, line in printed:
        assert line.strip("`") in re.sub(r"\s+", " ", command(*arguments.split()[2:])), arguments


@pytest.mark.engine
def test_the_simulated_steps_of_the_page_are_what_the_command_says() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text()
    rows = page.partition("<!-- simulated -->")[2].partition("\n\n")[0].strip().splitlines()[2:]
    assert len(rows) >= 12
    for row in rows[::4]:  # most of a second each
        arguments, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        outcome = orjson.loads(command(*arguments.strip("`").split(), "--simulate", "--json"))["simulation"]
        later, share = outcome["read_s"] - outcome["seconds"], outcome["busy"][outcome["first"]]
        expected = [f"{outcome['seconds']:.0f} s", f"{later:.1f} s", str(outcome["in_memory"])]
        assert cells == [*expected, f"{outcome['first']}, {share:.0%}"], arguments


# Real runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_real_collection_is_not_faster_than_its_model(tmp_path) -> None:
    """Never in less: 48 samples of 6 slots at 12 a second. How much longer is the machine's, so nothing is asked of that here."""
    from r3.rollout.collector import collect
    from r3.rollout.prompts import Prompt
    from r3.rollout.protocol import Sampling

    shape = (SMALL, 100, 1900)
    with standins(2, SMALL, prompt=100, response=1900, slots=3, rate=6.0) as servers:
        report = asyncio.run(
            collect(
                [Prompt(f"p{i}", 0, "prompt", str(i)) for i in range(48)],
                ShardStore(tmp_path / "store", create=True),
                servers.engine("routes"),
                sampling=Sampling(max_tokens=1900),
                concurrency=6,
            )
        )
    step = replace(
        STEP,
        samples=48,
        slots=3,
        generate_s=0.5,
        concurrency=6,
        cores=2,
        loop_s=DEFAULTS.loop_s(*shape),
        threads_s=DEFAULTS.threads_s(*shape),
        wire_bytes=wire_bytes(*shape),
        shard_bytes=shard_bytes(*shape),
    )
    assert report.written == 48
    assert report.bytes / 48 == pytest.approx(shard_bytes(*shape), rel=0.01)
    assert report.seconds > 0.9 * simulate(step).seconds


@pytest.mark.engine
def test_receiving_faults_no_memory_in_again_where_that_was_asked_for() -> None:
    """In a process of its own: the allocator learns for life."""
    program = """
import asyncio, resource
from r3.budget import PRESETS, standins
from r3.rollout.client import VllmClient, keep_freed_memory
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Sampling

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

async def ask(urls):
    async with VllmClient(urls, "m", Sampling(max_tokens=15360)) as client:
        for number in range(20):
            if number == 4:
                before = faults()
            await client.sample(Prompt("p", 0, "prompt", ""))
        return (faults() - before) / 16

model = PRESETS["qwen3-30b-a3b"]
with standins(1, model, prompt=1024, response=15360) as servers:
    urls = servers.engine("routes").urls
    print(asyncio.run(ask(urls)))
    keep_freed_memory()
    print(asyncio.run(ask(urls)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    usual, kept = map(float, done.stdout.split())
    assert kept < 150, "page faults a response; a response is 2,300 pages"
    assert usual > 2 * kept, "the client changed the allocator of its process by itself"


@pytest.mark.engine
def test_a_collection_takes_no_more_memory_than_is_budgeted(tmp_path) -> None:
    program = """
import asyncio, sys
from pathlib import Path
from r3 import ShardStore
from r3.budget import PRESETS, standins
from r3.rollout.collector import collect
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Sampling

def peak():
    status = Path("/proc/self/status").read_text()  # ru_maxrss is no less than that of the process that started this one
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

model = PRESETS["qwen3-30b-a3b"]
prompts = [Prompt(f"p{i}", 0, "prompt", "") for i in range(24)]
with standins(2, model, prompt=1024, response=15360) as servers:
    before, store = peak(), ShardStore(sys.argv[1], create=True)
    sampling = Sampling(max_tokens=15360)
    asyncio.run(collect(prompts, store, servers.engine("routes"), sampling=sampling, concurrency=12))
    print(peak() - before)
"""
    command = [sys.executable, "-c", program, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    budgeted = size(collection=Collection(concurrency=12, processes=1, hosts=1))["memory"] * 1e9
    assert 0.4 * budgeted < float(done.stdout) < 1.15 * budgeted


@pytest.mark.engine
def test_costs_of_this_machine_are_of_the_order_of_the_defaults(tmp_path) -> None:
    found = measure(1.0, str(tmp_path))
    for name in ("receive_s_per_byte", "parse_s_per_token", "decode_s_per_byte", "pack_s_per_byte", "read_s_per_byte"):
        assert 0.1 < getattr(found, name) / getattr(DEFAULTS, name) < 20, name


@pytest.mark.engine
def test_a_stand_in_sends_the_fields_that_vllm_sends(vllm_server, engine) -> None:
    import urllib.request

    asked = {"model": engine.model, "prompt": [40, 41, 42], "max_tokens": 4, "logprobs": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{vllm_server.url}/v1/completions", orjson.dumps(asked), {"Content-Type": "application/json"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        real = orjson.loads(response.read())["choices"][0]
    ours = orjson.loads(completion(100, 3, 4, routes=routes_of(engine.spec, 7, 0)))["choices"][0]
    assert set(ours) == set(real)
    assert set(ours["logprobs"]) == set(real["logprobs"])
    assert {k: type(v) for k, v in ours["logprobs"].items()} == {k: type(v) for k, v in real["logprobs"].items()}
    served = Model("served", engine.spec, 100, "")
    assert len(real["routed_experts"]) == sizes.base64_bytes(sizes.npy_bytes(served, 7))
