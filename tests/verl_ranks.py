"""One rank of veRL's trainer on a CPU, for tests: veRL's own workers and engines on batches that its agent loops made.

Run by torchrun with a JSON file of cases; each case builds a worker (`ActorRolloutRefWorker`), runs the passes that it names, and
writes what was seen. What the experts received is watched by hooks on the experts themselves, behind the override, and compared
here with the shards' routes token by token; nothing of r3's layouts is used for that.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl_parts

os.environ.update(
    {**verl_parts.ENVIRONMENT, **os.environ}
)  # before veRL is imported; this process is a rank and nothing else

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from r3 import RolloutSample, ShardStore
from r3.errors import R3Error
from r3.routers import find_routers


class Watch:
    """What the experts of each layer receive, call by call, with the input ids of the forward that is running or was last."""

    def __init__(self, module: torch.nn.Module, spec: Any, group: Any) -> None:
        self.spec, self.group = spec, group
        self.calls: list[tuple[int, np.ndarray, np.ndarray, bool]] = []  # layer, ids [n, K], input ids [n], in backward
        self._input = np.zeros(0, np.int64)
        self._handles = [module.register_forward_pre_hook(self._forward, with_kwargs=True)]
        for layer, found in find_routers(module, spec).items():
            self._handles.append(found.experts.register_forward_pre_hook(self._experts(layer)))

    def _forward(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._input = self._whole(kwargs["input_ids"].reshape(-1, 1)).ravel()

    def _experts(self, layer: int) -> Any:
        def hook(_module: Any, args: tuple[Any, ...]) -> None:
            ids = next(a for a in args if not a.is_floating_point() and a.shape[-1] == self.spec.top_k)
            backward = torch._C._current_graph_task_id() != -1
            self.calls.append((layer, self._whole(ids.reshape(-1, self.spec.top_k)), self._input, backward))

        return hook

    def _whole(self, local: torch.Tensor) -> np.ndarray:
        """[n, K] of all ranks of the sequence-parallel group, one after another."""
        if self.group is None:
            return local.cpu().numpy().copy()
        parts = [torch.empty_like(local.contiguous()) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        return torch.cat(parts).cpu().numpy()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def compare(calls: list[Any], samples: list[RolloutSample]) -> dict[str, int]:
    """How many (token, layer) of the calls used the recorded experts, by finding each sample's tokens in the input ids."""
    result = {"compared": 0, "equal": 0, "recomputed": 0}
    for layer, ids, tokens, backward in calls:
        for sample in samples:
            length = sample.num_tokens
            windows = np.lib.stride_tricks.sliding_window_view(tokens, length) if len(tokens) >= length else []
            for start in np.flatnonzero([np.array_equal(w, sample.tokens) for w in windows]):
                recorded = np.flatnonzero(sample.routes.recorded)
                want = np.sort(sample.routes.ids[sample.spec.moe_layers.index(layer)][recorded], axis=-1)
                same = (np.sort(ids[start + recorded], axis=-1) == want).all(axis=-1)
                result["compared"] += len(same)
                result["equal"] += int(same.sum())
                result["recomputed"] += len(same) if backward else 0
    return result


@contextlib.contextmanager
def watched(engine: Any) -> Iterator[Watch]:
    watch = Watch(engine.module, engine._replay.spec, engine.ulysses_parallel_group)
    try:
        yield watch
    finally:
        watch.close()


class Case:
    """One worker and its passes."""

    def __init__(self, case: dict[str, Any], model: Path) -> None:
        name = case.get("config", "ppo_trainer")
        config = verl_parts.compose(Path(case.get("model", model)), *case.get("overrides", []), name=name)
        self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, role=case.get("role", "actor"))
        self.worker.init_model()
        role = self.worker.actor if case.get("role", "actor") == "actor" else self.worker.ref
        self.engine = role.engine
        data = DataProto.load_from_disk(case["batch"])
        data.meta_info["temperature"] = 1.0
        size = self.engine.get_data_parallel_size()
        self.data = data.chunk(size)[self.engine.get_data_parallel_rank()]

    def batch(self, **flags: Any) -> Any:
        """The rank's part in veRL's no-padding format, as its trainers make it."""
        batch = left_right_2_no_padding(self.data.to_tensordict())
        for key in flags.pop("without", ()):
            del batch[key]
        tu.assign_non_tensor(batch, **{"calculate_entropy": False, "compute_loss": False, **flags})
        return batch

    def log_prob(self, **flags: Any) -> torch.Tensor | None:
        """[batch, response] float32; None on a rank whose results veRL does not collect (all but one of a Ulysses group)."""
        batch = self.batch(**flags)
        compute = self.worker.compute_log_prob if self.worker.actor else self.worker.compute_ref_log_prob
        output = compute(batch)
        return None if output is None else no_padding_2_padding(output["log_probs"], batch).float()

    def update(self, old_log_probs: torch.Tensor) -> dict[str, Any]:
        self.data.batch["old_log_probs"] = old_log_probs
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.data.batch["advantages"] = torch.randn(old_log_probs.shape, generator=generator)
        batch = self.batch(
            compute_loss=True, distillation_use_topk=False, distillation_only=False, global_batch_size=len(self.data) * 2,
            mini_batch_size=len(self.data) * self.engine.get_data_parallel_size(), epochs=1, seed=1,
            dataloader_kwargs={"shuffle": False},
        )  # fmt: skip
        output = self.worker.update_actor(batch)
        return {} if output is None else dict(output["metrics"])

    def router_weights(self) -> torch.Tensor:
        named = [(n, p) for n, p in self.engine.module.named_parameters() if n.endswith("gate.weight")]
        return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().detach().float().flatten() for _, p in named])


def run(case: dict[str, Any], model: Path, out: Path) -> None:
    result: dict[str, Any] = {"engine": "", "errors": {}}
    running = Case(case, model)
    result["engine"] = type(running.engine).__name__
    rank = dist.get_rank()
    arrays: dict[str, torch.Tensor | None] = {
        "mask": running.data.batch["response_mask"],
        "rollout": running.data.batch["rollout_log_probs"],
    }
    if case.get("role", "actor") == "ref":
        arrays["ref"] = running.log_prob()
    else:
        samples = [sample for step in ShardStore(case["shards"]).stores() for sample in step]
        if case.get("live"):
            arrays["live"] = running.log_prob(enable_routing_replay=False)
        if case.get("reference"):  # with LoRA: the actor without its adapter
            arrays["ref"] = running.log_prob(no_lora_adapter=True)
        with watched(running.engine) as watch:
            arrays["replay"] = running.log_prob()
            result["log_prob"] = compare(watch.calls, samples)
            watch.calls.clear()
            if case.get("update"):
                before = running.router_weights()
                result["metrics"] = {k: v for k, v in running.update(arrays["replay"]).items() if "r3/" in k}
                result["update"] = compare(watch.calls, samples)
                result["routers_moved"] = float((running.router_weights() - before).abs().max())
    for name, flags in case.get("refused", {}).items():
        try:
            running.log_prob(**flags)
            result["errors"][name] = "nothing"
        except R3Error as error:
            result["errors"][name] = f"{type(error).__name__}: {error}"
    arrays = {
        name: tensor.clone() for name, tensor in arrays.items() if tensor is not None
    }  # of their own, not views of a batch
    torch.save({"result": result, "arrays": arrays}, out / f"{case['name']}.{rank}.pt")


def main() -> None:
    torch.set_num_threads(1)
    plan = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    for case in plan["cases"]:
        run(case, Path(plan["model"]), Path(plan["out"]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
