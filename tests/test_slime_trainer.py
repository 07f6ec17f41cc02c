"""slime's trainer side: every rank's routers get from the shards, row for row, what slime's own replay would give them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slime_standins as slime
import torch

from r3 import RolloutSample, ShardStore, shard
from r3.errors import ConfigError, R3Error, ReplayError, StoreError
from r3.metrics import gap_metrics
from r3.rollout.slime import write_shard
from r3.rollout.slime.settings import spec_of
from r3.trainers.slime import init, kl_report, lazy
from r3.trainers.slime.direct import token_layout
from r3.trainers.slime.finding import Shards
from r3.trainers.slime.rows import ChunkRows, ShardRows
from r3.trainers.slime.upstream import SLIME_DIRECT, Need, find

LENGTHS = (9, 14, 3, 7, 23)
BATCHES = [[1, 0], [4], [2, 3]]
INDEX = 40  # of the first sample


@pytest.fixture
def mpu(monkeypatch: pytest.MonkeyPatch) -> slime.Mpu:
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "1")
    return slime.install(monkeypatch)


@pytest.fixture
def args(tmp_path: Path, mpu: slime.Mpu) -> Any:  # noqa: ARG001
    return slime.arguments(tmp_path / "shards")


def rollout(args: Any, *, prompt: int = 1) -> tuple[dict[str, Any], list[Any]]:
    """Training data as slime packs it for one rank: what the hook left in its samples; and the samples' full rows."""
    engine, samples, rows = slime.Engine(args), [], []
    kind = sys.modules["slime.utils.types"].Sample
    for i, length in enumerate(LENGTHS):
        sample = kind(index=INDEX + i, group_index=i // 2)
        sample.tokens = list(range(prompt))
        engine.extend(sample, length - prompt)
        rows.append(torch.as_tensor(sample.rollout_routed_experts))
        samples.append(write_shard(args, sample, rollout_id=5))
    data = {
        "tokens": [torch.tensor(each.tokens) for each in samples],
        "sample_indices": [each.index for each in samples],
        "loss_masks": [torch.tensor(each.loss_mask) for each in samples],
        "total_lengths": list(LENGTHS),
        "response_lengths": [each.response_length for each in samples],
        "rollout_routed_experts": [torch.as_tensor(each.rollout_routed_experts) for each in samples],
    }
    return data, rows


def iterators(data: dict[str, Any]) -> list[Any]:
    return [importlib.import_module("slime.backends.megatron_utils.data").DataIterator(data, BATCHES)]


def replays() -> list[Any]:
    found: list[Any] = importlib.import_module("slime.utils.routing_replay").RoutingReplay.all_routing_replays
    return found


def filled(args: Any, layers: list[list[int]], data: dict[str, Any]) -> Any:
    """slime's actor with these layers in its chunks, its lists filled from the shards."""
    init(args)
    actor = slime.MegatronTrainRayActor(args, [slime.chunk_of(chunk) for chunk in layers])
    actor.fill_routing_replay(iterators(data), [2, 1], data)
    return actor


PARALLEL = [
    pytest.param({}, {}, id="one rank"),
    pytest.param({"tp_size": 2, "tp_rank": 1}, {"sequence_parallel": True}, id="sequence parallel"),
    pytest.param({"cp_size": 2, "cp_rank": 0}, {}, id="zigzag, first"),
    pytest.param({"cp_size": 2, "cp_rank": 1}, {}, id="zigzag, last"),
    pytest.param({"cp_size": 2, "cp_rank": 1}, {"allgather_cp": True}, id="all-gather"),
    pytest.param(
        {"cp_size": 2, "cp_rank": 0, "tp_size": 2, "tp_rank": 1}, {"sequence_parallel": True}, id="both parallel"
    ),
]


@pytest.mark.parametrize(("state", "changes"), PARALLEL)
@pytest.mark.parametrize("layers", [[[1, 2, 3]], [[1], [3]]], ids=["all layers", "two chunks"])
def test_routers_get_what_slime_itself_would_give_them(
    args: Any, mpu: slime.Mpu, state: dict[str, Any], changes: dict[str, Any], layers: list[list[int]]
) -> None:
    vars(mpu).update(state)
    vars(args).update(changes)
    data, rows = rollout(args)

    # The reference: slime's own way, with all rows of all layers.
    actor = slime.MegatronTrainRayActor(args, [slime.chunk_of(chunk) for chunk in layers])
    theirs = {**data, "rollout_routed_experts": rows}
    slime.MegatronTrainRayActor.fill_routing_replay(actor, iterators(theirs), [2, 1], theirs)
    expected = [list(replay.top_indices_list) for replay in replays()]
    numbers = {**data, "rollout_routed_experts": [torch.full_like(each, -7) for each in rows]}
    slime.MegatronTrainRayActor.fill_routing_replay(actor, iterators(numbers), [2, 1], numbers)
    held = [(each == -7).all(dim=1) for each in replays()[0].top_indices_list[len(BATCHES) :]]
    replays().clear()

    filled(args, layers, data)
    for stage in ("pop_forward", "pop_forward", "pop_backward"):
        for replay, wanted in zip(replays(), expected, strict=True):
            for mine, want, which in zip([getattr(replay, stage)() for _ in BATCHES], wanted, held, strict=True):
                assert mine.dtype == torch.int32
                assert mine.shape == want.shape
                assert torch.equal(mine[which], want[which])
                nothing = mine[~which]
                assert (nothing[:, 0] != nothing[:, 1]).all()
                assert 0 <= int(mine.min()) <= int(mine.max()) < args.num_experts
            replay.forward_index %= len(BATCHES)
    importlib.import_module("slime.utils.routing_replay").RoutingReplay.clear_all()  # all were used
    assert "rollout_routed_experts" not in data
    assert data["r3_row_coverage"] == [1.0] * len(LENGTHS)


@pytest.mark.parametrize(("state", "changes"), PARALLEL)
def test_the_direct_way_lays_tokens_out_as_slime_cuts_them(
    args: Any, mpu: slime.Mpu, state: dict[str, Any], changes: dict[str, Any]
) -> None:
    vars(mpu).update(state)
    vars(args).update(changes)
    tokens = [torch.arange(100 * i + 1, 100 * i + 1 + n) for i, n in enumerate(LENGTHS)]
    data = {"tokens": tokens, "loss_masks": [torch.ones(n - 1) for n in LENGTHS], "total_lengths": LENGTHS}
    data |= {"response_lengths": [n - 1 for n in LENGTHS]}
    keys = ["tokens", "loss_masks", "total_lengths", "response_lengths"]
    iterator = sys.modules["slime.backends.megatron_utils.data"].DataIterator(data, BATCHES)
    for batch in BATCHES:
        row = slime.get_batch(iterator, keys, args.data_pad_size_multiplier, args.allgather_cp)["tokens"]
        layout = token_layout(args, find(SLIME_DIRECT), [LENGTHS[i] for i in batch])
        assert layout.gather(torch.cat([tokens[i] for i in batch]).numpy(), fill=0).tolist() == row[0].tolist()


def test_nothing_but_the_rank_s_layers_of_micro_batches_in_flight_is_held(args: Any) -> None:
    data, _ = rollout(args)
    filled(args, [[2, 3]], data)
    chunks = [item.chunk for item in replays()[0].top_indices_list]
    assert [chunk.nbytes for chunk in chunks] == [0, 0, 0]  # nothing is read before a router asks
    replays()[0].pop_forward()
    positions = len(chunks[0].rows)
    assert [chunk.nbytes for chunk in chunks] == [
        2 * positions * args.moe_router_topk,
        0,
        0,
    ]  # a byte an id, two layers
    replays()[1].pop_forward()
    assert [chunk.nbytes for chunk in chunks] == [0, 0, 0]


def test_a_rank_reads_its_layers_and_its_tokens_alone(
    args: Any, mpu: slime.Mpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpu.cp_size, mpu.cp_rank = 2, 1
    data, _ = rollout(args)
    asked: list[tuple[list[int], slice]] = []
    original = shard.ShardFile.routes

    def routes(self: Any, layers: Any = slice(None), tokens: slice = slice(None), **keywords: Any) -> Any:
        asked.append((list(layers), tokens))
        return original(self, layers, tokens, **keywords)

    monkeypatch.setattr(shard.ShardFile, "routes", routes)
    filled(args, [[2]], data)
    assert asked == []
    replays()[0].pop_forward()
    assert asked  # of the 14 and the 9 tokens, padded to 16 and 12: the second and third quarters
    assert asked == [([1], slice(4, 12)), ([1], slice(3, 8))]


def test_padding_is_spread_over_experts(args: Any) -> None:
    args.data_pad_size_multiplier = 64
    data, _ = rollout(args)
    filled(args, [[1, 2, 3]], data)
    for replay in replays():
        padding = replay.pop_forward()[23:]
        assert len(padding) == 41
        counts = torch.bincount(padding.ravel(), minlength=8)
        assert int(counts.max()) - int(counts.min()) <= 2


def test_wide_ids_are_read_unsigned(args: Any) -> None:
    spec = spec_of(slime.arguments("x", num_experts=40000))
    ids = np.array([[[39999, 40]], [[0, 33000]], [[5, 6]]], np.uint16)
    from r3 import Routes

    sample = RolloutSample.from_rollout(
        sample_id="w",
        spec=spec,
        prompt_tokens=[1],
        response_tokens=[],
        response_logprobs=[],
        routes=Routes(ids, np.ones(1, bool)),
    )
    store = ShardStore(args.r3_store, create=True)
    store.add(sample)
    chunk = ChunkRows([ShardRows.open(store.key_of(sample.sample_id), 0)], np.zeros(1, np.int64), (1, 2), spec)
    assert chunk.layer(1, torch.device("cpu")).tolist() == [[39999, 40]]
    assert chunk.layer(2, torch.device("cpu")).tolist() == [[0, 33000]]


# Silence is not success -----------------------------------------------------------------------------------------------


def test_rows_that_no_router_asked_for_end_the_run(args: Any) -> None:
    data, _ = rollout(args)
    filled(args, [[1, 2]], data)
    for _ in BATCHES:
        replays()[0].pop_forward()
    with pytest.raises(
        ReplayError, match=r"(?s)layer 2: 3 layers of micro-batches were trained without.*moe-router-fusion"
    ):
        importlib.import_module("slime.utils.routing_replay").RoutingReplay.clear_all()


def test_a_shard_without_a_key_in_the_field_is_found_by_index_and_tokens(args: Any) -> None:
    data, _ = rollout(args)
    data["rollout_routed_experts"] = None
    filled(args, [[1]], data)
    assert len(replays()[0].top_indices_list) == len(BATCHES)


def edit(args: Any, data: dict[str, Any], what: str) -> None:
    if what == "shards gone":
        for path in Path(args.r3_store).rglob("*.safetensors"):
            path.unlink()
    elif what == "no store":
        args.r3_store = args.r3_store + "-elsewhere"
    elif what == "token changed":
        data["tokens"][1][3] += 1
    elif what == "tokens cut":
        data["tokens"][1] = data["tokens"][1][:-1]
    elif what == "field dropped":
        del data["rollout_routed_experts"], data["sample_indices"]
    elif what == "other model":
        args.num_experts = 16
    elif what == "row missing":
        (path,) = Path(args.r3_store).rglob(f"{INDEX + 1}-*.safetensors")
        sample = shard.load_file(path)
        sample.routes.recorded[5] = False
        shard.save_file(sample, path)


@pytest.mark.parametrize(
    ("what", "error", "words"),
    [
        (
            "shards gone",
            StoreError,
            r"no shard 'step-000005/41-.*--rollout-sample-hook-path r3.rollout.slime.write_shard",
        ),
        ("no store", StoreError, r"no such store.*r3_store must name a directory that this machine sees"),
        ("token changed", ReplayError, r"41-.*other tokens than the trainer's.*cut or changed the tokens"),
        ("tokens cut", ReplayError, r"41-.*other tokens than the trainer's\s+expected 13 tokens"),
        ("field dropped", ConfigError, r"names no routes and no samples.*--custom-convert-samples-to-train-data-path"),
        ("other model", R3Error, r"routing differs.*of 16 experts.*of 8 experts"),
        ("row missing", ReplayError, r"sample '41-[0-9a-f]+', token 5: 1 rows without a record"),
    ],
)
def test_what_does_not_fit_is_one_message(args: Any, what: str, error: type[R3Error], words: str) -> None:
    data, _ = rollout(args)
    edit(args, data, what)
    with pytest.raises(error, match=f"(?s){words}"):
        filled(args, [[1, 2, 3]], data)


def test_routers_are_found_in_the_live_model(args: Any) -> None:
    data, _ = rollout(args)
    slime.chunk_of([1, 2, 3])  # a decoder that was built and thrown away registers too
    actor = filled(args, [[2, 3]], data)
    assert [len(replay.top_indices_list) for replay in replays()] == [0, 0, 0, 3, 3]
    for model, words in (
        ([slime.chunk_of([1], mtp=True)], "multi-token-prediction.*r3_trainer: direct"),
        ([slime.chunk_of([1], patched=False)], "does not know.*framework's patch"),
        ([slime.chunk_of([0])], r"layer 0\): a router in a layer that should have none"),
        ([slime.chunk_of([1, 1])], "second router of this layer"),
    ):
        actor.model = model
        with pytest.raises(ReplayError, match=f"(?s){words}"):
            actor.fill_routing_replay(iterators(data), [2, 1], data)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"use_rollout_routing_replay": False},
            r"r3.trainers.slime.init: the rollout engine is not asked for routes",
        ),
        ({"use_routing_replay": False}, r"on for the rollout and off for the trainer.*--use-rollout-routing-replay"),
        ({"moe_router_fusion": True}, r"fused router.*--moe-router-fusion"),
        ({"r3_store": ""}, r"not told where its shards are"),
        ({"r3_trainer": "direct"}, r"needs both of its hooks.*--custom-megatron-before-log-prob-hook-path"),
    ],
)
def test_a_run_that_cannot_replay_ends_before_the_model_is_built(
    args: Any, changes: dict[str, Any], words: str
) -> None:
    vars(args).update(changes)
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        init(args)


def test_a_critic_and_full_routes_leave_slime_as_it_is(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = slime.MegatronTrainRayActor.fill_routing_replay
    args.r3_routes = "full"
    init(args)
    args.r3_routes = "key"
    monkeypatch.setenv("ENABLE_ROUTING_REPLAY", "0")  # slime starts critics so
    init(args)
    assert slime.MegatronTrainRayActor.fill_routing_replay is original


def test_installing_is_undone(args: Any) -> None:  # noqa: ARG001
    original = slime.MegatronTrainRayActor.fill_routing_replay
    uninstall = lazy.install()
    lazy.install()()  # a second time changes nothing, nor does its undoing
    assert slime.MegatronTrainRayActor.fill_routing_replay is not original
    uninstall()
    assert slime.MegatronTrainRayActor.fill_routing_replay is original


def test_direct_switches_slime_off_in_this_process(args: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["slime.backends.megatron_utils.cp_utils"], "mpu", slime.Mpu())
    args.r3_trainer = "direct"
    args.custom_megatron_before_log_prob_hook_path = "r3.trainers.slime.before_log_prob"
    args.custom_megatron_before_train_step_hook_path = "r3.trainers.slime.before_train_step"
    init(args)
    import os

    assert os.environ["ENABLE_ROUTING_REPLAY"] == "0"
    assert not args.use_routing_replay
    assert not args.use_rollout_routing_replay


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (
            Need("slime.utils.gone", "x"),
            r"this slime is not as r3 knows it.*in commit 624b824a.*No module|ModuleNotFoundError",
        ),
        (
            Need("slime.utils.routing_replay", "RoutingReplay.gone"),
            r"RoutingReplay.gone.*AttributeError.*docs/slime.md",
        ),
        (Need("slime.backends.megatron_utils.data", "get_batch", ("iterator",)), r"\(iterator\), as in commit"),
        (
            Need("slime.backends.megatron_utils.data", "DataIterator.get_next", ("self",)),
            r"expected \(self\).*got \(self, keys\)",
        ),
    ],
)
@pytest.mark.usefixtures("mpu")
def test_a_slime_that_has_moved_is_one_message(need: Need, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        find([need])


@pytest.mark.usefixtures("mpu")
def test_a_name_that_has_moved_is_found_where_it_was() -> None:
    need = Need("slime.utils.gone", "current_device", (), older="slime.utils.accelerator")
    assert find([need])["current_device"]() == torch.device("cpu")


# The gap --------------------------------------------------------------------------------------------------------------


def with_logprobs(data: dict[str, Any]) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    data["log_probs"] = [torch.tensor(-rng.random(n), dtype=torch.float32) for n in data["response_lengths"]]
    data["rollout_log_probs"] = [torch.tensor(-rng.random(n), dtype=torch.float32) for n in data["response_lengths"]]
    data["loss_masks"][1][2:5] = 0
    return data


def flat(data: dict[str, Any], name: str) -> Any:
    return np.concatenate(
        [np.asarray(v, np.float64)[np.asarray(m) != 0] for v, m in zip(data[name], data["loss_masks"], strict=True)]
    )


def test_the_gap_goes_to_slime_s_trackers_and_to_the_store(args: Any) -> None:
    data = with_logprobs(rollout(args)[0])
    kl_report(args, 5, data)
    wanted = gap_metrics(flat(data, "log_probs") - flat(data, "rollout_log_probs"))
    (logged,) = slime.logged
    for name in ("k1", "k2", "k3", "mean_abs"):
        total, count = logged[f"r3/{name}"]
        assert total / count == pytest.approx(getattr(wanted, name), rel=1e-12)
    assert logged["r3/F_1.1"][0] / logged["r3/F_1.1"][1] == pytest.approx(wanted.exceed["1.1"])
    (path,) = (Path(args.r3_store) / "kl").iterdir()
    report = json.loads(path.read_text())
    assert path.name == "step-000005.rank000.json"
    assert (report["num_tokens"], report["direction"]) == (wanted.num_tokens, "KL(rollout || train)")
    assert report["k3"] == pytest.approx(wanted.k3, rel=1e-12)


def test_context_parallel_ranks_report_each_token_once(args: Any, mpu: slime.Mpu) -> None:
    data = with_logprobs(rollout(args, prompt=2)[0])
    d = flat(data, "log_probs") - flat(data, "rollout_log_probs")
    mpu.cp_size = 2
    cut = importlib.import_module("slime.backends.megatron_utils.cp_utils").get_logits_and_tokens_offset_with_cp
    for mpu.cp_rank in (0, 1):
        spans = [cut(total, n)[3] for total, n in zip(data["total_lengths"], data["response_lengths"], strict=True)]
        local = dict(data)
        for name in ("log_probs", "rollout_log_probs"):
            prompts = [total - n for total, n in zip(data["total_lengths"], data["response_lengths"], strict=True)]
            local[name] = [
                torch.cat([v[max(a - p, 0) : max(b - p, 0)] for a, b in each])
                for v, each, p in zip(data[name], spans, prompts, strict=True)
            ]
        kl_report(args, 5, local)
    first, second = (each["r3/k2"] for each in slime.logged)
    assert first[1] + second[1] == len(d)
    assert (first[0] + second[0]) / len(d) == pytest.approx(float((d * d).mean() / 2), rel=1e-12)


def test_ranks_that_hold_no_log_probs_say_nothing_and_one_that_should_says_why(args: Any, mpu: slime.Mpu) -> None:
    data, _ = rollout(args)
    mpu.last_stage = False
    kl_report(args, 5, data)
    assert slime.logged == []
    mpu.last_stage = True
    with pytest.raises(ConfigError, match=r"(?s)has no log_probs.*--get-mismatch-metrics"):
        kl_report(args, 5, data)
    data["log_probs"] = [torch.zeros(1)]
    with pytest.raises(ConfigError, match=r"(?s)has no rollout_log_probs"):
        kl_report(args, 5, data)


def test_the_store_may_be_a_url(args: Any) -> None:
    """The same rows from a bucket as from a directory."""
    local, _ = rollout(args)
    layers = [[1], [3]]
    filled(args, layers, local)
    expected = [[rows.materialize_for_routing_replay("x") for rows in each.top_indices_list] for each in replays()]
    replays().clear()
    args.r3_store, args.r3_keep_steps = "memory://slime/run", 1
    data, _ = rollout(args)
    store = ShardStore(args.r3_store)
    assert store.steps() == [5]
    assert len(store.step(5)) == len(LENGTHS)
    filled(args, layers, data)
    for replay, wanted in zip(replays(), expected, strict=True):
        for rows, want in zip(replay.top_indices_list, wanted, strict=True):
            assert torch.equal(rows.materialize_for_routing_replay("x"), want)
    shards = Shards(args.r3_store, spec_of(args), "hook")
    found = shards.find(None, INDEX, data["tokens"][0].numpy())  # by its tokens, as miles finds it
    assert found.startswith("memory://slime/run/step-000005/")
    store.step(5).discard(store.step(5).sample_ids()[0])

    def find_all() -> None:
        for index, tokens in enumerate(data["tokens"]):
            shards.find(None, INDEX + index, tokens.numpy())

    with pytest.raises(StoreError, match=r"no shard .* of a sample that is to be trained"):
        find_all()


def test_the_kl_report_wants_a_directory(args: Any) -> None:
    args.r3_store = "s3://bucket/run"
    with pytest.raises(ConfigError, match=r"(?s)KL report is written beside the shards.*r3_store: a local path"):
        kl_report(args, 0, {})
