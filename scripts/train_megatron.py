"""Train a Hugging Face Qwen3-MoE in Megatron-core on real vLLM rollouts, with the rollout's routing replayed.

    python scripts/train_megatron.py                      # configs/megatron.yaml: 4 processes, pipeline 2 x expert parallel 2
    python scripts/train_megatron.py --set expert=1 --set data=1              # 2 processes: pipeline 2
    python scripts/train_megatron.py --model DIRECTORY --shards DIRECTORY     # your own model and rollouts

Everything in it is real: the model (a tiny one is trained first if none is given), vLLM's rollouts collected into a store (a
server is started if none are given), weight conversion, Megatron's schedule, DDP and distributed optimizer, and a policy gradient
(GRPO: advantages within the samples of a prompt, a clipped importance ratio against the rollout's log-probs). What is toy is the
size, and the reward: the share of a response's bytes that are spaces.

Each step first scores its samples live, without gradients, so that its line shows what replay is for. At the end the weights are
saved as a Hugging Face directory; `--again` samples from them and compares the reward.

Without CUDA it runs on gloo (`r3.trainers.megatron.cpu`). Under torchrun it is one rank; else it starts its ranks by torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import numpy as np
import typer
import yaml

from r3 import ShardStore, cli
from r3.diagnose.comparable import comparable
from r3.errors import ConfigError
from r3.fingerprint import model_fingerprint
from r3.metrics import gap_metrics
from r3.settings import read_defaults

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """Section `train` of the configuration; configs/megatron.yaml says what each is."""

    steps: int
    samples: int
    micro_batch: int
    lr: float
    clip: float
    dtype: str
    tensor: int
    pipeline: int
    virtual: int
    expert: int
    context: int
    data: int
    recompute: str
    replay: bool

    @classmethod
    def read(cls, path: Path, changes: Sequence[str]) -> Settings:
        """From a file, with `name=value` changes."""
        known = [field.name for field in fields(cls)]
        values = read_defaults(path, {"train": known})["train"]
        for change in changes:
            name, _, value = change.partition("=")
            if name not in known:
                raise ConfigError("no such setting", expected=", ".join(known), got=name)
            values[name] = yaml.safe_load(value)
        if absent := sorted(set(known) - set(values)):
            raise ConfigError("settings are missing", where=str(path), got=", ".join(absent))
        kinds = get_type_hints(cls)
        settings = cls(**{name: _typed(name, value, kinds[name]) for name, value in values.items()})
        if settings.dtype not in ("bfloat16", "float32"):
            raise ConfigError("no such dtype to train in", expected="bfloat16 or float32", got=settings.dtype)
        return settings


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):  # YAML reads 1e-4 as text
        with contextlib.suppress(ValueError):
            value = float(value)
    if type(value) is not kind:
        raise ConfigError("a setting is of another type", where=name, expected=kind.__name__, got=repr(value))
    return value


def main(
    model: Annotated[Path | None, typer.Option(help="Qwen3-MoE directory; default: a tiny one trained here.")] = None,
    shards: Annotated[Path | None, typer.Option(help="Its rollouts; default: collected here, with vLLM.")] = None,
    config: Annotated[Path, typer.Option(help="Settings.")] = ROOT / "configs/megatron.yaml",
    change: Annotated[list[str] | None, typer.Option("--set", help="name=value, over the file; repeat.")] = None,
    out: Annotated[Path, typer.Option(help="Where model, shards and trained weights go.")] = Path(".r3"),
    again: Annotated[bool, typer.Option(help="Sample from the trained weights, and compare the reward.")] = False,
) -> None:
    settings = Settings.read(config, change or [])
    trained = out / "megatron" / "trained"
    if "RANK" in os.environ:
        if model is None or shards is None:
            raise ConfigError("a rank needs the model and the rollouts", remedy="--model DIRECTORY --shards DIRECTORY")
        run_rank(model, shards, trained, settings)
        return
    if model is None:
        import tiny_moe

        model = tiny_moe.build(out / "tiny-moe")
    prompts = model / "prompts.jsonl"
    if (shards is None or again) and not prompts.is_file():
        raise ConfigError("no prompts to sample from", where=str(prompts), expected="a JSONL file, one prompt a line")
    if shards is None:
        shards = collect(model, prompts, out / "megatron")
    start_ranks(settings, ["--model", model, "--shards", shards, "--config", config, "--out", out], change or [])
    if again:
        after = collect(trained, prompts, out / "megatron")
        for name, store in (("before", shards), ("after", after)):
            rewards = [reward_of(sample.tokens[sample.loss_mask]) for sample in ShardStore(store)]
            print(f"mean reward {name}: {np.mean(rewards):.4f} over {len(rewards)} samples")


def collect(model: Path, prompts: Path, folder: Path) -> Path:
    """Four samples of each of 32 prompts, from a vLLM server that lives as long as that takes.

    The store is named after the weights: those of a run before are of other weights, and are not taken for these.
    """
    from r3.rollout.server import VllmServer

    store = folder / f"shards-{model_fingerprint(model)[:8]}"
    if store.is_dir() and len(ShardStore(store)) == 128:
        print(f"all samples are there: {store}")
        return store
    with VllmServer(model, dtype="bfloat16") as server:
        words = ["collect", str(prompts), str(store), "--server", server.url, "--model", str(model)]
        words += ["--limit", "32", "--n", "4", "--max-tokens", "64"]
        print("$ r3", *words, flush=True)
        if code := cli.app(words, standalone_mode=False):
            raise typer.Exit(code)
    return store


def start_ranks(settings: Settings, options: Sequence[object], changes: Sequence[str]) -> None:
    """This script again, as ranks under torchrun."""
    count = settings.tensor * settings.pipeline * settings.context * settings.data
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port), str(Path(__file__).resolve())]
    command += [str(option) for option in options] + [word for change in changes for word in ("--set", change)]
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **os.environ}
    if code := subprocess.run(command, env=quiet, check=False).returncode:
        raise typer.Exit(code)


def reward_of(response: np.ndarray) -> float:
    """The share of spaces among a response's tokens, which are bytes."""
    return float(np.mean(response == ord(" "))) if len(response) else 0.0


def plan_of(store: ShardStore) -> tuple[list[str], dict[str, float], dict[str, float]]:
    """Sample ids in the order of training, groups together; the reward of each; its advantage: (reward - mean) / deviation."""
    by_group: dict[str, list[str]] = {}
    rewards: dict[str, float] = {}
    for sample_id in store.sample_ids():
        with store.open_file(sample_id) as file:
            by_group.setdefault(file.metadata["group_id"], []).append(sample_id)
            rewards[sample_id] = reward_of(file.tokens()[file.loss_mask])
    advantages: dict[str, float] = {}
    for members in by_group.values():
        values = np.array([rewards[member] for member in members])
        advantages |= dict(zip(members, (values - values.mean()) / (values.std() + 1e-4), strict=True))
    return [member for members in by_group.values() for member in members], rewards, advantages


def temperature_of(store: ShardStore, path: Path) -> tuple[float, str]:
    """The temperature that the rollout's log-probs contain, and whether they are of these weights: same, other, unknown.

    Raises:
        MetricError: rollouts of different settings in one store, or log-probs that no trainer can reproduce.
    """
    samples = [(sample_id, store.metadata(sample_id)) for sample_id in store.sample_ids()]
    of = comparable(samples, SimpleNamespace(fingerprint=model_fingerprint(path)), allow_other_weights=True)
    return of["temperature"] if of["logprobs_mode"] == "processed_logprobs" else 1.0, of["weights"]


def run_rank(path: Path, shards: Path, trained: Path, settings: Settings) -> None:
    """One process of the training run."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from r3.trainers.megatron import convert
    from r3.trainers.megatron.model import initialize

    torch.set_num_threads(1)
    initialize(
        tensor=settings.tensor,
        pipeline=settings.pipeline,
        virtual_pipeline=settings.virtual if settings.virtual > 1 else None,
        expert=settings.expert,
        context=settings.context,
    )
    store = ShardStore(shards)
    order, rewards, advantages = plan_of(store)
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    if settings.samples % (ranks * settings.micro_batch) or len(order) < settings.steps * settings.samples:
        raise ConfigError(
            "these steps cannot be made of these samples",
            expected=f"samples: a multiple of {ranks} data-parallel ranks x {settings.micro_batch}; at most {len(order)} in all",
            got=f"{settings.steps} steps of {settings.samples}",
        )
    temperature, weights = temperature_of(store, path)
    trainer = Trainer(path, store, settings, temperature)
    if dist.get_rank() == 0:
        if weights == "other":
            print("note: other weights than this model's sampled these rollouts; k3 and F contain the difference")
        print(
            "step  reward      loss  grad norm   k3 live  replayed   F(1.1) live  replayed   coverage  agreement",
            flush=True,
        )
    for step in range(settings.steps):
        taken = order[step * settings.samples : (step + 1) * settings.samples]
        mine = taken[rank::ranks]
        batches = [mine[i : i + settings.micro_batch] for i in range(0, len(mine), settings.micro_batch)]
        line = trainer.step(batches, advantages)
        if dist.get_rank() == 0:
            print(f"{step:4d}  {np.mean([rewards[sample] for sample in taken]):6.4f}  {line}", flush=True)
    convert.save(trainer.bare, trained, like=path)
    if dist.get_rank() == 0:
        print(f"trained weights, for transformers and vLLM: {trained}")
    dist.destroy_process_group()


class Trainer:
    """Model chunks in Float16Module and DDP, Megatron's optimizer, the replay handle and the driver."""

    def __init__(self, path: Path, store: ShardStore, settings: Settings, temperature: float) -> None:
        import torch
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from r3.trainers.megatron import attach
        from r3.trainers.megatron.driver import Driver
        from r3.trainers.megatron.model import load_model

        self.settings, self.temperature = settings, temperature
        dtype = getattr(torch, settings.dtype)
        half = dtype != torch.float32
        self.bare = load_model(
            path,
            dtype=dtype,
            calculate_per_token_loss=True,
            variable_seq_lengths=True,  # packed micro-batches differ in length
            **recompute(settings.recompute),
        )
        self.config = self.bare[0].config
        wrapped = [Float16Module(self.config, chunk) if half else chunk for chunk in self.bare]
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=half, grad_reduce_in_fp32=True)
        self.chunks = [DistributedDataParallel(self.config, ddp, chunk) for chunk in wrapped]
        adam = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=half,
            params_dtype=dtype,
            use_distributed_optimizer=half,
        )
        self.optimizer = get_megatron_optimizer(adam, self.chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.replay = attach(self.chunks)
        self.driver = Driver(self.replay, self.chunks, store)

    def step(self, batches: Sequence[Sequence[str]], advantages: dict[str, float]) -> str:
        """One update; its line of the table, which is the same on every rank."""
        live = self.run_schedule(batches, advantages, replay=False, forward_only=True)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        trained = self.run_schedule(batches, advantages, replay=self.settings.replay, forward_only=False)
        updated, gradient_norm, _ = self.optimizer.step()
        if not updated:
            raise ConfigError("the optimizer made no update: a gradient is not finite")
        before, now = (gap_metrics(gathered([part["delta"] for part in parts])) for parts in (live, trained))
        loss = gathered([np.array([float(part["loss"])]) for part in trained]).sum() / now.num_tokens
        agreement, coverage = self.replay.agreement, self.replay.coverage
        counts = [
            coverage.replayed,
            coverage.unrecorded,
            sum(agreement.agreed.values()),
            sum(agreement.compared.values()),
        ]
        replayed, unrecorded, agreed, compared = gathered([np.array(counts)]).reshape(-1, 4).sum(0)
        return (
            f"{loss:8.5f}  {gradient_norm:9.4f}  {before.k3:8.2e}  {now.k3:8.2e}   {before.exceed['1.1']:11.5f}  "
            f"{now.exceed['1.1']:8.5f}   {replayed / max(replayed + unrecorded, 1):8.2%}  {agreed / max(compared, 1):9.2%}"
        )

    def run_schedule(
        self, batches: Sequence[Sequence[str]], advantages: dict[str, float], *, replay: bool, forward_only: bool
    ) -> list[dict[str, Any]]:
        """Megatron's schedule over this rank's micro-batches; what `loss` measured, on last pipeline stages."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(iterator: Iterator[Any], chunk: Any) -> Any:
            batch = next(iterator)

            def forward() -> Any:
                return chunk(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)

            if replay:
                with batch.replay():
                    logits = forward()
            else:
                logits = forward()
            return logits, functools.partial(self.loss, batch, advantages)

        measured: list[dict[str, Any]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self.driver.iterators(batches),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=1,  # the shapes are sent along (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return measured

    def loss(self, batch: Any, advantages: dict[str, float], logits: Any) -> tuple[Any, Any, dict[str, Any]]:
        """Sum over the sampled tokens of -min(r A, clip(r) A), r = p_train / p_rollout; their number; what is measured."""
        from r3.trainers.megatron.score import label_logprobs

        logprobs = label_logprobs(logits, batch.labels, self.temperature)
        delta = (logprobs - batch.rollout_logprobs) * batch.loss_mask
        ratio, clip = delta.exp(), self.settings.clip
        advantage = batch.spread([advantages[sample.sample_id] for sample in batch.samples])
        gain = (ratio * advantage).minimum(ratio.clamp(1 - clip, 1 + clip) * advantage)
        total, used = -(gain * batch.loss_mask).sum(), batch.loss_mask > 0
        return total, used.sum().int(), {"delta": delta.detach()[used].cpu().numpy(), "loss": total.detach()}


def recompute(what: str) -> dict[str, Any]:
    """Fields of TransformerConfig for `none`, `full`, or a list of modules: `moe,core_attn`."""
    if what == "none":
        return {}
    if what == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective", "recompute_modules": what.split(",")}


def gathered(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts of all ranks, one after the other; of TP ranks, which have the same logits, the first one's."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    of_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_rank, list(parts) if parallel_state.get_tensor_model_parallel_rank() == 0 else [])
    return np.concatenate([np.zeros(0), *(part for mine in of_rank for part in mine)])


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=(__doc__ or "").partition("\n")[0])(main)
    cli.run_reporting_errors(app)
