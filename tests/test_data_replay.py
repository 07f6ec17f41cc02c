"""From a dataset over shards into the replay: packed batches, in transformers and Megatron, say what the existing path says."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen
import torch
from helpers import random_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from r3 import RolloutSample, ShardStore
from r3.errors import LayoutError, ReplayError
from r3.partial import PartialSample
from r3.rollout.collector import collect
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import read_prompts
from r3.rollout.protocol import Sampling
from r3.trainers.data import LazySample, PackedBatch, PackedCollator, ShardDataset, ShardIterableDataset
from r3.trainers.hf import SAMPLES, ReplayCollator
from r3.trainers.transformers import attach, token_logprobs

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    store = ShardStore(tmp_path / "shards", create=True)
    for sample in qwen.samples_of(9, 12, 5, 16):
        store.add(sample, fsync=False)
    return store


# Packing --------------------------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), multiple=st.sampled_from([1, 4, 16]))
@settings(max_examples=25, deadline=None)
def test_every_position_of_a_packed_row(lengths: list[int], multiple: int) -> None:
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, num_tokens=n, prompt_length=n // 3, sample_id=f"s{i}") for i, n in enumerate(lengths)]
    batch = PackedCollator(multiple=multiple, pad_id=7)(samples)
    used = sum(lengths)
    width = batch.input_ids.shape[1]
    assert width % multiple == 0
    assert 0 <= width - used < multiple
    values = batch.spread([10.0 + i for i in range(len(samples))])
    names = ("input_ids", "position_ids", "loss_mask", "rollout_logprobs", "weight_version", "sample_of")
    rows = [tuple(column) for column in zip(*(getattr(batch, name)[0].tolist() for name in names), strict=True)]
    expected: list[tuple[Any, ...]] = []
    for number, sample in enumerate(samples):
        for token in range(sample.num_tokens):
            in_loss = bool(sample.loss_mask[token]) and token > 0
            logprob = float(sample.rollout_logprobs[token]) if in_loss else 0.0
            version = int(sample.weight_version[token])
            expected.append((int(sample.tokens[token]), token, in_loss, logprob, version, number))
            assert values[0, len(expected) - 1] == (10.0 + number if in_loss else 0)
    expected += [(7, i, False, 0.0, -1, len(samples)) for i in range(width - used)]
    assert rows == expected
    assert batch.cu_seqlens.tolist() == list(itertools.accumulate([0, *lengths]))
    assert batch.max_seqlen == max(lengths)


def test_batches_that_are_refused(store: ShardStore) -> None:
    samples = [store.open(name) for name in store.sample_ids()]
    with pytest.raises(LayoutError, match="do not fit the packed row"):
        PackedCollator(total=20)(samples)
    assert PackedCollator(total=48)(samples).input_ids.shape == (1, 48)
    with pytest.raises(ReplayError, match="a batch without samples"):
        PackedCollator()([])
    with pytest.raises(ReplayError, match="a partial sample has no rollout log-probs"):
        PackedCollator()([PartialSample.of(samples[0], (1,))])  # type: ignore[list-item]
    with pytest.raises(ReplayError, match="one value for each sample"):
        PackedCollator()(samples).spread([1.0])
    logprobs = samples[1].rollout_logprobs.copy()
    logprobs[6] = np.nan
    object.__setattr__(samples[1], "rollout_logprobs", logprobs)
    with pytest.raises(ReplayError, match="sample 's1', token 6: a token of the loss has no rollout log-prob"):
        PackedCollator()(samples)


def test_log_probs_of_logits_keep_the_graph(store: ShardStore) -> None:
    batch = PackedCollator(multiple=8)([store.open(name) for name in store.sample_ids()])
    logits = torch.randn(1, batch.input_ids.shape[1], 100, requires_grad=True)
    got = batch.logprobs_of(logits)
    everywhere = torch.from_numpy(token_logprobs(logits.detach(), batch.input_ids))
    assert torch.equal(got != 0, batch.loss_mask)
    torch.testing.assert_close(got[batch.loss_mask], everywhere[batch.loss_mask])
    got.sum().backward()
    used = logits.grad.abs().sum(-1)[0] > 0
    assert torch.equal(used[:-1], batch.loss_mask[0, 1:])


# Replay ---------------------------------------------------------------------------------------------------------------


def test_lazy_samples_replay_as_whole_ones(store: ShardStore) -> None:
    """Packed through a loader, padded through ReplayCollator, a sample at a time: the same log-probs."""
    model = qwen.build()
    replay = attach(model, min_agreement=0)
    dataset = ShardDataset(store)
    batch: PackedBatch = next(iter(DataLoader(dataset, batch_size=4, collate_fn=PackedCollator(multiple=8))))
    assert not any(sample.routes_read for sample in batch.samples if isinstance(sample, LazySample))
    with torch.no_grad(), batch.replay(replay):
        packed = batch.logprobs_of(model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits)
    padded = ReplayCollator()([dataset[i] for i in range(4)])
    with torch.no_grad():
        lines = qwen.forward(model, [dataset[i] for i in range(4)], replay)  # type: ignore[misc]
    lines = torch.from_numpy(token_logprobs(lines, padded["input_ids"]))
    for number, sample in enumerate(batch.samples[:2]):
        whole = store.open(sample.sample_id)
        with torch.no_grad():
            one = token_logprobs(qwen.forward(model, [whole], replay), torch.from_numpy(whole.tokens[None]).long())[0]
            live = token_logprobs(qwen.forward(model, [whole]), torch.from_numpy(whole.tokens[None]).long())[0]
        begin, end = batch.cu_seqlens[number : number + 2].tolist()
        mask = whole.loss_mask
        np.testing.assert_allclose(packed[0, begin:end].numpy()[mask], one[mask], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(lines[number, : end - begin].numpy()[mask], one[mask], rtol=1e-4, atol=1e-5)
        assert not np.allclose(live[mask], one[mask], rtol=1e-4, atol=1e-5)  # the routes are random: live differs
    assert [sample.sample_id for sample in padded[SAMPLES]] == [sample.sample_id for sample in batch.samples]


def test_a_lazy_sample_of_other_layers_or_tokens_is_refused(store: ShardStore) -> None:
    model = qwen.build()
    replay = attach(model, min_agreement=0)
    for part, message in (
        ({"layers": (1, 2)}, r"decoder layers \[3\]: a sample was read without layers"),
        ({"tokens": slice(0, 4)}, r"token 4: a sample was read without tokens"),
    ):
        batch = PackedCollator()([next(iter(ShardIterableDataset(store, **part)))])  # type: ignore[arg-type]
        with pytest.raises(ReplayError, match=message), batch.replay(replay):
            pass


@pytest.mark.engine
def test_the_megatron_driver_reads_a_ranks_part_of_lazy_samples(models: Any, tmp_path: Path) -> None:
    from megatron_cases import SPEC

    from r3.trainers.megatron import attach, detach, driver

    model = models.build(models.config())
    store = ShardStore(tmp_path / "shards", create=True)
    for i in range(3):
        sample = random_sample(np.random.default_rng(i), SPEC, 9 + i, sample_id=f"r{i}", vocabulary=60)
        store.add(sample, fsync=False)
    replay = attach(model, min_agreement=0)
    driven = driver.Driver(replay, model, store, prefetch=False)
    lazy = list(ShardDataset(store, shuffle=False))
    for by_key, by_id in zip(
        driven.batches([lazy[:2], lazy[2:]], model), driven.batches([["r0", "r1"], ["r2"]], model), strict=True
    ):
        outputs = []
        for batch in (by_key, by_id):
            with torch.no_grad(), batch.replay():
                outputs.append(model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params))
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(by_key.rollout_logprobs, by_id.rollout_logprobs)
    assert not any(sample.routes_read for sample in lazy)  # the driver read for itself
    detach(model)


@pytest.mark.engine
def test_rollouts_of_a_server_through_a_loader_say_what_the_diagnostic_says(
    engine: EngineInfo, tiny_model: Path, tmp_path: Path
) -> None:
    """Real shards, two workers, packed rows, against `r3 diagnose`'s scorer a sample at a time."""
    from r3.trainers.score import TransformersScorer

    store = ShardStore(tmp_path / "shards", create=True)
    prompts = read_prompts(tiny_model / "prompts.jsonl")[:4]
    asyncio.run(collect(prompts, store, engine, sampling=Sampling(max_tokens=24, seed=3), n=2, weight_version=5))
    scorer = TransformersScorer(tiny_model, dtype="float32")
    dataset = ShardIterableDataset(store, group_size=2, routes="read")
    loader = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=PackedCollator(multiple=16))
    seen: dict[str, RolloutSample | LazySample] = {}
    for batch in loader:
        with torch.no_grad(), batch.replay(scorer.replay):
            logits = scorer.model(batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        packed = batch.logprobs_of(logits)[0].numpy()
        for number, sample in enumerate(batch.samples):
            [scored] = scorer.score([store.open(sample.sample_id)], replay=True)
            begin, end = batch.cu_seqlens[number : number + 2].tolist()
            mask = sample.loss_mask
            np.testing.assert_allclose(packed[begin:end][mask], scored.logprobs[mask], rtol=1e-3, atol=1e-4)
            difference = batch.rollout_logprobs[0, begin:end].numpy()[mask] - packed[begin:end][mask]
            assert np.abs(difference).mean() < 0.05  # it is the policy that sampled
            seen[sample.sample_id] = sample
    assert sorted(seen) == store.sample_ids()
    assert scorer.replay.coverage.share > 0.95
