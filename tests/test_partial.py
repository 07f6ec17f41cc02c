"""PartialSample: some layers of a sample, in memory or out of a shard, replay exactly like the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SPEC, random_sample

from r3 import Layout, RolloutSample, Routes, ShardStore
from r3.errors import ReplayError, SampleError
from r3.microbatch import MicroBatch, Recording
from r3.partial import PartialSample

CPU = torch.device("cpu")


@pytest.fixture
def sample() -> RolloutSample:
    return random_sample(np.random.default_rng(3), SPEC, 12)


@pytest.mark.parametrize("layers", [(1,), (2, 3), (1, 3), (1, 2, 3), ()])
def test_of_a_shard_and_of_memory(layers: tuple[int, ...], sample: RolloutSample, tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    store.add(sample, fsync=False)
    for part in (PartialSample.of(sample, layers), PartialSample.read(store, sample.sample_id, layers)):
        assert part.routes.equal(sample.routes.layers([SPEC.moe_layers.index(layer) for layer in layers]))
        assert np.array_equal(part.tokens, sample.tokens)
        assert np.array_equal(part.loss_mask, sample.loss_mask)
        assert (part.num_tokens, part.layers, part.spec) == (12, layers, SPEC)


def test_a_stage_reads_its_layers_bytes_alone(sample: RolloutSample, tmp_path: Path) -> None:
    """What is damaged in a layer of another stage is not seen; in its own it is."""
    store = ShardStore(tmp_path)
    store.add(sample, fsync=False)
    path = store.path_of(sample.sample_id)
    raw = bytearray(path.read_bytes())
    layer = sample.routes.ids[2].tobytes()
    at = raw.find(layer)
    raw[at] ^= 1
    path.write_bytes(raw)
    assert PartialSample.read(store, sample.sample_id, (1, 2)).layers == (1, 2)
    with pytest.raises(Exception, match="layer") as error:
        PartialSample.read(store, sample.sample_id, (2, 3))
    assert type(error.value).__name__ == "ShardError"


def test_rows_of_a_micro_batch_are_those_of_the_whole(sample: RolloutSample) -> None:
    layout = Layout.padded([12], 16).select(np.arange(16)[::-1].copy())
    whole = MicroBatch([sample], layout, SPEC, CPU)
    part = MicroBatch([PartialSample.of(sample, (2, 3))], layout, SPEC, CPU, layers=(2, 3))
    for position in (1, 2):
        assert torch.equal(part.ids_of(position), whole.ids_of(position))
    with pytest.raises(ReplayError, match="read without layers") as error:
        MicroBatch([PartialSample.of(sample, (2,))], layout, SPEC, CPU, layers=(1, 2))
    assert error.value.where == "sample 's0', decoder layers [1]"


@pytest.mark.parametrize("layers", [(0,), (3, 2), (2, 2), (4,)])
def test_layers_that_do_not_route(layers: tuple[int, ...], sample: RolloutSample) -> None:
    with pytest.raises(SampleError, match="no routes of such layers"):
        PartialSample.of(sample, layers)


def test_parts_that_do_not_fit(sample: RolloutSample) -> None:
    part = PartialSample.of(sample, (2, 3))
    with pytest.raises(SampleError, match="do not fit the tokens and the layers"):
        replace(part, layers=(2,))
    ids = part.routes.ids.copy()
    ids[1, 4, 0] = 200
    with pytest.raises(SampleError, match="out of range") as error:
        replace(part, routes=Routes(ids, part.routes.recorded))
    assert error.value.where == "sample 's0': token 4, layer 3"


def test_a_recording_of_some_layers_and_tokens(sample: RolloutSample) -> None:
    """On a rank that holds the second half of the tokens and layers 2 and 3."""
    layout = Layout.packed([12]).chunk(1, 2)
    recording = Recording(layout, SPEC, (2, 3))
    with pytest.raises(ReplayError, match="nothing is recorded"):
        recording.partial([sample])
    for position in (1, 2):
        ids = torch.from_numpy(sample.routes.ids[position, 6:].astype(np.int64))
        recording.choose(position, lambda rows=None, ids=ids: ids, (6, 2))  # noqa: ARG005
    [part] = recording.partial([sample])
    assert part.layers == (2, 3)
    assert part.routes.recorded.tolist() == [False] * 6 + [True] * 6
    assert np.array_equal(part.routes.ids[:, 6:], sample.routes.ids[1:, 6:])
    with pytest.raises(ReplayError, match="tokens of this sample are not on this rank") as error:
        recording.routes()
    assert error.value.where == "sample 0 of the micro-batch, token 0"
    with pytest.raises(ReplayError, match="not the samples of the recording"):
        recording.partial([sample.truncate(11)])
