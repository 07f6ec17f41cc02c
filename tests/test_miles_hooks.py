"""miles, slime's fork: samples through its generate hook become shards, and its Megatron and FSDP replay read them."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import families
import miles_standins as miles
import numpy as np
import pytest
import qwen
import slime_standins as slime
import torch
from torch import nn

from r3 import RolloutSample, RoutingSpec, ShardStore, shard
from r3.errors import ConfigError, R3Error, ReplayError, StoreError
from r3.rollout.miles import generate, write_shards
from r3.routers import find_routers, probe
from r3.trainers.miles import fill, fsdp, init, setup_worker
from r3.trainers.slime import finding
from r3.trainers.transformers import observe, right_padded

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS, BATCHES = (9, 14, 4, 7), [[1, 0], [3, 2]]


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    slime.install(monkeypatch, source="")
    miles.install(monkeypatch)
    return slime.arguments(tmp_path / "shards", qkv_format="thd", object_store_backend="ray")


def miles_sample(index: int, length: int, engine: slime.Engine, vocabulary: int = 100) -> Any:
    """A sample as miles' generate leaves it: routes as numpy int32 [N-1, L, K]."""
    sample = slime.Sample(index=index, group_index=index // 2)
    sample.tokens = [1]
    engine.extend(sample, length - 1)
    sample.tokens = [token % vocabulary for token in sample.tokens]
    sample.rollout_routed_experts = sample.rollout_routed_experts.numpy()
    return sample


def call(args: Any, sample: Any, *, evaluation: bool = False) -> Any:
    types = sys.modules["miles.rollout.base_types"]
    return asyncio.run(generate(types.GenerateFnInput(SimpleNamespace(args=args), sample, {}, evaluation)))


def rollout(args: Any, vocabulary: int = 100) -> tuple[dict[str, Any], list[RolloutSample]]:
    """Training data of one rank, and the shards behind it."""
    engine = slime.Engine(args)
    samples = [miles_sample(i, n, engine, vocabulary) for i, n in enumerate(LENGTHS)]
    write_shards(args, [samples[:2], [samples[2:]]], None)
    data = {
        "tokens": [torch.tensor(each.tokens) for each in samples],
        "sample_indices": np.array([each.index for each in samples]),
        "rollout_routed_experts": [torch.from_numpy(each.rollout_routed_experts) for each in samples],
        "max_seq_lens": [16] * len(LENGTHS),
    }
    return data, [ShardStore(args.r3_store).step(1).open(s.metadata["r3"]["key"].rpartition("/")[2]) for s in samples]


# Rollout --------------------------------------------------------------------------------------------------------------


def test_generate_calls_miles_and_writes_what_it_returns(args: Any) -> None:
    engine = slime.Engine(args)
    output_type = sys.modules["miles.rollout.base_types"].GenerateFnOutput

    async def single_turn(_input: Any) -> Any:
        return output_type([miles_sample(7, 9, engine), miles_sample(8, 5, engine)])

    sys.modules["miles.rollout.generate_hub.single_turn"].generate = single_turn  # type: ignore[attr-defined]
    output = call(args, slime.Sample())
    for sample, length in zip(output.samples, (9, 5), strict=True):
        step, _, name = sample.metadata["r3"]["key"].partition("/")
        shard = ShardStore(args.r3_store).step(1).open(name)
        assert step == "step-000001"  # the version of the weights: miles tells its hooks no rollout
        assert (shard.num_tokens, shard.routes.num_recorded) == (length, length - 1)
        # What miles counts, and no bytes.
        assert (len(sample.rollout_routed_experts), sample.rollout_routed_experts.nbytes) == (length - 1, 0)
    assert "r3" not in call(args, slime.Sample(), evaluation=True).samples[0].metadata


def test_missing_rows_of_full_routes_are_miles_own_mark(args: Any) -> None:
    args.r3_routes, args.r3_policy = "full", "lenient"
    engine = slime.Engine(args)
    sample = miles_sample(0, 30, engine)
    sample.rollout_routed_experts = sample.rollout_routed_experts.copy()
    sample.rollout_routed_experts[4:6] = 0
    write_shards(args, [[sample]], None)
    rows = sample.rollout_routed_experts
    assert (rows[4:6, 1:] == -1).all()
    assert (rows[:4] >= 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_rollout_routing_replay": False}, "r3.rollout.miles.write_shards: the rollout engine is not asked"),
        ({"object_store_backend": "mooncake"}, "Ray object store alone.*r3_routes: full"),
    ],
)
def test_a_setting_that_cannot_work_is_one_message(args: Any, changes: dict[str, Any], words: str) -> None:
    vars(args).update(changes)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        write_shards(args, [], None)


def test_a_generate_function_of_the_older_form_is_named(args: Any) -> None:
    async def older(input: Any) -> Any:
        return input.sample

    sys.modules["miles.rollout.generate_hub.single_turn"].generate = older  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"(?s)older form.*r3.rollout.miles.write_shards"):
        call(args, slime.Sample())


# Megatron -------------------------------------------------------------------------------------------------------------


def routers(layers: list[int], manager: Any) -> nn.Module:
    chunk = nn.ModuleDict({"decoder": nn.ModuleList([slime.TopKRouter(layer + 1, None) for layer in layers])})
    for router in chunk["decoder"]:
        manager.register_to_module(router, "routing_replay")
    return chunk


def fill_as_megatron_does(args: Any, chunks: list[nn.Module], data: dict[str, Any], manager: Any) -> None:
    sys.modules["miles.backends.megatron_utils.actor"].fill_replay_data(  # type: ignore[attr-defined]
        args=args,
        models=chunks,
        data_iterator=[slime.DataIterator(data, BATCHES)],
        num_microbatches=[1, 1],
        rollout_data=data,
        data_key="rollout_routed_experts",
        replay_list=manager.replays,
        register_replay_list_func=None,
    )


@pytest.mark.parametrize(
    ("parallel", "changes"),
    [
        ({}, {}),
        ({"cp_size": 2, "cp_rank": 1}, {}),
        ({"tp_size": 2, "tp_rank": 1}, {"sequence_parallel": True}),
        ({"cp_size": 2, "cp_rank": 0}, {"qkv_format": "bshd"}),
    ],
    ids=["one rank", "zigzag", "sequence parallel", "bshd"],
)
def test_megatron_s_routers_get_what_miles_would_give_them(
    args: Any, monkeypatch: pytest.MonkeyPatch, parallel: dict[str, int], changes: dict[str, Any]
) -> None:
    manager = miles.install(monkeypatch, **parallel)
    vars(args).update(changes)
    original = sys.modules["miles.backends.megatron_utils.actor"].fill_replay_data  # type: ignore[attr-defined]
    data, samples = rollout(args)
    full = [torch.from_numpy(s.routes.ids[:, :-1].transpose(1, 0, 2).astype(np.int32)) for s in samples]
    expected: list[torch.Tensor] = []
    original(
        args=args,
        models=None,
        data_iterator=[slime.DataIterator(theirs := {**data, "rollout_routed_experts": full}, BATCHES)],
        num_microbatches=[2],
        rollout_data=theirs,
        data_key="rollout_routed_experts",
        replay_list=[],
        register_replay_list_func=lambda _replays, rows, **_: expected.append(rows),
    )

    init(args)
    chunks = [routers([1, 3], manager), routers([2], manager)]
    fill_as_megatron_does(args, chunks, data, manager)
    assert "rollout_routed_experts" not in data
    for position, replay in zip((0, 2, 1), manager.replays, strict=True):
        for rows in expected:
            mine, want = replay.pop_forward(), rows[:, position]
            held = (want >= 0).all(dim=1)
            assert torch.equal(mine[held], want[held].to(torch.int64))
            assert (mine[~held][:, 0] != mine[~held][:, 1]).all()
            assert mine.min() >= 0


def test_the_shard_last_written_is_replayed_and_not_one_of_an_earlier_run(args: Any) -> None:
    """miles counts weight versions from 0 again in a resumed run, and an index and its tokens may well be the same."""
    _, stale = rollout(args)
    stores = [ShardStore(args.r3_store).step(number, create=True) for number in (1, 9)]
    stores[0].root.rename(stores[1].root.with_name("step-000007"))
    engine = slime.Engine(args)
    engine.rows = lambda tokens: slime.Engine.rows(engine, [token + 1 for token in tokens])  # type: ignore[method-assign]
    samples = [miles_sample(i, n, engine) for i, n in enumerate(LENGTHS)]
    write_shards(args, samples, None)
    shards = finding.Shards(args.r3_store, stale[0].spec, "hook")
    for sample, old in zip(samples, stale, strict=True):
        assert sample.tokens == old.tokens.tolist()
        found = shards.find(None, sample.index, np.asarray(sample.tokens))
        assert Path(found).parent.name == "step-000001"
        assert not shard.load_file(found).routes.equal(old.routes)


def test_a_sample_that_is_reset_and_drawn_again_brings_its_own_routes(args: Any) -> None:
    """miles keeps the metadata of a group that it recycles after a weight update."""
    engine = slime.Engine(args)
    sample = miles_sample(7, 9, engine)
    write_shards(args, [sample], None)
    write_shards(args, [sample], None)  # idempotent
    metadata, engine.version = sample.metadata, 5
    again = slime.Sample(index=7, group_index=3, tokens=list(sample.tokens), response_length=8, metadata=metadata)
    again.rollout_log_probs, again.weight_versions = sample.rollout_log_probs, ["5"]
    again.status = sample.status
    again.rollout_routed_experts = engine.rows(again.tokens)
    write_shards(args, [again], None)
    assert again.metadata["r3"]["key"].startswith("step-000005/")
    assert again.rollout_routed_experts.nbytes == 0


def test_rows_that_no_router_asked_for_are_found_at_the_next_rollout(args: Any) -> None:
    manager = sys.modules["miles.utils.replay_base"].routing_replay_manager
    init(args)
    chunk = routers([1], manager)
    data, _ = rollout(args)
    again = dict(data)
    fill_as_megatron_does(args, [chunk], data, manager)
    with pytest.raises(ReplayError, match="trained without their recorded experts"):
        fill_as_megatron_does(args, [chunk], again, manager)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        ("fused", ConfigError, "fused router"),
        ("direct", ConfigError, "r3_trainer: direct is for slime alone"),
        ("field", ConfigError, r"routes field did not come through.*r3.rollout.miles.generate"),
        ("shards", StoreError, r"no shard '0-.*r3.rollout.miles.generate"),
        ("moved", ConfigError, r"this miles is not as r3 knows it.*31f1ca96"),
    ],
)
def test_what_cannot_replay_is_one_message(args: Any, what: str, error: type[R3Error], words: str) -> None:
    manager = sys.modules["miles.utils.replay_base"].routing_replay_manager
    data, _ = rollout(args)
    if what in ("fused", "direct"):
        vars(args).update({"moe_router_fusion": True} if what == "fused" else {"r3_trainer": "direct"})
    elif what == "field":
        del data["rollout_routed_experts"]
    elif what == "shards":
        for path in Path(args.r3_store).rglob("*.safetensors"):
            path.unlink()
    else:
        sys.modules["miles.backends.megatron_utils.actor"].fill_replay_data = lambda: None  # type: ignore[attr-defined]

    def run() -> None:
        init(args)
        fill_as_megatron_does(args, [routers([1], manager)], data, manager)

    with pytest.raises(error, match=f"(?s){words}"):
        run()


# FSDP -----------------------------------------------------------------------------------------------------------------


def test_ray_s_setup_hook_completes_miles_when_it_is_imported(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    setup_worker()
    setup_worker()
    assert fsdp.MODULE not in sys.modules
    module = importlib.import_module(fsdp.MODULE)
    assert module.fill_replay_data.is_r3
    assert {adapter.name for adapter in module._ADAPTERS if adapter.name.startswith("r3:")} == {
        f"r3:{f}" for f in fsdp.SELECTING
    }
    setup_worker()  # in a process that has miles already
    assert module.fill_replay_data.is_r3


def test_fsdp_replays_the_shards_in_forward_and_recompute(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    setup_worker()
    manager, module = (
        sys.modules["miles.utils.replay_base"].routing_replay_manager,
        importlib.import_module(fsdp.MODULE),
    )
    model = qwen.build()
    spec = RoutingSpec.from_config(model.config)
    args.data_pad_size_multiplier = 1
    args.qkv_format = "bshd"
    assert (spec.num_layers, spec.moe_layers) == (4, (1, 2, 3))  # as in `slime.arguments`
    assert module.install(model, model.config) == 3
    data, samples = rollout(args, qwen.CONFIG.vocab_size)
    data["max_seq_lens"] = [14, 14, 14, 14]
    module.fill(args, model, [slime.DataIterator(data, BATCHES)], [2], data)

    model.gradient_checkpointing_enable()
    model.train()
    outputs = []
    with miles.stage(manager, "replay_backward"):
        for batch in BATCHES:
            chosen = [samples[i] for i in batch]
            layout, input_ids, mask = right_padded(chosen)
            input_ids = nn.functional.pad(input_ids, (0, 14 - input_ids.shape[1]))
            mask = nn.functional.pad(mask, (0, 14 - mask.shape[1]))
            with observe(model, spec) as seen, miles.stage(manager, "replay_forward"):
                outputs.append(model(input_ids, attention_mask=mask, use_cache=False).logits)
            for position, layer in enumerate(spec.moe_layers):
                ids = seen[layer].reshape(2, 14, -1)
                for line, sample in enumerate(chosen):
                    wanted = torch.from_numpy(sample.routes.ids[position, :-1].astype(np.int64))
                    assert torch.equal(ids[line, : sample.num_tokens - 1].sort().values, wanted.sort().values)
        for output in outputs:
            output.logsumexp(-1).mean().backward()
    assert [(r.forward_index, r.backward_index) for r in manager.replays] == [(2, 2)] * 3
    del layout


def test_outside_of_its_stages_the_model_routes_as_it_would(args: Any) -> None:  # noqa: ARG001
    manager = sys.modules["miles.utils.replay_base"].routing_replay_manager
    plain, model = qwen.build(), qwen.build()
    ids = torch.arange(12).reshape(2, 6)
    adapter = fsdp._Adapter("qwen3_moe", manager)
    assert adapter.applies_to(model.config)
    assert not fsdp._Adapter("mixtral", manager).applies_to(model.config)
    for layer, module in miles.layers_of(model, fsdp.SELECTING["qwen3_moe"]):
        adapter.install(module)
        manager.register_to_module(module, "routing_replay", stream_idx=layer)
    with torch.no_grad():
        expected = plain(ids).logits
        assert torch.equal(model(ids).logits, expected)
        manager.stage = "record"
        assert torch.equal(model(ids).logits, expected)
        manager.stage = "replay_forward"  # R2: its own record
        assert torch.equal(model(ids).logits, expected)
        with pytest.raises(IndexError):
            model(ids)
        for replay in manager.replays:  # rows without a record choose as they would
            replay.forward_index = 1
            replay.top_indices_list.append(torch.full_like(replay.top_indices_list[0], -1))
        assert torch.equal(model(ids).logits, expected)
        for replay in manager.replays:
            replay.top_indices_list.append(replay.top_indices_list[0][:-1])
        with pytest.raises(ReplayError, match="not those of this forward"):
            model(ids)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe_lite", "gpt_oss", "jamba"])
def test_the_class_that_selects_is_the_one_in_the_table(family: str) -> None:
    require_selecting(family)


@pytest.mark.engine
def test_every_class_in_the_table_selects() -> None:
    for family in sorted(set(fsdp.SELECTING) & set(families.available())):
        require_selecting(family)


def require_selecting(family: str) -> None:
    for pattern in families.PATTERNS.get(family, [{}])[:1]:
        config = families.config(family, pattern)
        model, spec = families.build(family, config), RoutingSpec.from_config(config)
        for layer, block in find_routers(model, spec).items():
            module = probe(block, spec, layer, config.get_text_config(decoder=True).hidden_size).module
            assert type(module).__name__ == fsdp.SELECTING[family]


def test_installing_is_undone(args: Any) -> None:  # noqa: ARG001
    actor = sys.modules["miles.backends.megatron_utils.actor"]
    original = actor.fill_replay_data  # type: ignore[attr-defined]
    uninstall = fill.install("miles.backends.megatron_utils.actor")
    fill.install("miles.backends.megatron_utils.actor")()
    assert actor.fill_replay_data is not original  # type: ignore[attr-defined]
    uninstall()
    assert actor.fill_replay_data is original  # type: ignore[attr-defined]
