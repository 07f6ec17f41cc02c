"""slime's rollout side: what SGLang sent is what stands in the shard, leg by leg, and what cannot be right is refused by name."""

from __future__ import annotations

import asyncio
import copy
import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slime_standins as slime
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from r3 import RolloutSample, RoutingSpec, ShardStore
from r3.errors import ConfigError, R3Error, SampleError, WireError
from r3.rollout.slime import generate, samples, ticket, write_shard, write_shard_async
from r3.rollout.slime.settings import Settings, spec_of
from r3.testing import FAULTS, random_rows
from r3.wire import encode_sglang

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2, model_type="megatron")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    slime.install(monkeypatch)


@pytest.fixture
def args(tmp_path: Path) -> Any:
    return slime.arguments(tmp_path / "shards")


def new_sample(index: int = 7, prompt: int = 5, **fields: Any) -> Any:
    sample = sys.modules["slime.utils.types"].Sample(group_index=2, index=index, prompt="p", **fields)
    sample.tokens = list(range(10, 10 + prompt))
    return sample


def through_slime(args: Any, sample: Any, **keywords: Any) -> Any:
    """As slime calls its hooks: by dotted path, with what each has parameters for."""
    hooks = importlib.import_module("slime.rollout.sample_hooks")
    return asyncio.run(hooks.apply_rollout_sample_hooks(args, sample, **keywords))


def shard_of(args: Any, sample: Any) -> RolloutSample:
    step, _, name = sample.metadata["r3"]["key"].rpartition("/")
    return ShardStore(Path(args.r3_store) / step).open(name)


def routes_of(engine: slime.Engine, tokens: list[int], version: int) -> Any:
    """[MoE layers, N-1, K]: what the engine's routers choose with the weights of a version."""
    now, engine.version = engine.version, version
    rows = engine.rows(list(tokens))[:, list(SPEC.moe_layers)].transpose(1, 0, 2)
    engine.version = now
    return rows


# One request ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["write_shard", "write_shard_async"])
def test_a_sample_becomes_a_shard_with_all_that_slime_knows(args: Any, hook: str) -> None:
    args.rollout_sample_hook_path = [f"r3.rollout.slime.{hook}"]
    engine, sample = slime.Engine(args), new_sample()
    engine.version = 12
    engine.extend(sample, 6, "length")
    hooks = importlib.import_module("slime.rollout.sample_hooks")
    hooks._current_rollout_id = 3
    assert through_slime(args, sample) is sample

    assert sample.metadata["r3"]["key"].startswith("step-000003/7-")
    shard = shard_of(args, sample)
    assert (shard.spec, shard.group_id, shard.prompt_length) == (SPEC, "2", 5)
    assert shard.tokens.tolist() == sample.tokens
    assert np.array_equal(shard.routes.ids[:, :-1], routes_of(engine, sample.tokens, 12))
    assert shard.routes.recorded.tolist() == [True] * 10 + [False]
    assert shard.loss_mask.tolist() == [False] * 5 + [True] * 6
    assert np.isnan(shard.rollout_logprobs[:5]).all()
    assert np.allclose(shard.rollout_logprobs[5:], sample.rollout_log_probs)
    assert shard.weight_version.tolist() == [-1] * 5 + [12] * 6
    assert (shard.provenance.engine, shard.provenance.finish_reason) == ("sglang", "truncated")
    assert shard.provenance.model == args.hf_checkpoint
    assert shard.provenance.logprobs_mode == "processed_logprobs"


def test_only_a_key_goes_on_and_it_passes_the_validation_of_slime(args: Any) -> None:
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 6)
    write_shard(args, sample, rollout_id=0)
    carried = torch.as_tensor(sample.rollout_routed_experts)
    validate = importlib.import_module(
        "slime.observability.rollout_data_utils"
    ).validate_rollout_routed_experts_for_replay
    validate([carried], args)
    assert ticket.decode(carried) == sample.metadata["r3"]["key"]
    assert carried.dtype == torch.int32
    assert len(carried) != len(sample.tokens) - 1  # so that slime's own replay refuses it


@settings(max_examples=40)
@given(st.text(min_size=1, max_size=300), st.integers(1, 61), st.integers(1, 10))
def test_any_key_survives_as_a_ticket(key: str, num_layers: int, top_k: int) -> None:
    carried = ticket.encode(key, num_layers, top_k)
    assert carried.shape[1:] == (num_layers, top_k)
    assert ticket.decode(torch.from_numpy(carried)) == key


def test_routes_are_no_ticket_and_a_cut_ticket_is_no_key() -> None:
    assert ticket.decode(np.zeros((3, 4, 2), np.int32)) is None
    assert ticket.decode(None) is None
    with pytest.raises(WireError, match="cut on its way"):
        ticket.decode(ticket.encode("step-000001/7-abc", 4, 2)[:1])


def test_full_routes_stay_as_slime_made_them(args: Any) -> None:
    args.r3_routes = "full"
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 6)
    rows = sample.rollout_routed_experts
    write_shard(args, sample)
    assert sample.rollout_routed_experts is rows


# Partial rollouts -----------------------------------------------------------------------------------------------------


def test_each_leg_of_a_partial_rollout_keeps_the_rows_that_sampled_it(args: Any) -> None:
    args.partial_rollout = True
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 4, "abort")
    write_shard(args, sample, rollout_id=1)
    assert "key" not in sample.metadata["r3"]
    assert ShardStore(Path(args.r3_store)).steps() == []

    engine.version = 2  # updated meanwhile: the resumed request prefills everything anew
    sample = copy.deepcopy(sample)  # as slime's buffer may
    engine.extend(sample, 3, "stop")
    assert len(sample.rollout_routed_experts) == 11
    write_shard(args, sample, rollout_id=2)

    shard = shard_of(args, sample)
    old, new = routes_of(engine, sample.tokens, 1), routes_of(engine, sample.tokens, 2)
    assert np.array_equal(shard.routes.ids[:, :8], old[:, :8])  # 9 tokens were there: 8 rows
    assert np.array_equal(shard.routes.ids[:, 8:11], new[:, 8:11])  # the boundary row is the second leg's
    assert shard.weight_version.tolist() == [-1] * 5 + [1] * 4 + [2] * 3
    assert shard.routes.num_recorded == 11
    assert not list((Path(args.r3_store) / "partial").glob("*.safetensors"))


def test_full_routes_of_a_partial_rollout_are_the_stitched_ones(args: Any) -> None:
    args.partial_rollout, args.r3_routes = True, "full"
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 4, "abort")
    write_shard(args, sample)
    engine.version = 2
    engine.extend(sample, 3)
    write_shard(args, sample)
    rows = np.asarray(sample.rollout_routed_experts)
    assert rows.shape == (11, 4, 2)
    assert rows.dtype == np.int32
    assert not rows[:, 0].any()  # the dense layer
    assert np.array_equal(rows[:8, 1:], routes_of(engine, sample.tokens, 1)[:, :8].transpose(1, 0, 2))
    assert np.array_equal(rows[8:, 1:], routes_of(engine, sample.tokens, 2)[:, 8:].transpose(1, 0, 2))


def test_a_leg_that_was_aborted_without_rows_gets_those_of_the_next_prefill(args: Any) -> None:
    args.partial_rollout = True
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 4, "abort", routed_experts=None)
    write_shard(args, sample)
    engine.version = 2
    engine.extend(sample, 3)
    write_shard(args, sample)
    shard = shard_of(args, sample)
    assert np.array_equal(shard.routes.ids[:, :-1], routes_of(engine, sample.tokens, 2))
    assert shard.weight_version.tolist() == [-1] * 5 + [1] * 4 + [2] * 3


def test_three_legs_with_a_rowless_one_in_the_middle(args: Any) -> None:
    args.partial_rollout = True
    engine, sample = slime.Engine(args), new_sample()
    for version, (count, finish, meta) in enumerate(
        [(2, "abort", {}), (2, "abort", {"routed_experts": None}), (2, "stop", {})], start=1
    ):
        engine.version = version
        engine.extend(sample, count, finish, **meta)
        write_shard(args, sample)
    shard = shard_of(args, sample)
    assert np.array_equal(shard.routes.ids[:, :6], routes_of(engine, sample.tokens, 1)[:, :6])
    assert np.array_equal(shard.routes.ids[:, 6:-1], routes_of(engine, sample.tokens, 3)[:, 6:])
    assert shard.weight_version[5:].tolist() == [1, 1, 2, 2, 3, 3]


def test_aborted_samples_that_slime_throws_away_are_not_written(args: Any) -> None:
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 4, "abort")
    before = copy.deepcopy(sample)
    write_shard(args, sample)
    assert sample.metadata == before.metadata == {}
    assert not list(Path(args.r3_store).rglob("*.safetensors"))
    nothing = new_sample()
    nothing.status = type(nothing).Status.ABORTED  # before its first token
    assert write_shard(args, nothing).metadata == {}


def test_a_sample_that_is_drawn_anew_forgets_its_aborted_self(args: Any) -> None:
    args.partial_rollout = True
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 4, "abort")
    write_shard(args, sample)
    again = new_sample(metadata=sample.metadata)
    engine.version = 2
    engine.extend(again, 6)
    write_shard(args, again)
    assert np.array_equal(shard_of(args, again).routes.ids[:, :-1], routes_of(engine, again.tokens, 2))


def test_going_on_with_other_tokens_is_an_error(args: Any) -> None:
    args.partial_rollout = True
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 4, "abort")
    write_shard(args, sample)
    sample.tokens[6] += 1
    engine.extend(sample, 2)
    with pytest.raises(
        SampleError, match=r"(?s)token 6: the tokens of an earlier leg are not those.*token ids, not with text"
    ):
        write_shard(args, sample)


# Conversations --------------------------------------------------------------------------------------------------------


def talk(engine: slime.Engine, sample: Any, *, update: bool = False, tail: int = 0) -> Any:
    engine.extend(sample, 3)
    sample.append_response_tokens(engine.args, tokens=[1, 2, 3, 4], trainable=False)
    engine.version += update
    engine.extend(sample, 2)
    if tail:
        sample.append_response_tokens(engine.args, tokens=[5] * tail, trainable=False)
    return sample


def test_a_conversation_has_a_weight_version_per_turn_and_no_loss_on_the_tool(args: Any) -> None:
    engine, sample = slime.Engine(args), new_sample()
    talk(engine, sample, update=True)
    write_shard(args, sample)
    shard = shard_of(args, sample)
    assert shard.loss_mask[5:].tolist() == [True] * 3 + [False] * 4 + [True] * 2
    assert shard.weight_version[5:].tolist() == [1] * 3 + [-1] * 4 + [2] * 2
    assert np.isnan(shard.rollout_logprobs[8:12]).all()


def test_generate_takes_the_rows_of_every_turn_as_it_ends(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sample = slime.Engine(args), new_sample()

    async def two_turns(args: Any, sample: Any, sampling_params: Any) -> Any:  # noqa: ARG001
        return talk(engine, sample, update=True)

    monkeypatch.setattr(sys.modules["slime.rollout.sglang_rollout"], "generate", two_turns, raising=False)
    sys.modules["slime.rollout.sample_hooks"]._current_rollout_id = 4
    done = asyncio.run(generate(args, sample, {"max_new_tokens": 9}))
    assert done is sample
    pickle.loads(pickle.dumps(done))  # of slime's own class again

    shard = shard_of(args, sample)
    assert sample.metadata["r3"]["key"].startswith("step-000004/")
    old, new = routes_of(engine, sample.tokens, 1), routes_of(engine, sample.tokens, 2)
    assert np.array_equal(shard.routes.ids[:, :7], old[:, :7])
    assert np.array_equal(shard.routes.ids[:, 7:-1], new[:, 7:])
    assert shard.weight_version[5:].tolist() == [1] * 3 + [-1] * 4 + [2] * 2


def test_generate_calls_the_function_that_the_settings_name(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = slime.Engine(args), []

    async def mine(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:  # noqa: ARG001
        asked.append(evaluation)
        engine.extend(sample, 3)
        return [sample, copy.deepcopy(sample)]

    monkeypatch.setattr(sys.modules["slime.rollout.sglang_rollout"], "mine", mine, raising=False)
    args.r3_generate = "slime.rollout.sglang_rollout.mine"
    evaluated = asyncio.run(generate(args, new_sample(), {}, evaluation=True))
    assert asked == [True]
    assert "r3" not in evaluated[0].metadata
    both = asyncio.run(generate(args, new_sample(), {}))
    assert [type(each) for each in both] == [sys.modules["slime.utils.types"].Sample] * 2
    assert both[0].metadata["r3"]["key"] == both[1].metadata["r3"]["key"]  # equal samples, one shard
    args.r3_generate = "slime.rollout.sglang_rollout.absent"
    with pytest.raises(ConfigError, match="cannot load the generate function"):
        asyncio.run(generate(args, new_sample(), {}))


def test_a_tail_that_nobody_sampled_has_no_rows_and_needs_none(args: Any) -> None:
    engine, sample = slime.Engine(args), new_sample()
    talk(engine, sample, tail=3)
    write_shard(args, sample)
    shard = shard_of(args, sample)
    assert shard.num_tokens == 17
    assert shard.routes.recorded.tolist() == [True] * 13 + [False] * 4
    assert not (samples.needed_rows(shard.loss_mask) & ~shard.routes.recorded).any()


@settings(max_examples=40)
@given(st.lists(st.booleans(), max_size=12), st.lists(st.integers(1, 3), max_size=4))
def test_versions_are_given_to_runs_or_to_nobody(mask: list[bool], versions: list[int]) -> None:
    out = samples.spread_versions(np.array(mask, np.bool_), versions)
    runs: list[list[int]] = []
    for i, sampled in enumerate(mask):
        if sampled and (i == 0 or not mask[i - 1]):
            runs.append([])
        if sampled:
            runs[-1].append(i)
    expected = [-1] * len(mask)
    for number, run in enumerate(runs):
        for i in run:
            if len(set(versions)) == 1:
                expected[i] = versions[0]
            elif len(versions) == len(runs):
                expected[i] = versions[number]
    assert out.tolist() == expected


# Again, and others ----------------------------------------------------------------------------------------------------


def test_a_second_hook_and_a_second_run_change_nothing(args: Any) -> None:
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 6)
    fresh = copy.deepcopy(sample)
    write_shard(args, sample, rollout_id=1)
    (path,) = Path(args.r3_store).rglob("*.safetensors")
    first, carried = path.read_bytes(), sample.rollout_routed_experts
    asyncio.run(write_shard_async(args, sample, rollout_id=1))
    assert sample.rollout_routed_experts is carried
    write_shard(args, fresh, rollout_id=1)  # a run that was killed and draws the same again
    assert [each.read_bytes() for each in Path(args.r3_store).rglob("*.safetensors")] == [first]


def test_siblings_that_share_index_and_metadata_have_shards_of_their_own(args: Any) -> None:
    engine, one = slime.Engine(args), new_sample()
    other = new_sample()
    other.metadata = one.metadata
    engine.extend(one, 6)
    engine.extend(other, 6)
    for each in through_slime(args, [one, other], rollout_id=1):
        assert shard_of(args, each).tokens.tolist() == each.tokens
    assert one.metadata["r3"]["key"] != other.metadata["r3"]["key"]


def test_evaluation_is_left_alone_unless_asked_for(args: Any) -> None:
    engine, sample = slime.Engine(args), new_sample()
    engine.extend(sample, 6)
    rows = sample.rollout_routed_experts
    through_slime(args, sample, evaluation=True)
    assert sample.rollout_routed_experts is rows
    args.r3_evaluation = True
    through_slime(args, sample, evaluation=True)
    assert "key" in sample.metadata["r3"]


def test_old_steps_go(args: Any) -> None:
    args.r3_keep_steps = 2
    for step in range(4):
        sample = new_sample(index=step)
        slime.Engine(args).extend(sample, 3)
        write_shard(args, sample, rollout_id=step)
    assert ShardStore(Path(args.r3_store)).steps() == [2, 3]


def test_a_run_resumed_from_an_earlier_rollout_keeps_what_it_writes(args: Any) -> None:
    args.r3_keep_steps = 2
    for step in (7, 8, 3, 4, 5):
        sample = new_sample(index=step)
        slime.Engine(args).extend(sample, 3)
        write_shard(args, sample, rollout_id=step)
        assert shard_of(args, sample).tokens.tolist() == sample.tokens
    assert ShardStore(Path(args.r3_store)).steps() == [4, 5, 7, 8]


def test_the_same_tokens_drawn_again_by_other_weights_bring_their_own_routes(args: Any) -> None:
    """A sample that is reset and drawn again keeps its metadata, and a short response is often the same."""
    engine, sample = slime.Engine(args), new_sample()
    fresh = copy.deepcopy(sample)
    engine.extend(sample, 4)
    write_shard(args, sample, rollout_id=1)
    first, fresh.metadata = shard_of(args, sample), sample.metadata
    fresh.tokens, fresh.response_length = list(sample.tokens), sample.response_length
    fresh.rollout_log_probs, fresh.status, fresh.weight_versions = sample.rollout_log_probs, sample.status, ["9"]
    engine.version = 9
    fresh.rollout_routed_experts = torch.from_numpy(engine.rows(fresh.tokens))
    assert not np.array_equal(first.routes.ids[:, :-1], routes_of(engine, fresh.tokens, 9))
    write_shard(args, fresh, rollout_id=2)
    assert ticket.decode(fresh.rollout_routed_experts) == f"step-000002/{first.sample_id}"
    assert np.array_equal(shard_of(args, fresh).routes.ids[:, :-1], routes_of(engine, fresh.tokens, 9))


# What cannot be right -------------------------------------------------------------------------------------------------


def broken(args: Any, what: str) -> Any:
    """A sample with one fault, past what slime itself checks."""
    engine, sample = slime.Engine(args), new_sample(prompt=40)
    engine.extend(sample, 60)
    rows, rng = np.asarray(sample.rollout_routed_experts), np.random.default_rng(0)
    if what == "none":
        sample.rollout_routed_experts = None
    elif what == "one row short":
        sample.rollout_routed_experts = rows[:-1]
    elif what == "no log-probs":
        sample.rollout_log_probs = None
    elif what == "mask too short":
        sample.loss_mask = sample.loss_mask[:-1]
    else:
        sample.rollout_routed_experts = FAULTS[what].inject(rows, SPEC, rng)
    return sample


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("none", r"this sample has no routes.*return_routed_experts: true.*--enable-return-routed-experts"),
        ("one row short", r"rows do not fit the tokens\s+expected 99 or 100 rows.*got 98"),
        ("zero_layer", r"layers 3: 1 of 3 MoE layers are zeros"),
        ("padding_leak", r"token 2, layer 1: an expert id is out of range.*got -1"),
        ("repeat_id", r"token 2, layer 3: an expert is chosen twice"),
        ("shift_layers", r"should be dense"),
        ("cached_rows", r"tokens 0-3: 4 of 99 rows are zeros in every layer"),
        ("no log-probs", r"60 of 60 tokens of the loss have no log-prob.*return_logprob"),
        ("mask too short", r"loss_mask does not fit the response\s+expected 60.*got 59"),
    ],
)
def test_a_fault_is_one_message_that_names_the_sample(args: Any, what: str, words: str) -> None:
    with pytest.raises(R3Error, match=rf"(?s)slime sample '7-[0-9a-f]{{12}}' \(index 7, group 2\).*{words}"):
        write_shard(args, broken(args, what))
    assert not list(Path(args.r3_store).rglob("*.safetensors"))


def test_lenient_marks_the_rows_that_strict_refuses(args: Any) -> None:
    args.r3_policy = "lenient"
    sample = broken(args, "cached_rows")
    write_shard(args, sample)
    recorded = shard_of(args, sample).routes.recorded
    assert recorded.tolist() == [False] * 4 + [True] * 95 + [False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_rollout_routing_replay": False}, r"engine is not asked for routes.*--use-rollout-routing-replay"),
        ({"r3_store": None}, r"not told where its shards are.*r3_store"),
        ({"r3_stroe": "x"}, r"unknown settings \['r3_stroe'\].*no effect"),
        ({"r3_routes": "keys"}, r"no such value of r3_routes.*key or full.*keys"),
        ({"r3_keep_steps": -1}, r"r3_keep_steps.*an integer from 0"),
        ({"r3_fsync": "yes"}, r"r3_fsync.*true or false"),
    ],
)
def test_a_setting_that_cannot_work_is_one_message(args: Any, change: dict[str, Any], words: str) -> None:
    sample = new_sample()
    slime.Engine(args).extend(sample, 3)
    vars(args).update(change)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        write_shard(args, sample)


def test_an_older_sample_without_append_response_tokens_is_named(args: Any) -> None:
    class Older:
        metadata: dict[str, Any] = {}  # noqa: RUF012

    async def never(args: Any, sample: Any, sampling_params: Any) -> Any: ...

    sys.modules["slime.rollout.sglang_rollout"].generate = never  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"(?s)cannot be followed.*--rollout-sample-hook-path"):
        asyncio.run(generate(args, Older(), {}))


def test_the_spec_is_that_of_the_megatron_arguments(args: Any) -> None:
    assert spec_of(args) == SPEC
    args.moe_layer_freq = 1
    assert spec_of(args).moe_layers == (0, 1, 2, 3)
    assert Settings.from_args(args).trainer == "lazy"


def test_sglang_bytes_are_what_slime_decodes(args: Any) -> None:
    """The payload in these tests is SGLang's own: base64 of raw little-endian int32, rows first."""
    rows = random_rows(np.random.default_rng(1), SPEC, 9, hidden=True)
    sample = new_sample()
    sample.append_response_tokens(
        args, tokens=[1] * 5, log_probs=[-1.0] * 5, meta_info={"routed_experts": encode_sglang(rows)}
    )
    assert np.array_equal(np.asarray(sample.rollout_routed_experts), rows)
