"""From samples to a rank's micro-batch: what stands where, what is read of a shard, and that it is replayed.

Every token id of these samples says which token of which sample it is, so that each position can be judged by itself, without a
layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import random_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_cases import SPEC

from r3 import RolloutSample, ShardStore
from r3.errors import ReplayError, StoreError
from r3.microbatch import MicroBatch
from r3.trainers.megatron import batch as batches
from r3.trainers.megatron import driver
from r3.trainers.megatron.batch import Form, LocalBatch, Rank

CPU = torch.device("cpu")


def sample_of(number: int, length: int) -> RolloutSample:
    """Token i is 100 * (number + 1) + i; its log-prob is -i - number / 8; the prompt is a third of it."""
    prompt = length // 3
    tokens = 100 * (number + 1) + np.arange(length)
    return random_sample(
        np.random.default_rng(number),
        SPEC,
        length,
        sample_id=f"s{number}",
        prompt_length=prompt,
        prompt_tokens=tokens[:prompt],
        response_tokens=tokens[prompt:],
        response_logprobs=-np.arange(prompt, length) - number / 8,
    )


def check_positions(batch: LocalBatch, samples: list[RolloutSample]) -> list[int]:
    """Each position against the token that stands there; returns the tokens."""
    values = [10.0 + number for number in range(len(samples))]
    fields = (
        batch.tokens,
        batch.labels,
        batch.loss_mask,
        batch.rollout_logprobs,
        batch.position_ids,
        batch.spread(values),
    )
    rows = np.array(batch.layout.rows).reshape(batch.tokens.shape)
    seen = []
    for row, token, label, mask, logprob, position, value in zip(
        rows.flat, *(f.flatten().tolist() for f in fields), strict=True
    ):
        if row < 0:
            assert (token, label, mask, logprob, value) == (0, 0, 0, 0, 0)
            continue
        number, index = token // 100 - 1, token % 100
        sample = samples[number]
        seen.append(token)
        assert position == index
        last = index == sample.num_tokens - 1
        in_loss = not last and bool(sample.loss_mask[index + 1])
        assert label == (0 if last else token + 1)
        assert mask == in_loss
        assert logprob == (-(index + 1) - number / 8 if in_loss else 0)
        assert value == (values[number] if in_loss else 0)
    return seen


@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=4),
    packed=st.booleans(),
    context=st.sampled_from([1, 2, 3]),
    tensor=st.sampled_from([1, 2]),
    cut=st.sampled_from(["zigzag", "contiguous"]),
    wide=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_position_holds_what_its_token_says(lengths, packed, context, tensor, cut, wide) -> None:
    samples = [sample_of(number, length) for number, length in enumerate(lengths)]
    ranks = [Rank(0, tensor, place, context, tensor > 1) for place in range(context)]
    width = 96 if wide else None
    form = Form(packed, ranks[0].multiple, width=width, cut=cut)
    seen: list[int] = []
    for rank in ranks:
        placed = form.place(lengths, rank)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batches, "_packed_seq_params", lambda *_: None)  # its import takes all of Megatron along
            batch = LocalBatch.build(samples, placed, CPU, [s.rollout_logprobs for s in samples])
        seen += check_positions(batch, samples)
        assert batch.tokens.shape[0] == (1 if packed else len(samples))
        assert batch.tokens.shape[1] % tensor == 0
        if wide:
            assert batch.tokens.shape[1] == 96 // context
    assert sorted(seen) == sorted(token for sample in samples for token in sample.tokens)


def test_a_packed_line_of_fixed_width_refuses_more() -> None:
    with pytest.raises(ReplayError, match="do not fit its line"):
        Form(width=16).place([9, 8], Rank())
    assert Form(width=16).place([9, 7], Rank()).layout.num_positions == 16
    assert Form(width=18, multiple=4).place([9, 7], Rank()).layout.num_positions == 20  # as lines of one sample each


def test_bounds_of_packed_sequences_are_with_and_without_padding() -> None:
    placed = Form(multiple=4, total_multiple=16).place([5, 9, 2], Rank())
    assert placed.bounds is not None
    assert placed.bounds[0].tolist() == [0, 5, 14, 16]
    assert placed.bounds[1].tolist() == [0, 8, 20, 32]  # 8 + 12 + 4, and the last one lengthened to a multiple of 16


def test_a_sampled_token_without_a_log_prob_is_named() -> None:
    sample = sample_of(0, 9)
    logprobs = sample.rollout_logprobs.copy()
    logprobs[5] = np.nan
    placed = Form(packed=False).place([9], Rank())
    with pytest.raises(ReplayError, match="sample 's0', token 5: a token of the loss has no rollout log-prob"):
        LocalBatch.build([sample], placed, CPU, [logprobs])


def test_one_value_a_sample_is_spread() -> None:
    batch = LocalBatch.build([sample_of(0, 9)], Form(packed=False).place([9], Rank()), CPU)
    assert batch.rollout_logprobs is None
    with pytest.raises(ReplayError, match="one value for each sample"):
        batch.spread([1.0, 2.0])


# What is read -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    store = ShardStore(tmp_path / "shards", create=True)
    for number, length in enumerate((40, 60)):
        store.add(sample_of(number, length))
    return store


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all reads of files from here on, at the system call."""
    sizes: list[int] = []
    for name in ("pread", "preadv"):
        original = getattr(os, name)

        def counting(*arguments: Any, original: Any = original) -> Any:
            got = original(*arguments)
            sizes.append(got if isinstance(got, int) else len(got))
            return got

        monkeypatch.setattr(os, name, counting)
    return sizes


@pytest.mark.parametrize("layers", [(1,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_rank_reads_its_layers_and_its_tokens_and_nothing_else(store, reads, monkeypatch, layers, size) -> None:
    monkeypatch.setattr(driver, "RANGES_FROM", 0)  # as if every sample were long
    whole = sample_of(1, 60)
    for place in range(size):
        rank = Rank(context=place, context_size=size)
        placed = Form(multiple=rank.multiple).place([60], rank)
        needed = driver._tokens_seen(rank.router_rows(placed.layout))
        with store.open_file("s1") as file:
            before = sum(reads)
            part = driver._read("s1", file, layers, needed)
        assert sum(reads) - before == len(layers) * int(needed.sum()) * SPEC.top_k + 120  # 60 ids of two bytes
        held = np.flatnonzero(needed)
        positions = [SPEC.moe_layers.index(layer) for layer in layers]
        assert np.array_equal(part.routes.ids[:, held], whole.routes.ids[positions][:, held])
        assert (part.layers, part.held is None) == (layers, size == 1)


def test_a_rank_without_a_row_of_a_sample_reads_none_of_its_routes(store, reads) -> None:
    """Sequence parallel: packed, the second sample is on the second rank alone."""
    for tensor, absent in ((0, "s1"), (1, "s0")):
        rank = Rank(tensor, 2, sequence_parallel=True)
        placed = Form(multiple=2).place([60, 60], rank)
        needed = driver._tokens_seen(rank.router_rows(placed.layout)).reshape(2, 60)
        assert needed[1 - tensor].sum() == 0
        with store.open_file(absent) as file:
            before = sum(reads)
            driver._read(absent, file, (1, 2, 3), np.zeros(file.num_tokens, np.bool_))
            assert sum(reads) - before == {"s0": 40, "s1": 120}[absent]  # its token ids


def test_a_token_that_was_not_read_is_not_replayed(store, monkeypatch) -> None:
    monkeypatch.setattr(driver, "RANGES_FROM", 0)
    needed = np.arange(60) < 30
    with store.open_file("s1") as file:
        part = driver._read("s1", file, (1, 2), needed)
    layout = Form(packed=False).place([60], Rank()).layout
    with pytest.raises(ReplayError, match="sample 's1', token 30: a sample was read without tokens"):
        MicroBatch([part], layout, SPEC, CPU, layers=[1])
    with pytest.raises(ReplayError, match=r"sample 's1', decoder layers \[3\]: a sample was read without layers"):
        MicroBatch([part], layout.select(np.arange(30)), SPEC, CPU, layers=[3])
    MicroBatch([part], layout.select(np.arange(30)), SPEC, CPU, layers=[1, 2])


# In a model ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def driven(models, store) -> Iterator[driver.Driver]:
    from r3.trainers.megatron import attach, detach

    model = models.build(models.config())
    for sample in (random_sample(np.random.default_rng(7), SPEC, 11, sample_id="long", vocabulary=60),):
        store.add(sample)
    yield driver.Driver(attach(model, min_agreement=0), model, store)
    detach(model)


@pytest.mark.engine
@pytest.mark.usefixtures("one_thread")
class TestDriver:
    def test_a_schedule_replays_what_the_store_holds(self, driven, models, tmp_path) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from r3.trainers.megatron.observe import observe

        store = ShardStore(tmp_path / "small", create=True)
        kept = {
            f"r{i}": random_sample(np.random.default_rng(i), SPEC, 9 + i, sample_id=f"r{i}", vocabulary=60)
            for i in range(5)
        }
        for sample in kept.values():
            store.add(sample)
        driven.store = store
        chunk = driven.chunks[0]
        seen: list[tuple[Any, dict[int, torch.Tensor]]] = []
        with observe(chunk) as ids:

            def forward_step(iterator: Any, model: Any) -> Any:
                batch = next(iterator)
                with batch.replay():
                    logits = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
                seen.append((batch, dict(ids)))
                return logits, lambda logits: (logits.square().mean(), {})

            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=driven.iterators([["r0", "r1"], ["r2"], [kept["r3"], "r4"]]),
                model=chunk,
                num_microbatches=3,
                seq_length=16,
                micro_batch_size=1,
                forward_only=False,
            )
        assert [[s.sample_id for s in batch.samples] for batch, _ in seen] == [["r0", "r1"], ["r2"], ["r3", "r4"]]
        for batch, by_layer in seen:
            routes = np.concatenate([kept[s.sample_id].routes.ids for s in batch.samples], axis=1)
            recorded = np.concatenate([kept[s.sample_id].routes.recorded for s in batch.samples])
            for layer, chosen in by_layer.items():
                expected = np.sort(routes[SPEC.moe_layers.index(layer)], axis=-1)
                assert np.array_equal(chosen.numpy()[recorded], expected[recorded])
        assert driven.replay.coverage.replayed == sum(s.routes.num_recorded for s in kept.values())
        assert all(r.weight.grad.abs().sum() > 0 for r in models.routers_of(chunk).values())

    def test_reading_ahead_changes_nothing_but_when(self, driven) -> None:
        plan = [["s0"], ["s1", "long"], ["s1"]]
        ahead = list(driven.batches(plan, driven.chunks[0]))
        other = driver.Driver(driven.replay, driven.chunks, driven.store, prefetch=False)
        for a, b in zip(ahead, other.batches(plan, driven.chunks[0]), strict=True):
            for name in ("tokens", "labels", "loss_mask", "position_ids", "rollout_logprobs"):
                assert torch.equal(getattr(a, name), getattr(b, name))
            assert torch.equal(a.packed_seq_params.cu_seqlens_q, b.packed_seq_params.cu_seqlens_q)

    def test_what_cannot_be_read_is_an_error_at_its_micro_batch(self, driven) -> None:
        iterator = driven.iterators([["s0"], ["absent"]])
        next(iterator)
        with pytest.raises(StoreError, match="no sample 'absent'"):
            next(iterator)
        with pytest.raises(ReplayError, match="a micro-batch without samples"):
            next(driven.iterators([[]]))
        driven.store = None
        with pytest.raises(ReplayError, match="'s0': a sample id, and no store"):
            next(driven.iterators([["s0"]]))
