"""Two ranks with FSDP2, checkpointing and packed micro-batches on a real server's shards say what one process says.

The one process is the plain case: a sample at a time, unpadded, no checkpointing. Log-probs must be its log-probs, and the gap
between rollout and training must be the one that `r3 diagnose` reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from test_agreement import injected
from torch import nn
from torch.distributed.fsdp import fully_shard

from r3 import Layout, RolloutSample, ShardStore
from r3.diagnose import LIVE, REPLAY, diagnose
from r3.errors import ReplayError
from r3.metrics import bootstrap_interval, k3_terms, log_ratio
from r3.rollout.collector import collect
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import read_prompts
from r3.rollout.protocol import Sampling
from r3.testing import FAULTS
from r3.trainers.score import TransformersScorer
from r3.trainers.transformers import attach, token_logprobs

pytestmark = pytest.mark.engine
PACK = 3  # samples of a micro-batch; 26 of them on two ranks leave a last one that is smaller


@pytest.fixture(scope="module")
def store(engine: EngineInfo, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    store = ShardStore(tmp_path_factory.mktemp("packed") / "shards", create=True)
    prompts = read_prompts(tiny_model / "prompts.jsonl")[:26]
    asyncio.run(collect(prompts, store, engine, sampling=Sampling(max_tokens=48, seed=3), n=1, weight_version=0))
    return store


def load(path: Path) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()


def logprobs_of(model: nn.Module, replay, samples: list[RolloutSample]) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Loss (mean -log p of the sampled tokens) and log-probs of each sample, of one packed row; live without a handle."""
    layout = Layout.packed([s.num_tokens for s in samples])
    input_ids = torch.from_numpy(np.concatenate([s.tokens for s in samples]).astype(np.int64))[None]
    places = torch.from_numpy(np.concatenate([np.arange(s.num_tokens) for s in samples]))[None]
    with replay.micro_batch(samples, layout, input_ids) if replay else contextlib.nullcontext():
        logits = model(input_ids, position_ids=places, use_cache=False).logits
    in_loss = torch.from_numpy(np.concatenate([s.loss_mask for s in samples]))[None, 1:]
    picked = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    parts = np.split(token_logprobs(logits.detach(), input_ids)[0], np.cumsum([s.num_tokens for s in samples])[:-1])
    return -(picked * in_loss).sum() / in_loss.sum(), parts


def train(rank: int, port: int, shards: str, model_path: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = load(Path(model_path))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    replay = attach(model)
    store = ShardStore(shards)
    mine = [store.open(sample_id) for sample_id in store.sample_ids()][rank::2]
    result: dict[str, dict] = {LIVE: {}, REPLAY: {}}
    for start in range(0, len(mine), PACK):
        samples = mine[start : start + PACK]
        with torch.no_grad():
            _, live = logprobs_of(model, None, samples)
        loss, replayed = logprobs_of(model, replay, samples)
        loss.backward()
        for name, parts in ((LIVE, live), (REPLAY, replayed)):
            result[name].update({s.sample_id: p for s, p in zip(samples, parts, strict=True)})
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    torch.save((result, gradients, replay.coverage.share, replay.agreement.by_layer()), Path(out) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if "agreement" in fault.later])
def test_faults_in_real_routes_are_caught_before_any_gradient(name: str, store: ShardStore, tiny_model: Path) -> None:
    """Each sample by itself: none with the fault passes, and none without it is refused."""
    model = load(tiny_model).bfloat16()
    replay = attach(model)
    for sample in list(store)[:12]:
        logprobs_of(model, replay, [sample])
        with pytest.raises(ReplayError, match="the recorded experts are not those of this model's routers"):
            logprobs_of(model, replay, [injected(sample, name)])
    assert replay.agreement.share < 1


def test_packed_and_sharded_equals_plain_and_reproduces_the_diagnosis(
    store: ShardStore, tiny_model: Path, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(port, str(store.root), str(tiny_model), str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1)]
    got = {name: {**ranks[0][0][name], **ranks[1][0][name]} for name in (LIVE, REPLAY)}
    samples = list(store)
    assert got[REPLAY].keys() == {s.sample_id for s in samples}

    model = load(tiny_model)  # plain: a sample at a time
    replay = attach(model)
    losses = {}
    for sample in samples:
        losses[sample.sample_id], (plain,) = logprobs_of(model, replay, [sample])
        np.testing.assert_allclose(got[REPLAY][sample.sample_id][1:], plain[1:], rtol=0, atol=2e-4)
    for rank in (0, 1):  # the ranks' losses are means over a micro-batch, and FSDP takes the mean over ranks
        mine = samples[rank::2]
        for start in range(0, len(mine), PACK):
            part = mine[start : start + PACK]
            tokens = [int(s.loss_mask[1:].sum()) for s in part]
            weighted = sum(losses[s.sample_id] * n for s, n in zip(part, tokens, strict=True))
            (weighted / sum(tokens) / 2).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(ranks[0][1][name], parameter.grad, rtol=1e-3, atol=1e-3 * scale, msg=name)
    for _, _, share, agreement in ranks:
        assert share > 0.98
        assert min(agreement.values()) > 0.95  # real routes are nearly the router's own: what the check relies on

    diagnosis = diagnose(store, TransformersScorer(tiny_model, dtype="float32", device="cpu"))

    def k3(name: str) -> list[np.ndarray]:
        used = [(s, s.loss_mask & (np.arange(s.num_tokens) > 0)) for s in samples]
        return [k3_terms(log_ratio(got[name][s.sample_id][u], s.rollout_logprobs[u])) for s, u in used]

    live, replayed = k3(LIVE), k3(REPLAY)
    low, high = bootstrap_interval(replayed)
    assert low <= diagnosis.gaps[REPLAY].k3 <= high
    assert np.concatenate(replayed).mean() == pytest.approx(diagnosis.gaps[REPLAY].k3, rel=0.02)
    saved = np.concatenate(live).mean() - np.concatenate(replayed).mean()
    assert diagnosis.k3_saved[0] <= saved <= diagnosis.k3_saved[1]
