"""Whose routes a micro-batch of veRL replays, on TensorDicts as veRL makes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import SPEC, random_sample
from tensordict import NonTensorStack, TensorDict

from r3 import RolloutSample, ShardStore, shard
from r3.agreement import Agreement
from r3.errors import ConfigError, ReplayError, ShardError, WireError
from r3.handoff import NOTE, Note
from r3.replay import Coverage
from r3.routes import runs_of
from r3.trainers.verl.passes import ReplayPasses, layout_of, numbered, options
from r3.trainers.verl.registry import require_seams
from r3.trainers.verl.samples import samples_of
from r3.trainers.verl.stats import PassStats


def jagged(parts: list[np.ndarray]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.from_numpy(np.asarray(p)) for p in parts], layout=torch.jagged)


def rows_of(sample: RolloutSample) -> np.ndarray:
    """[T, L, K] int16, zeros where there is no record: veRL's field."""
    rows = sample.routes.ids.transpose(1, 0, 2) * sample.routes.recorded[:, None, None]
    return rows.astype(np.int16)


def note_of(sample: RolloutSample, path: Path | str | None = None) -> str:
    mask = runs_of(sample.routes.recorded)
    return Note(sample.token_digest, sample.num_tokens, mask, str(path or "")).to_json()


def micro_batch(samples: list[RolloutSample], **columns: Any) -> TensorDict:
    tokens = jagged([sample.tokens.astype(np.int64) for sample in samples])
    masks = jagged([sample.loss_mask[sample.prompt_length :].astype(np.int64) for sample in samples])
    return TensorDict({"input_ids": tokens, "loss_mask": masks, **columns}, batch_size=[len(samples)])


@pytest.fixture
def stored(tmp_path: Path) -> tuple[list[RolloutSample], list[str]]:
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, num_tokens=n, sample_id=f"s{n}") for n in (9, 12)]
    paths = [tmp_path / f"{sample.sample_id}.safetensors" for sample in samples]
    for sample, path in zip(samples, paths, strict=True):
        shard.save_file(sample, path)
    return samples, [note_of(sample, path) for sample, path in zip(samples, paths, strict=True)]


def test_shards_by_key_from_a_column_or_from_extra_fields(stored: tuple[list[RolloutSample], list[str]]) -> None:
    samples, notes = stored
    column = micro_batch(samples, **{NOTE: NonTensorStack(*notes)})
    extra = micro_batch(samples, extra_fields=NonTensorStack(*({NOTE: note, "x": 1} for note in notes)))
    for batch in (column, extra):
        for got, want in zip(samples_of(batch, SPEC), samples, strict=True):
            assert got is not None
            assert got.routes.equal(want.routes)
            assert got.sample_id == want.sample_id


def test_a_key_may_be_a_url() -> None:
    store = ShardStore("memory://verl/step-000001", create=True)
    sample = random_sample(np.random.default_rng(0), sample_id="a/b")
    store.add(sample)
    batch = micro_batch([sample], **{NOTE: NonTensorStack(note_of(sample, store.key_of("a/b")))})
    for layers in (None, [1, 3]):
        (got,) = samples_of(batch, SPEC, layers)
        assert got is not None
        assert got.sample_id == "a/b"
        assert got.routes.equal(sample.routes if layers is None else sample.routes.layers([0, 2]))
    store.discard("a/b")
    with pytest.raises(ShardError, match=r"(?s)no such shard: its sample cannot be replayed.*keep_steps"):
        samples_of(batch, SPEC)


def test_tokens_that_the_rollout_did_not_leave_are_refused(stored: tuple[list[RolloutSample], list[str]]) -> None:
    samples, notes = stored
    with pytest.raises(ReplayError, match="not those that its rollout left") as caught:
        samples_of(micro_batch(samples[::-1], **{NOTE: NonTensorStack(*notes)}), SPEC)
    assert "sample 0 of the micro-batch" in str(caught.value)
    assert "9 tokens" in str(caught.value)


def test_samples_of_one_length_that_changed_places_are_told_by_their_digest() -> None:
    rng = np.random.default_rng(3)
    samples = [random_sample(rng, num_tokens=9, sample_id=name) for name in "ab"]
    rows = jagged([rows_of(sample) for sample in samples])
    notes = NonTensorStack(*(note_of(sample) for sample in samples[::-1]))
    with pytest.raises(ReplayError, match="not those that its rollout left"):
        samples_of(micro_batch(samples, routed_experts=rows, **{NOTE: notes}), SPEC)


def test_a_stage_reads_its_own_layers(stored: tuple[list[RolloutSample], list[str]]) -> None:
    samples, notes = stored
    batch = micro_batch(samples, **{NOTE: NonTensorStack(*notes)})
    for got, want in zip(samples_of(batch, SPEC, layers=(2, 3)), samples, strict=True):
        assert got is not None
        np.testing.assert_array_equal(got.routes.ids, want.routes.ids[[1, 2]])  # layers 1, 2 and 3 route


@pytest.mark.parametrize("layers", [None, (2, 3)])
def test_a_shard_that_is_gone_or_damaged_is_named(
    stored: tuple[list[RolloutSample], list[str]], layers: tuple[int, ...] | None
) -> None:
    samples, notes = stored
    batch = micro_batch(samples, **{NOTE: NonTensorStack(*notes)})
    path = Path(Note.from_json(notes[1]).shard)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.rindex(samples[1].routes.ids[2].tobytes())] ^= 1
    for damaged in (whole[:-3], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(ShardError, match=path.name):
            samples_of(batch, SPEC, layers)
    path.unlink()
    with pytest.raises(ShardError, match=rf"(?s){path.name}: no such shard.*keep_steps"):
        samples_of(batch, SPEC, layers)


def test_verls_synthetic_samples_are_told_by_having_no_loss(stored: tuple[list[RolloutSample], list[str]]) -> None:
    """They are copies of a real sample's fields, its note among them, with other tokens."""
    samples, notes = stored
    batch = micro_batch(samples, **{NOTE: NonTensorStack(notes[0], notes[0])})
    batch["loss_mask"] = jagged([samples[0].loss_mask[4:].astype(np.int64), np.zeros(1, np.int64)])
    got = samples_of(batch, SPEC)
    assert got[0] is not None
    assert got[1] is None
    # In place of token ids, through a packing that pads with 0:
    numbers = torch.tensor([*numbered(got, [9, 12]), 0, 0])
    assert layout_of(numbers, got).rows.tolist() == [*range(9), *[-1] * 14]
    assert layout_of(numbers, got).lengths == (9,)


def test_synthetic_samples_are_counted_once_however_many_ranks_share_a_micro_batch(
    stored: tuple[list[RolloutSample], list[str]],
) -> None:
    samples, notes = stored
    batch = micro_batch(samples, **{NOTE: NonTensorStack(notes[0], notes[0])})
    batch["loss_mask"] = jagged([samples[0].loss_mask[4:].astype(np.int64), np.zeros(1, np.int64)])

    class Engine(ReplayPasses):
        def __init__(self, has_outputs: bool) -> None:
            self.is_mp_src_rank_with_outputs = lambda: has_outputs
            self._replay = SimpleNamespace(spec=SPEC, coverage=Coverage(), agreement=Agreement())
            self._stats = PassStats(self._replay, SPEC.moe_layers)

        def synthetic(self) -> float:
            assert self._stats is not None
            self.read(batch)
            return self._stats.totals("", torch.device("cpu"))["synthetic_samples"]

    assert [Engine(True).synthetic(), Engine(False).synthetic()] == [1, 0]


def test_routes_in_the_batch_with_a_note_and_without(stored: tuple[list[RolloutSample], list[str]]) -> None:
    samples, _ = stored
    rows = jagged([rows_of(sample) for sample in samples])
    notes = NonTensorStack(*(note_of(sample) for sample in samples))
    for batch in (
        micro_batch(samples, routed_experts=rows, **{NOTE: notes}),
        micro_batch(samples, routed_experts=rows),
    ):
        for got, want in zip(samples_of(batch, SPEC), samples, strict=True):
            assert got is not None
            assert got.routes.equal(want.routes)  # without a note the last, all-zero row is known as veRL's fill


def test_routes_that_were_cleared_or_spoilt_on_the_way_are_refused(
    stored: tuple[list[RolloutSample], list[str]],
) -> None:
    samples, _ = stored
    cleared, spoilt = rows_of(samples[0]), rows_of(samples[0])
    cleared[3] = 0
    spoilt[3] = SPEC.num_experts
    notes = NonTensorStack(note_of(samples[0]))
    with pytest.raises(ReplayError, match="are empty in the batch") as caught:
        samples_of(micro_batch(samples[:1], routed_experts=jagged([cleared]), **{NOTE: notes}), SPEC)
    assert "token 3" in str(caught.value)
    with pytest.raises(WireError, match="out of range"):
        samples_of(micro_batch(samples[:1], routed_experts=jagged([spoilt])), SPEC)


def test_a_batch_and_a_sample_without_routes_are_refused(stored: tuple[list[RolloutSample], list[str]]) -> None:
    samples, notes = stored
    with pytest.raises(ReplayError, match="this batch has no routes to replay"):
        samples_of(micro_batch(samples), SPEC)
    with pytest.raises(ReplayError, match="this sample has no routes") as caught:
        samples_of(micro_batch(samples, extra_fields=NonTensorStack({NOTE: notes[0]}, {})), SPEC)
    assert "sample 1" in str(caught.value)


def test_an_engine_that_has_changed_is_refused_by_the_method() -> None:
    class Engine:
        def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool, more: int = 0) -> None: ...

    seams = {"forward_step": ("self", "micro_batch", "loss_function", "forward_only")}
    require_seams(Engine, seams)  # a new optional parameter does no harm
    for changed in ({"forward_step": ("self", "batch")}, {**seams, "initialize": ("self",)}):
        with pytest.raises(ReplayError, match="veRL's engine is not as r3 knows it") as caught:
            require_seams(Engine, changed)
        assert f"Engine.{list(changed)[-1]}" in str(caught.value)


def test_options_come_from_the_workers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R3_VERL_MIN_AGREEMENT", "0.4")
    monkeypatch.setenv("R3_VERL_ON_MISSING", "raise")
    assert options() == {"min_agreement": 0.4, "on_missing": "raise"}
    monkeypatch.setenv("R3_VERL_MIN_AGREEMENT", "much")
    with pytest.raises(ConfigError, match="R3_VERL_MIN_AGREEMENT"):
        options()
