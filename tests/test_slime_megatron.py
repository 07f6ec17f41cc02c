"""slime's trainer on a real Megatron-core model: the experts that tokens are sent to are the shards', lazily and directly.

Megatron-core 0.16.1 is patched as slime's image patches it: two lines around the router's top-k and one in
`TopKRouter.__init__`. What is read is the routing map that the router hands to the dispatcher.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_models as models
import numpy as np
import pytest
import slime_standins as slime
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as moe_router
from torch import nn

from r3 import RolloutSample, ShardStore, shard
from r3.rollout.slime import write_shard
from r3.trainers.megatron.cpu import without_gpu
from r3.trainers.megatron.model import initialize
from r3.trainers.slime import init

pytestmark = pytest.mark.engine

LENGTHS, BATCHES = (9, 14, 6, 11), [[1, 0], [3], [2]]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PATCH = """
    from slime.utils.routing_replay import get_routing_replay_compute_topk
    compute_topk = get_routing_replay_compute_topk(compute_topk)

    if score_function == "softmax":"""


@pytest.fixture(autouse=True)
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "1")
    monkeypatch.setenv("ROUTING_REPLAY_STAGE", "fallthrough")
    slime.install(monkeypatch)
    with without_gpu():
        initialize()
        _patch_as_slime_does(monkeypatch)
        yield


def _patch_as_slime_does(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(moe_utils.topk_routing_with_score_function)
    anchor = '\n    if score_function == "softmax":'
    assert source.count(anchor) == 1
    namespace = dict(vars(moe_utils))
    exec(compile(source.replace(anchor, PATCH), "slime's megatron.patch", "exec"), namespace)
    monkeypatch.setattr(moe_router, "topk_routing_with_score_function", namespace["topk_routing_with_score_function"])
    original = moe_router.TopKRouter.__init__

    def __init__(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        sys.modules["slime.utils.routing_replay"].register_routing_replay(self)

    monkeypatch.setattr(moe_router.TopKRouter, "__init__", __init__)


@pytest.fixture
def args(tmp_path: Path) -> Any:
    return slime.arguments(tmp_path / "shards")


def rollout(args: Any) -> tuple[dict[str, Any], list[RolloutSample]]:
    engine, samples = slime.Engine(args), []
    for i, length in enumerate(LENGTHS):
        sample = sys.modules["slime.utils.types"].Sample(index=i, group_index=0)
        sample.tokens = [1, 2, 3]
        engine.extend(sample, length - 3)
        sample.tokens = [token % models.VOCABULARY for token in sample.tokens]
        samples.append(write_shard(args, sample, rollout_id=0))
    data = {
        "tokens": [torch.tensor(each.tokens) for each in samples],
        "sample_indices": [each.index for each in samples],
        "rollout_routed_experts": [torch.as_tensor(each.rollout_routed_experts) for each in samples],
    }
    return data, [ShardStore(args.r3_store).step(0).open(s.metadata["r3"]["key"].rpartition("/")[2]) for s in samples]


class Watched:
    """The routing maps [positions, E] of each decoder layer, call by call."""

    def __init__(self, chunk: nn.Module) -> None:
        self.calls: dict[int, list[torch.Tensor]] = {layer: [] for layer in models.SPEC.moe_layers}
        for module in chunk.modules():
            if isinstance(module, moe_router.TopKRouter):
                module.register_forward_hook(self._see)

    def _see(self, module: Any, _arguments: Any, output: Any) -> None:
        self.calls[module.layer_number - 1].append(output[1].reshape(-1, models.SPEC.num_experts))

    def take(self) -> dict[int, list[torch.Tensor]]:
        calls, self.calls = self.calls, {layer: [] for layer in self.calls}
        return calls


def expected_map(batch: list[int], samples: list[RolloutSample], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions with a record, their routing map [r, E]) of a packed micro-batch."""
    position = models.SPEC.moe_layers.index(layer)
    recorded = np.concatenate([samples[i].routes.recorded for i in batch])
    ids = np.concatenate([samples[i].routes.ids[position] for i in batch])[recorded]
    wanted = torch.zeros(len(ids), models.SPEC.num_experts, dtype=torch.bool)
    return torch.from_numpy(np.flatnonzero(recorded)), wanted.scatter(1, torch.from_numpy(ids.astype(np.int64)), True)


def require_replayed(calls: dict[int, list[torch.Tensor]], order: list[int], samples: list[RolloutSample]) -> None:
    for layer, maps in calls.items():
        assert len(maps) == len(order)
        for number, routing_map in zip(order, maps, strict=True):
            rows, wanted = expected_map(BATCHES[number], samples, layer)
            assert torch.equal(routing_map[rows], wanted), f"layer {layer}, micro-batch {number}"


def forward_step(args: Any, iterator: Any, chunk: nn.Module) -> torch.Tensor:
    """As slime's forward step: a batch, then the chunk, with the stage set around it while slime's replay is on."""
    batch = sys.modules["slime.backends.megatron_utils.model"].get_batch(
        iterator, ["tokens"], args.data_pad_size_multiplier, args.allgather_cp
    )
    enabled, before = os.environ["ENABLE_ROUTING_REPLAY"] == "1", os.environ["ROUTING_REPLAY_STAGE"]
    if enabled:
        os.environ["ROUTING_REPLAY_STAGE"] = "replay_forward"
    width = batch["tokens"].shape[1]
    output = chunk(input_ids=batch["tokens"], position_ids=torch.arange(width)[None], attention_mask=None)
    if enabled:
        os.environ["ROUTING_REPLAY_STAGE"] = before
    return output


def train(args: Any, data: dict[str, Any], chunk: nn.Module) -> None:
    """Two micro-batches in flight, as in 1F1B."""
    os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"
    iterator = sys.modules["slime.backends.megatron_utils.data"].DataIterator(data, BATCHES)
    waiting = []
    for _ in BATCHES:
        waiting.append(forward_step(args, iterator, chunk))
        if len(waiting) == 2:
            waiting.pop(0).square().mean().backward()
    waiting.pop(0).square().mean().backward()


RECOMPUTED = [0, 1, 0, 2, 1, 2]  # forwards and recomputes of the loop above


def test_lazy_rows_reach_the_experts_in_forward_and_recompute(args: Any) -> None:
    data, samples = rollout(args)
    init(args)
    chunk = models.build(models.config(**FULL))
    seen = Watched(chunk)
    actor = slime.MegatronTrainRayActor(args, [chunk])
    iterators = [sys.modules["slime.backends.megatron_utils.data"].DataIterator(data, BATCHES)]
    actor.fill_routing_replay(iterators, [3], data)
    replay = sys.modules["slime.utils.routing_replay"].RoutingReplay

    os.environ["ROUTING_REPLAY_STAGE"] = "replay_forward"
    with torch.no_grad():
        for _ in BATCHES:
            forward_step(args, iterators[0], chunk)
    require_replayed(seen.take(), [0, 1, 2], samples)
    replay.clear_all_forward()
    train(args, data, chunk)
    require_replayed(seen.take(), RECOMPUTED, samples)
    replay.clear_all()
    gradients = [p.grad for name, p in chunk.named_parameters() if "router" in name]
    assert all(g is not None and bool(g.any()) for g in gradients)


def test_direct_attach_replays_the_actor_s_passes_beside_slime_s_patch(args: Any) -> None:
    data, samples = rollout(args)
    path = next(Path(args.r3_store).rglob("1-*.safetensors"))
    samples[1].routes.recorded[6] = False  # the lazy way would refuse this one
    shard.save_file(samples[1], path)
    args.r3_trainer = "direct"
    args.custom_megatron_before_log_prob_hook_path = "r3.trainers.slime.before_log_prob"
    args.custom_megatron_before_train_step_hook_path = "r3.trainers.slime.before_train_step"
    init(args)
    from r3.trainers.slime import before_log_prob, before_train_step

    chunk = models.build(models.config(**FULL))
    assert sys.modules["slime.utils.routing_replay"].RoutingReplay.all_routing_replays == []
    seen = Watched(chunk)
    iterator = sys.modules["slime.backends.megatron_utils.data"].DataIterator(data, BATCHES)

    def log_probs(prefix: str) -> dict[int, list[torch.Tensor]]:
        before_log_prob(args, [chunk], prefix)
        iterator.reset()
        with torch.no_grad():
            for _ in BATCHES:
                forward_step(args, iterator, chunk)
        return seen.take()

    plain = log_probs("ref_")
    require_replayed(log_probs(""), [0, 1, 2], samples)
    rows = [expected_map(batch, samples, 1)[0] for batch in BATCHES]
    wanted = torch.cat([expected_map(batch, samples, 1)[1] for batch in BATCHES])
    assert not torch.equal(torch.cat([m[r] for m, r in zip(plain[1], rows, strict=True)]), wanted)
    again = log_probs("ref_")
    assert all(torch.equal(a, b) for layer in plain for a, b in zip(plain[layer], again[layer], strict=True))

    before_train_step(args, 0, 0, [chunk], None, None)
    train(args, data, chunk)
    require_replayed(seen.take(), RECOMPUTED, samples)
    handle = chunk.__dict__["_r3_slime"]
    recorded = sum(int(s.routes.recorded.sum()) for s in samples)
    assert handle.replay.coverage.replayed == 2 * recorded  # a log-prob pass and a training pass
    handle.close()
    assert sys.modules["slime.backends.megatron_utils.model"].get_batch is slime.get_batch
