"""veRL 0.9.1 and a real vLLM on a CPU: prompts to routes, shards, batches, log-probs and one update, all of it veRL's own code.

What stands in is said in tests/verl_parts.py (the HTTP handle of a server) and r3/trainers/verl/cpu.py (veRL's platform).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch
import verl_parts
from helpers import random_sample

from r3 import ShardStore, shard
from r3.errors import ConfigError, WireError
from r3.handoff import NOTE, Note
from r3.metrics import gap_metrics
from r3.rollout.server import VllmServer
from r3.rollout.verl import settings

if TYPE_CHECKING:
    from verl import DataProto

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("verl_environment")]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in (tiny_model / "prompts.jsonl").read_text().splitlines()[:8]]


@pytest.fixture(scope="module")
def rollout(
    vllm_server: VllmServer, tiny_model: Path, prompts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The same prompts through the single-turn loop twice: with keys in the batch, and with routes in it."""
    root = tmp_path_factory.mktemp("verl")
    found: dict[str, Any] = {"root": root, "shards": root / "shards"}
    for carry in ("key", "batch"):
        override = verl_parts.loops(
            root / f"{carry}.yaml", carry=carry, store=str(root / "shards" if carry == "key" else "")
        )
        server = verl_parts.HttpServer(str(tiny_model), [vllm_server.url])
        batch = verl_parts.generate(verl_parts.compose(tiny_model, override), server, prompts)
        batch.save_to_disk(root / f"{carry}.pkl")
        found[carry] = batch
        found[f"{carry} answers"] = server.answered
    return found


def test_a_single_turn_becomes_a_shard_and_only_its_key_is_in_the_batch(rollout: dict[str, Any]) -> None:
    batch: DataProto = rollout["key"]
    assert "routed_experts" not in batch.batch
    store = ShardStore(rollout["shards"]).step(3)
    assert len(store) == len(batch)
    for row, text in enumerate(batch.non_tensor_batch[NOTE]):
        note = Note.from_json(text)
        sample = store.open(Path(note.shard).name.removesuffix(".safetensors"))
        item = batch.batch[row]
        held = item["attention_mask"].bool()
        np.testing.assert_array_equal(sample.tokens, item["input_ids"][held].numpy())
        assert sample.loss_mask.sum() == item["response_mask"].sum()
        assert note.recorded == ((0, sample.num_tokens - 1),)
        assert note.weight_versions == (3, 3)
        assert sample.group_id == batch.non_tensor_batch["uid"][row]
        used = item["response_mask"].bool()
        np.testing.assert_array_equal(
            sample.rollout_logprobs[sample.loss_mask], item["rollout_log_probs"][used].numpy()
        )


def test_routes_in_the_batch_are_the_engines_where_the_tokens_are(rollout: dict[str, Any]) -> None:
    batch: DataProto = rollout["batch"]
    by_tokens = {tuple(a.token_ids): a for a in rollout["batch answers"]}
    for row in range(len(batch)):
        item = batch.batch[row]
        held = item["attention_mask"].bool()
        answer = by_tokens[tuple(item["responses"][item["response_mask"].bool()].tolist())]
        np.testing.assert_array_equal(item["routed_experts"][held][:-1].numpy(), answer.routed_experts)
        assert not Note.from_json(batch.non_tensor_batch[NOTE][row]).shard


def test_a_response_that_is_cut_loses_its_rows_with_its_tokens(
    vllm_server: VllmServer, tiny_model: Path, prompts: list[str], tmp_path: Path
) -> None:
    override = verl_parts.loops(tmp_path / "loops.yaml")
    config = verl_parts.compose(tiny_model, override, f"{ROLLOUT}.response_length=20")
    server = verl_parts.HttpServer(str(tiny_model), [vllm_server.url], most=30)
    batch = verl_parts.generate(config, server, prompts[:1])
    note, item = Note.from_json(batch.non_tensor_batch[NOTE][0]), batch.batch[0]
    held = item["attention_mask"].bool()
    assert note.num_tokens == int(held.sum()) == len(server.asked[0]) + 20
    assert note.recorded == ((0, note.num_tokens),)  # the engine went on, so it has read the last token as well
    kept = item["routed_experts"][held].numpy()
    np.testing.assert_array_equal(kept, server.answered[0].routed_experts[: note.num_tokens])


@pytest.fixture(scope="module")
def newer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmServer, Path]]:
    """A server after a weight update: the same model with its routers moved."""
    path = tmp_path_factory.mktemp("newer") / "model"
    shutil.copytree(tiny_model, path)
    weights = safetensors.torch.load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if name.endswith("gate.weight"):
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
            weights[name] = (tensor.float() + 0.05 * noise).to(tensor.dtype)
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with VllmServer(path, dtype="bfloat16", served_model_name=str(tiny_model)) as server:
        yield server, path


@pytest.fixture(scope="module")
def conversation(
    vllm_server: VllmServer,
    newer: tuple[VllmServer, Path],
    tiny_model: Path,
    prompts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    """Two turns with a tool between them, in veRL's tool loop; the weights are updated between the turns."""
    from verl import DataProto

    root = tmp_path_factory.mktemp("tools")
    config = verl_parts.compose(
        tiny_model,
        verl_parts.loops(root / "loops.yaml", store=str(root / "shards")),
        f"{ROLLOUT}.agent.default_agent_loop=tool_agent",
        f"{ROLLOUT}.multi_turn.format=always",
        f"{ROLLOUT}.multi_turn.function_tool_path={Path(__file__).with_name('verl_tools.py')}",  # its parser as well
        f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
        f"{ROLLOUT}.response_length=120",
        f"{ROLLOUT}.prompt_length=256",
    )
    batches, servers = [], []
    for text in prompts[:2]:
        urls = [vllm_server.url, newer[0].url]
        server = verl_parts.HttpServer(str(tiny_model), urls, versions=[6, 7], most=24)
        batches.append(verl_parts.generate(config, server, [text]))
        servers.append(server)
    for batch in batches:
        batch.meta_info = {}
    whole = DataProto.concat(batches)
    whole.save_to_disk(root / "batch.pkl")
    return {"batch": whole, "servers": servers, "shards": root / "shards", "pickle": root / "batch.pkl"}


def test_two_turns_keep_the_rows_of_the_weights_that_sampled(conversation: dict[str, Any]) -> None:
    differing = 0
    for row, server in enumerate(conversation["servers"]):
        note = Note.from_json(conversation["batch"].non_tensor_batch[NOTE][row])
        path = Path(note.shard)
        sample = ShardStore(path.parent).open(path.name.removesuffix(".safetensors"))
        (first, second), (asked, again) = server.answered, server.asked
        assert again[: len(asked) + 24] == [*asked, *first.token_ids]
        assert sample.tokens.tolist() == [*again, *second.token_ids]
        edge = len(asked) + 23  # the last token of the first turn was read by the second turn's prefill
        rows = sample.routes.ids.transpose(1, 0, 2)
        np.testing.assert_array_equal(rows[:edge], first.routed_experts)
        np.testing.assert_array_equal(rows[edge:-1], second.routed_experts[edge:])
        differing += int((np.sort(second.routed_experts[:edge]) != np.sort(first.routed_experts)).any(-1).sum())
        assert sample.routes.recorded.tolist() == [True] * (sample.num_tokens - 1) + [False]
        tool = sample.num_tokens - len(asked) - 48
        assert tool > 10
        assert sample.loss_mask.tolist() == [False] * len(asked) + [True] * 24 + [False] * tool + [True] * 24
        assert sample.weight_version.tolist() == [-1] * len(asked) + [6] * 24 + [-1] * tool + [7] * 24
        assert note.weight_versions == (6, 7)
    assert differing > 0  # the second turn's prefill did choose other experts for the first turn's tokens


def test_an_interrupted_response_is_stitched_below_verls_resuming_client(
    vllm_server: VllmServer, newer: tuple[VllmServer, Path], tiny_model: Path, prompts: list[str], tmp_path: Path
) -> None:
    config = verl_parts.compose(tiny_model, verl_parts.loops(tmp_path / "loops.yaml", store=str(tmp_path / "shards")))
    urls = [vllm_server.url, newer[0].url]
    server = verl_parts.HttpServer(str(tiny_model), urls, versions=[1, 2], cuts={0: 10})
    batch = verl_parts.generate(config, server, prompts[:1], resuming=True)
    sample = next(
        iter(ShardStore(tmp_path / "shards").step(2))
    )  # that of the newest weights: this worker knows no other
    (first, second), prompt = server.answered, server.asked[0]
    assert len(second.token_ids) == verl_parts.RESPONSE_LENGTH - 10
    edge = len(prompt) + 9
    rows = sample.routes.ids.transpose(1, 0, 2)
    np.testing.assert_array_equal(rows[:edge], first.routed_experts)
    np.testing.assert_array_equal(rows[edge:-1], second.routed_experts[edge:])
    assert sample.weight_version[sample.loss_mask].tolist() == [1] * 10 + [2] * (verl_parts.RESPONSE_LENGTH - 10)
    assert batch.non_tensor_batch["min_global_steps"][0] == 1


def test_a_server_without_the_flag_and_a_loop_without_the_setting_are_refused(
    vllm_server: VllmServer, tiny_model: Path, prompts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    override = verl_parts.loops(tmp_path / "loops.yaml")

    class Routeless(verl_parts.HttpServer):
        async def remote(self, **request: Any) -> Any:
            return (await super().remote(**request)).model_copy(update={"routed_experts": None})

    config = verl_parts.compose(tiny_model, override)
    with pytest.raises(WireError, match="enable-return-routed-experts"):
        verl_parts.generate(config, Routeless(str(tiny_model), [vllm_server.url]), prompts[:1])
    config = verl_parts.compose(tiny_model, override, f"{ROLLOUT}.enable_rollout_routing_replay=False")
    with pytest.raises(Exception, match="the rollout engine is not asked for routes") as caught:
        verl_parts.generate(config, verl_parts.HttpServer(str(tiny_model), [vllm_server.url]), prompts[:1])
    assert isinstance(caught.value.__cause__, ConfigError)  # hydra, which makes the loop, raises its own around it
    assert "enable_rollout_routing_replay=True" in str(caught.value.__cause__)
    monkeypatch.setattr(settings, "announced_trainers", list)  # a Ray job in which no engine of r3 announced itself
    with pytest.raises(ConfigError, match="no engine of r3 is in this job"):
        settings.require_trainer()
    monkeypatch.setattr(settings, "announced_trainers", lambda: [{"engine": "ReplayFSDPEngine"}])
    settings.require_trainer()


def test_a_loop_that_returns_several_outputs_is_refused(tiny_model: Path) -> None:
    from r3.rollout.verl import ReplayLoopMixin

    class Branching:
        def __init__(self, config: Any, server_manager: Any) -> None:
            self.config, self.server_manager = config, server_manager

        async def run(self, *_: Any, **__: Any) -> list[Any]:
            return [1, 2]

    class Loop(ReplayLoopMixin, Branching): ...

    loop = Loop(verl_parts.compose(tiny_model), None)
    with pytest.raises(ConfigError, match=r"(?s)several outputs.*a list of 2"):
        asyncio.run(loop.run({}))


def test_a_validation_is_left_alone(
    vllm_server: VllmServer, tiny_model: Path, prompts: list[str], tmp_path: Path
) -> None:
    config = verl_parts.compose(tiny_model, verl_parts.loops(tmp_path / "loops.yaml", store=str(tmp_path / "shards")))
    server = verl_parts.HttpServer(str(tiny_model), [vllm_server.url])
    batch = verl_parts.generate(config, server, prompts[:1], validate=True)
    assert NOTE not in batch.non_tensor_batch
    assert "routed_experts" not in batch.batch
    assert not (tmp_path / "shards").exists()


# The trainer: two ranks


def packed(name: str) -> list[str]:
    return [
        f"{MODEL}.use_remove_padding=True",
        f"{ACTOR}.use_dynamic_bsz=True",
        f"{ROLLOUT}.log_prob_use_dynamic_bsz=True",
        f"{ACTOR}.ppo_max_token_len_per_gpu={name}",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu={name}",
    ]


@pytest.fixture(scope="module")
def trained(
    rollout: dict[str, Any],
    conversation: dict[str, Any],
    newer: tuple[VllmServer, Path],
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, Any]]]:
    """Each case on two gloo ranks of one torchrun: {name: [rank 0, rank 1]}."""
    out = tmp_path_factory.mktemp("ranks")
    keys, routes, shards = str(rollout["root"] / "key.pkl"), str(rollout["root"] / "batch.pkl"), str(rollout["shards"])
    sp = [
        f"{MODEL}.use_remove_padding=True",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.fsdp_config.pad_to_length=True",
        f"{ACTOR}.fsdp_config.pad_to_length_bucket=64",
    ]
    cases = [
        {"name": "padded", "batch": keys, "shards": shards, "live": True, "update": True,
         "refused": {"dropped": {"without": [NOTE]}}},
        {"name": "packed", "batch": routes, "shards": shards, "update": True, "overrides": packed("400")},
        {"name": "ulysses", "batch": keys, "shards": shards, "overrides": sp},
        {"name": "turns", "batch": str(conversation["pickle"]), "shards": str(conversation["shards"]),
         "model": str(newer[1]), "overrides": packed("600")},
        {"name": "ref", "batch": keys, "shards": shards, "role": "ref",
         "refused": {"asked": {"enable_routing_replay": True}}},
        {"name": "lora", "batch": keys, "shards": shards, "live": True, "reference": True,
         "overrides": [f"{MODEL}.lora_rank=4"]},
        # last: veRL patches the class of the model for it
        {"name": "fused", "batch": keys, "shards": shards,
         "overrides": [f"{MODEL}.use_remove_padding=True", f"{MODEL}.use_fused_kernels=True",
                       f"{MODEL}.fused_kernel_options.impl_backend=torch"]},
    ]  # fmt: skip
    run_ranks("verl_ranks.py", {"model": str(tiny_model), "out": str(out), "cases": cases})
    return {case["name"]: results_of(out, case["name"]) for case in cases}


def run_ranks(script: str, plan: dict[str, Any]) -> None:
    path = Path(plan["out"]) / "plan.json"
    path.write_text(json.dumps(plan))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run(
        [*command, str(Path(__file__).with_name(script)), str(path)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-6000:]


def results_of(out: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(out / f"{name}.{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.parametrize("name", ["padded", "packed", "fused", "ulysses", "turns", "lora"])
def test_the_experts_get_the_shards_routes(name: str, trained: dict[str, Any]) -> None:
    for rank in trained[name]:
        result = rank["result"]
        assert result["engine"] == "ReplayFSDPEngine"
        passes = [result[key] for key in ("log_prob", "update") if key in result]
        for seen in passes:
            assert seen["compared"] > 0
            assert seen["equal"] == seen["compared"]
        if "update" in result:  # gradient checkpointing is veRL's default: every row once more in backward
            assert result["update"]["recomputed"] == result["log_prob"]["compared"] == result["update"]["compared"] / 2
            assert result["routers_moved"] > 0


def gap(ranks: list[dict[str, Any]], name: str) -> Any:
    parts = []
    for rank in ranks:
        arrays = rank["arrays"]
        mask = arrays["mask"].bool()
        parts.append((arrays[name] - arrays["rollout"])[mask].double().numpy())
    return gap_metrics(np.concatenate(parts))


def test_replay_brings_the_log_probs_to_the_rollouts(trained: dict[str, Any]) -> None:
    live, replay = gap(trained["padded"], "live"), gap(trained["padded"], "replay")
    assert replay.k3 < live.k3 / 2
    assert replay.mean_abs < live.mean_abs
    for name in ("packed", "fused"):
        assert gap(trained[name], "replay").k3 < live.k3 / 2


def test_the_reference_routes_live_and_refuses_to_replay(trained: dict[str, Any]) -> None:
    live, reference = gap(trained["padded"], "live"), gap(trained["ref"], "ref")
    assert reference.k3 == pytest.approx(live.k3, rel=1e-3)  # the same weights, routed live
    assert trained["ref"][0]["result"]["engine"] == "ReplayFSDPEngine"
    assert "a reference model is asked to replay" in trained["ref"][0]["result"]["errors"]["asked"]


def test_the_reference_under_lora_is_the_actor_without_its_adapter_and_routes_live(trained: dict[str, Any]) -> None:
    for rank in trained["lora"]:  # an adapter that has not been trained changes nothing: what differs is the routing
        arrays = rank["arrays"]
        assert torch.equal(arrays["ref"], arrays["live"])
        assert not torch.equal(arrays["replay"], arrays["live"])


def test_a_batch_that_lost_its_notes_is_refused(trained: dict[str, Any]) -> None:
    message = trained["padded"][0]["result"]["errors"]["dropped"]
    assert "this batch has no routes to replay" in message
    assert "enable_rollout_routing_replay=True" in message


def test_metrics_are_those_of_all_ranks(trained: dict[str, Any], rollout: dict[str, Any]) -> None:
    metrics = trained["padded"][0]["result"]["metrics"]
    tokens = int(rollout["key"].batch["attention_mask"].sum())
    assert metrics["r3/rows_replayed"] == [tokens - 8] * 2  # once for each rank, and the same
    assert metrics["r3/rows_unrecorded"] == [8] * 2
    assert metrics["r3/coverage"][0] == pytest.approx((tokens - 8) / tokens)
    expected = gap(trained["padded"], "replay")
    for name, value in (("k3", expected.k3), ("mean_abs", expected.mean_abs), ("f_1.1", expected.exceed["1.1"])):
        assert metrics[f"r3/old_log_prob/{name}"][0] == pytest.approx(value, rel=1e-4)
    assert metrics["r3/old_log_prob/max_ratio"][0] == pytest.approx(expected.max_ratio, rel=1e-4)
    shares = [metrics[f"r3/agreement/layer_{layer:03d}"][0] for layer in range(8)]
    assert metrics["r3/agreement/layer_min"][0] == min(shares)
    assert metrics["r3/agreement"][0] == pytest.approx(np.mean(shares))


# Megatron: expert parallel on two ranks, packed rows, the all-to-all dispatcher


@pytest.fixture(scope="module")
def megatron(
    rollout: dict[str, Any], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("megatron")
    overrides = [
        f"{MODEL}.use_remove_padding=True",
        f"{ACTOR}.megatron.expert_model_parallel_size=2",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ACTOR}.optim.total_training_steps=10",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    ]
    case = {"name": "megatron", "config": "ppo_megatron_trainer", "overrides": overrides}
    case |= {"batch": str(rollout["root"] / "key.pkl"), "shards": str(rollout["shards"])}
    run_ranks("verl_megatron_ranks.py", {"model": str(tiny_model), "out": str(out), "case": case})
    return results_of(out, "megatron")


def test_megatrons_dispatcher_gets_the_shards_routes(megatron: list[dict[str, Any]]) -> None:
    for rank in megatron:
        result = rank["result"]
        assert result["engine"] == "ReplayMegatronEngine"
        for name in ("log_prob", "update"):
            assert result[name]["equal"] == result[name]["compared"] > 0
        assert result["routers_moved"] > 0
    metrics = megatron[0]["result"]["metrics"]
    live, replay = gap(megatron, "live"), gap(megatron, "replay")
    assert replay.k3 < live.k3 / 2
    assert metrics["r3/old_log_prob/k3"][0] == pytest.approx(replay.k3, rel=1e-3)
    assert metrics["r3/coverage"][0] > 0.99


def test_megatrons_fused_router_and_a_second_replay_are_refused(megatron: list[dict[str, Any]]) -> None:
    errors = megatron[0]["result"]["errors"]
    assert "moe_router_fusion" in errors["fused"]
    assert "two would replay" in errors["twice"]


@pytest.mark.parametrize("place", ["memory://verl-loops/run", "run"])
def test_the_key_of_an_agent_loop_is_good_anywhere(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL stays one, a relative directory becomes absolute; old steps go."""
    from r3.rollout.verl.loops import ReplayLoopMixin
    from r3.rollout.verl.settings import Settings

    monkeypatch.chdir(tmp_path)
    loop: Any = SimpleNamespace(settings=Settings(store=place, keep_steps=2))
    for step in (3, 4, 5):
        sample = random_sample(np.random.default_rng(step), sample_id=f"u/{step}")
        key = ReplayLoopMixin._write(loop, sample, {"global_steps": step})
        assert key.startswith(("memory://", str(tmp_path)))
        assert shard.load_file(key).routes.equal(sample.routes)
    assert ShardStore(place).steps() == [4, 5]
