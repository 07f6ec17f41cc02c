"""Datasets over a store on S3: a real server, workers that are forked from a process that used the client, and ranges alone."""

from __future__ import annotations

import os

import numpy as np
import pytest
from helpers import random_sample
from s3 import Server, bucket, server, server_process  # noqa: F401
from torch.utils.data import DataLoader

from r3 import RoutingSpec, ShardStore
from r3.trainers.data import Follow, ShardIterableDataset, Snapshot

pytestmark = pytest.mark.engine
SPEC = RoutingSpec(24, tuple(range(24)), 128, 8)
TOKENS = 2048  # 393 KB of routes


@pytest.fixture
def store(bucket: str) -> ShardStore:  # noqa: F811
    store = ShardStore(f"{bucket}/run", create=True)
    rng = np.random.default_rng(0)
    for number in range(8):
        sample = random_sample(rng, SPEC, TOKENS, sample_id=f"p{number // 2}.{number}", group_id=f"p{number // 2}")
        store.step(3, create=True).add(sample)
    return store


def test_forked_workers(store: ShardStore) -> None:
    for follow in (None, Follow(8, poll_s=0.05)):
        dataset = ShardIterableDataset(store, group_size=2, uneven="pad", routes="read", layers=(3, 4), follow=follow)
        loader = DataLoader(dataset, batch_size=2, num_workers=2, collate_fn=list, timeout=60)
        samples = {sample.sample_id: sample for batch in loader for sample in batch}
        assert sorted(samples) == store.step(3).sample_ids()
        for name, sample in samples.items():
            assert sample.key.startswith("s3://")
            assert sample.routes.equal(store.step(3).open(name).routes.layers([3, 4]))


def test_a_rank_reads_its_layers_bytes(store: ShardStore, server: Server) -> None:  # noqa: F811
    snapshot = Snapshot.take(store)
    server.clear()
    samples = list(ShardIterableDataset(snapshot, layers=(5, 6)))
    before = sum(request["out"] for request in server.requests())
    assert before < 8 * 40_000  # tokens, log-probs and heads
    for sample in samples:
        assert sample.routes.ids.shape == (2, TOKENS, 8)
    read = sum(request["out"] for request in server.requests()) - before
    assert read < 8 * (2 * TOKENS * 8 + 10_000)
    assert os.path.basename(samples[0].key) == f"{samples[0].sample_id}.safetensors"
