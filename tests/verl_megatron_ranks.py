"""veRL's Megatron engine on two gloo ranks with expert parallelism, for a test; run by torchrun with the JSON of one case.

veRL builds its Megatron models through mbridge or Megatron-Bridge, which are made for GPUs and not installed where these tests
run: it stops in `MegatronEngine._build_tf_config`. Model and configuration are built by `r3.trainers.megatron.model` here;
everything after that is veRL's or Megatron's: worker, engine, schedules, packing, log-probs, DDP, optimizer and update.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import verl_ranks  # first: it sets veRL's environment

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from verl.workers.engine.megatron import MegatronEngineWithLMHead, transformer_impl

from r3 import ShardStore
from r3.errors import R3Error
from r3.trainers.megatron import cpu, model
from r3.trainers.megatron.observe import observe


def build_without_bridge(path: Path, **changes: Any) -> dict[str, bool]:
    """Put r3's loader in the place of veRL's bridges; the flags that it returns go into the configs of models built later."""
    flags: dict[str, bool] = {}

    def configure(engine: Any) -> None:
        engine.is_value_model, engine.vanilla_bridge = False, True
        engine.provider = engine.bridge = engine.peft_cls = None
        engine.share_embeddings_and_output_weights = engine.model_config.share_embeddings_and_output_weights
        engine.param_dtype = engine.dtype = torch.bfloat16
        engine.tf_config = model.transformer_config(path, dtype=torch.bfloat16, **changes)

    def build(engine: Any) -> list[Any]:
        chunks = model.load_model(path, dtype=torch.bfloat16, **changes)
        for chunk in chunks:
            vars(chunk.config).update(flags)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        return [DistributedDataParallel(engine.tf_config, settings, chunk) for chunk in chunks]

    MegatronEngineWithLMHead._build_tf_config = configure
    MegatronEngineWithLMHead._build_megatron_module = build
    transformer_impl.MegatronCheckpointManager = lambda **_: None  # it saves through the bridge
    return flags


class Case(verl_ranks.Case):
    def router_weights(self) -> torch.Tensor:
        named = [(n, p) for n, p in self.engine.module[0].named_parameters() if n.endswith("router.weight")]
        return torch.cat([parameter.detach().float().flatten() for _, parameter in named])


class Tokens:
    """The input ids of the last forward of a chunk."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self.seen = np.zeros(0, np.int64)
        chunk.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self.seen = kwargs["input_ids"].reshape(-1).cpu().numpy().copy()


def main() -> None:
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text())
    path, out = Path(plan["model"]), Path(plan["out"])
    dist.init_process_group("gloo")
    result: dict[str, Any] = {"errors": {}}
    with cpu.without_gpu():
        flags = build_without_bridge(path, moe_token_dispatcher_type="alltoall")
        twice = ["actor_rollout_ref.actor.megatron.router_replay.mode=R3"]
        for name, flag, overrides in (("fused", True, []), ("twice", False, twice)):
            flags["moe_router_fusion"] = flag
            try:
                Case({**plan["case"], "overrides": [*plan["case"]["overrides"], *overrides]}, path)
            except R3Error as error:
                result["errors"][name] = f"{type(error).__name__}: {error}"
        flags["moe_router_fusion"] = False
        running = Case(plan["case"], path)
        result["engine"] = type(running.engine).__name__
        samples = [sample for step in ShardStore(plan["case"]["shards"]).stores() for sample in step]
        tokens = Tokens(running.engine.module[0])
        arrays = {"mask": running.data.batch["response_mask"], "rollout": running.data.batch["rollout_log_probs"]}
        arrays["live"] = running.log_prob(enable_routing_replay=False)
        with observe(running.engine.module) as seen:
            arrays["replay"] = running.log_prob()
            calls = [(layer, ids.numpy(), tokens.seen, False) for layer, ids in seen.items()]
            result["log_prob"] = verl_ranks.compare(calls, samples)
            before = running.router_weights()
            metrics = running.update(arrays["replay"])
            result["metrics"] = {name: value for name, value in metrics.items() if "r3/" in name}
            calls = [(layer, ids.numpy(), tokens.seen, False) for layer, ids in seen.items()]
            result["update"] = verl_ranks.compare(calls, samples)
            result["routers_moved"] = float((running.router_weights() - before).abs().max())
        arrays = {name: tensor.clone() for name, tensor in arrays.items()}
        torch.save({"result": result, "arrays": arrays}, out / f"megatron.{dist.get_rank()}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
