"""Replay under FSDP2, FSDP1 and DDP on two gloo ranks: gradients equal those of one process over the same samples.

Each rank has its own micro-batches, uneven, the last one on rank 1 without any token; gradient accumulation over two of them,
gradient checkpointing on. Layouts differ by rank: right-padded on rank 0, packed on rank 1.
"""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import random_sample
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

from r3 import Layout, RolloutSample, RoutingSpec
from r3.errors import ReplayError
from r3.trainers.transformers import attach, right_padded

CONFIG = transformers.Qwen3MoeConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    mlp_only_layers=[0],
)
SPEC = RoutingSpec.from_config(CONFIG)
# micro-batches of each rank: lengths of their samples
SHARES = (((9, 12), (5,)), ((7, 4, 11), ()))


def samples_of(rank: int) -> list[list[RolloutSample]]:
    rng = np.random.default_rng(rank)
    return [
        [random_sample(rng, SPEC, length, sample_id=f"rank {rank}, {i}.{j}") for j, length in enumerate(lengths)]
        for i, lengths in enumerate(SHARES[rank])
    ]


def build() -> nn.Module:
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(CONFIG).train()


def loss_of(model: nn.Module, replay, samples: list[RolloutSample], rank: int) -> torch.Tensor:
    """Sum over the samples' response tokens of -log p; 0 with a graph for a rank without tokens."""
    if rank == 0 and samples:
        layout, input_ids, mask = right_padded(samples)
        inputs = {"attention_mask": mask}
    else:
        layout = Layout.packed([s.num_tokens for s in samples], max(8, sum(s.num_tokens for s in samples)))
        tokens = np.concatenate([s.tokens for s in samples] or [np.zeros(0)]).astype(np.int64)
        input_ids = torch.from_numpy(layout.gather(tokens, fill=0))[None]
        positions = [p for s in samples for p in range(s.num_tokens)]
        positions += list(range(layout.num_positions - len(positions)))
        inputs = {"position_ids": torch.tensor(positions)[None]}
    with replay.micro_batch(samples, layout, input_ids):
        logits = model(input_ids, use_cache=False, **inputs).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).flatten()
    in_loss = layout.gather(np.concatenate([s.loss_mask for s in samples] or [np.zeros(0, bool)]), fill=False)
    weights = torch.from_numpy(in_loss.reshape(input_ids.shape)[:, 1:].astype(np.float32)).flatten()
    return -(logprobs * weights).sum()


def reference() -> dict[str, torch.Tensor]:
    model = build()
    replay = attach(model)
    for rank in (0, 1):
        for samples in samples_of(rank):
            (loss_of(model, replay, samples, rank) / 2).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def wrap(model: nn.Module, kind: str) -> nn.Module:
    if kind == "fsdp2":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Qwen3MoeDecoderLayer}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, Qwen3MoeDecoderLayer))
        return wrapped
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return DistributedDataParallel(model, find_unused_parameters=True)


def full_gradients(model: nn.Module, kind: str) -> dict[str, torch.Tensor]:
    if kind == "fsdp2":
        return {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    if kind == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {
                name.replace("_checkpoint_wrapped_module.", "").replace("_fsdp_wrapped_module.", ""): p.grad.clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}


KINDS = ("fsdp2", "fsdp1", "ddp")


def train(rank: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for kind in KINDS:
        bare = build()
        replay = attach(bare) if kind == "fsdp1" else None  # FSDP1 flattens the routers' weights: attach before it
        model = wrap(bare, kind)
        replay = replay or attach(model)
        for samples in samples_of(rank):
            loss_of(model, replay, samples, rank).backward()
        gradients = full_gradients(model, kind)
        torch.save((gradients, replay.coverage.to_dict()), Path(out) / f"{kind}-{rank}.pt")
        if rank == 0:  # misaligned rows are refused on the rank that has them, before any collective
            samples = samples_of(0)[0]
            layout, input_ids, _ = right_padded(samples)
            with pytest.raises(ReplayError, match="the trainer's tokens are not the rollout's"):
                replay.micro_batch(samples, layout, input_ids.roll(1, 1)).__enter__()
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks left what they computed, all kinds in one pair of processes: they import for seconds."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(port, str(out)), nprocs=2)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_one_process(kind: str, results: Path) -> None:
    expected = reference()
    for rank in (0, 1):
        got, coverage = torch.load(results / f"{kind}-{rank}.pt")
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{kind}, rank {rank}: {name}")
        lengths = [length for share in SHARES[rank] for length in share]
        assert coverage["replayed"] == sum(lengths) - len(lengths)
