"""Real vLLM rollouts of the tiny trained model for the tests of the Megatron trainer: collected once a session."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from r3 import ShardStore
from r3.rollout.collector import collect
from r3.rollout.preflight import EngineInfo
from r3.rollout.prompts import read_prompts
from r3.rollout.protocol import Sampling


@pytest.fixture(scope="session")
def rollouts(engine: EngineInfo, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> ShardStore:
    """Two samples of 48 tokens of each of 24 prompts."""
    root = tmp_path_factory.getbasetemp() / "megatron-rollouts"
    if not root.is_dir():  # another module's fixture of the same name made it
        store = ShardStore(root, create=True)
        prompts = read_prompts(tiny_model / "prompts.jsonl")[:24]
        report = asyncio.run(collect(prompts, store, engine, sampling=Sampling(max_tokens=48, seed=3), n=2))
        assert (report.written, report.failures) == (48, ())
    return ShardStore(root)
