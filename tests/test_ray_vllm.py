"""Rollout workers with real vLLM in them: new weights in a live engine, judged by transformers, and chaos.

One engine serves the whole module, as it takes half a minute to start: the tests stand in the order in which they must run.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from ray_cluster import command_of, engines_alive, options, three_nodes, workers_alive

from r3 import RolloutSample, RoutingSpec, inspection
from r3.errors import EngineError
from r3.fingerprint import model_fingerprint
from r3.rollout.prompts import Prompt, read_prompts
from r3.rollout.protocol import Sampling
from r3.rollout.ray import Engine, RolloutPool

pytestmark = pytest.mark.engine

ENGINE_ARGS = {"dtype": "bfloat16", "max_model_len": 256, "block_size": 32}  # blocks that a prompt of 128 tokens fills


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with three_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def perturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with noise on its attention and routers: another policy that chooses other experts."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("weights") / "version-2"
    shutil.copytree(tiny_model, path)
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(0)
    for name, tensor in weights.items():
        if "self_attn" in name or name.endswith("mlp.gate.weight") or ".experts." in name:
            noise = torch.randn(tensor.shape) * tensor.float().std() * (1.5 if "gate.weight" in name else 0.5)
            weights[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


class Judge:
    """transformers on one checkpoint: the experts and log-probs that a sample should have."""

    def __init__(self, path: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def __call__(self, sample: RolloutSample) -> tuple[float, float, float]:
        """Shares of the recorded ids in the router's own choice, on prompt and response; mean |log-prob difference|."""
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        with torch.no_grad():
            out = self.model(tokens, output_router_logits=True, use_cache=False)
        own = torch.stack([logits.topk(sample.spec.top_k).indices for logits in out.router_logits]).numpy()  # [L, T, K]
        agreed = (sample.routes.ids[:, :, :, None] == own[:, :, None, :]).any(-1)
        length = sample.prompt_length
        logprobs = out.logits[0].log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0].numpy()
        difference = np.abs(logprobs[length - 1 :] - sample.rollout_logprobs[length:]).mean()
        return float(agreed[:, :length].mean()), float(agreed[:, length:-1].mean()), float(difference)


@pytest.fixture(scope="module")
def judges(tiny_model: Path, perturbed: Path) -> dict[int, Judge]:
    return {1: Judge(tiny_model), 2: Judge(perturbed)}


def prompts_of(model: Path, count: int) -> list[str]:
    """Prompts of 128 bytes, which are 128 tokens."""
    lines = [prompt.payload for prompt in read_prompts(model / "prompts.jsonl")]
    return ["".join(lines[3 * i : 3 * i + 3])[:128] for i in range(count)]


def mean(judge: Judge, samples: list[RolloutSample]) -> tuple[float, float, float]:
    return tuple(np.mean([judge(sample) for sample in samples], axis=0).tolist())


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vllm")
    (root / "journal").mkdir()
    return {name: root / name for name in ("store", "journal", "no-reset")}


@pytest.fixture(scope="module")
def pool(tiny_model: Path, paths: dict[str, Path]) -> Iterator[RolloutPool]:
    """One worker with real vLLM, on the first node."""
    engine = Engine.custom(
        "ray_engines:open_vllm", model=str(tiny_model), no_reset=str(paths["no-reset"]), **ENGINE_ARGS
    )
    with RolloutPool(
        engine,
        paths["store"],
        sampling=Sampling(max_tokens=32, seed=1),
        weight_version=1,
        slots=8,
        tries=6,  # whoever is killed is not a poison
        ray_options=options(0, max_restarts=-1),
    ) as pool:
        yield pool
    deadline = time.monotonic() + 15
    while (left := [*workers_alive(), *engines_alive()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def test_an_update_takes_routes_log_probs_and_cache_to_the_new_version(
    pool: RolloutPool, tiny_model: Path, perturbed: Path, judges: dict[int, Judge], paths: dict[str, Path]
) -> None:
    texts = prompts_of(tiny_model, 8)

    def sample(round: str, version: int) -> list[RolloutSample]:
        """The same prompts once more, under other ids."""
        committed = list(pool.run([Prompt(f"{round}{i}", 0, "prompt", text) for i, text in enumerate(texts)]))
        assert len(committed) == len(texts)
        assert {each.weight_version for each in committed} == {version}
        samples = [pool.store.open(each.sample_id) for each in committed]
        assert {int(s.weight_version[-1]) for s in samples} == {version}
        weights = perturbed if version == 2 else tiny_model
        assert {s.provenance.model_fingerprint for s in samples} == {model_fingerprint(weights)}
        return samples

    first, cached = sample("a", 1), sample("b", 1)
    for samples in (first, cached):  # the second time from the cache, with the same routes on the prompt
        on_prompt, on_response, difference = mean(judges[1], samples)
        assert (on_prompt > 0.95, on_response > 0.95, difference < 0.05) == (True, True, True)
    other = mean(judges[2], first)
    assert max(other[:2]) < 0.7
    assert other[2] > 0.2

    run = pool.run([Prompt(f"c{i}", 0, "prompt", text) for i, text in enumerate(texts * 4)])
    between = [next(run)]
    pool.update_weights(perturbed, 2)  # with requests in flight
    between += list(run)
    assert {each.weight_version for each in between} == {1, 2}
    assert len(between) == 32
    for version in (1, 2):
        samples = [pool.store.open(each.sample_id) for each in between if each.weight_version == version][:8]
        on_prompt, on_response, difference = mean(judges[version], samples)
        assert (on_prompt > 0.95, on_response > 0.95, difference < 0.05) == (True, True, True)
        assert max(mean(judges[3 - version], samples)[:2]) < 0.7

    with pytest.raises(EngineError, match="did not take the weights"):
        pool.update_weights(paths["store"], 9)  # no weights there: refused, and the old ones stay
    sample("d", 2)

    paths[
        "no-reset"
    ].touch()  # and now as it would be without the reset: back to the first weights, the cache full of the second
    pool.update_weights(tiny_model, 3)
    spoilt = sample("e", 3)
    on_prompt, on_response, _ = mean(judges[1], spoilt)
    assert on_prompt < 0.75 < mean(judges[2], spoilt)[0]
    assert on_response > 0.9  # and nothing in the responses would have shown it
    paths["no-reset"].unlink()


def test_chaos(cluster: Any, pool: RolloutPool, tiny_model: Path, paths: dict[str, Path]) -> None:
    """500 prompts, real vLLM and three stand-ins; a worker is killed every two to three seconds, and a node goes once."""
    spec = RoutingSpec.from_config(tiny_model)
    facts = {"spec": spec.to_json(), "model": str(tiny_model), "model_fingerprint": model_fingerprint(tiny_model)}
    other = Engine.custom(
        "ray_engines:open_engine", journal=str(paths["journal"]), info={**facts, "max_model_len": 256}, delay_s=0.6
    )
    pool.add_workers(2, engine=other, ray_options=options(max_restarts=-1))
    pool.add_workers(1, engine=other, ray_options=options(1, max_restarts=-1))
    while not all(pool.workers.values()):
        time.sleep(0.1)
    (real,) = (pid for pid in workers_alive() if any("VLLM" in command_of(c) for c in psutil.Process(pid).children()))
    asked = [Prompt(f"p{i}", 0, "prompt_token_ids", [i % 200, *range(23)]) for i in range(500)]
    inodes: dict[str, tuple[int, int]] = {}
    by_worker: Counter[str] = Counter()
    killed: list[int] = []
    removed, done = threading.Event(), threading.Event()

    def kill() -> None:
        dice = random.Random(3)
        while not done.wait(dice.uniform(2, 3)):
            if len(killed) == 1:
                killed.append(real)
                kill_with_stopped_engine(real)
                continue
            if len(killed) == 3 and not removed.is_set():
                node = next(n for n in cluster.worker_nodes if "node1" in (n._ray_params.resources or {}))
                cluster.remove_node(node, allow_graceful=False)
                removed.set()
            if others := [pid for pid in workers_alive() if pid != real]:  # on a busy machine all may be starting
                killed.append(dice.choice(others))
                os.kill(killed[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        run = pool.run(asked)
        for sample in run:
            assert sample.sample_id not in inodes
            inodes[sample.sample_id] = identity(sample.key)
            by_worker[sample.worker] += 1
    finally:
        done.set()
        killer.join()
    print(f"{len(killed)} kills, {run.retries} retries, {run.report().seconds:.0f} s, {dict(by_worker)}")
    assert run.failures == ()
    assert removed.is_set()
    assert len(killed) >= 5
    assert by_worker["rollout-0"] >= 8
    assert set(inodes) == {f"{prompt.prompt_id}.0" for prompt in asked}
    assert {name: identity(pool.store.key_of(name)) for name in inodes} == inodes  # no shard was written over
    assert sum(name.startswith("p") for name in pool.store.sample_ids()) == 500
    assert inspection.verify(pool.store.root, spec=spec).bad == {}
    _gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in STOPPED if psutil.pid_exists(pid)], timeout=15)
    assert alive == []


STOPPED: list[int] = []  # processes of an engine that could not notice by themselves that their worker was killed


def kill_with_stopped_engine(pid: int) -> None:
    children = [child for child in psutil.Process(pid).children(recursive=True) if "VLLM" in command_of(child)]
    assert len(children) >= 2  # the engine core and its worker
    for child in children:
        child.send_signal(signal.SIGSTOP)
        STOPPED.append(child.pid)
    os.kill(pid, signal.SIGKILL)


def identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_ctime_ns
