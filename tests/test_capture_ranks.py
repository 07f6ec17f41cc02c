"""Capture on two ranks: shards put together, gathered batches cut apart, and a fault on one rank seen on both."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import capture_ranks
import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    import torch

    out: Path = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(capture_ranks.run, args=(port, str(out)), nprocs=2)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_all_ranks_are_initialised(found: list[dict]) -> None:
    """A rank that bound nothing is an error on every rank, before the first step, and not a collective that hangs."""
    for rank in found:
        assert "the ranks of this group do not capture alike" in rank["half"]
        assert "rank 0: 2 layers, rank 1: nothing" in rank["half"]
        assert "rank 0: nothing, rank 1: nothing" in rank["none"]


def test_every_rank_has_all_rows_of_a_sharded_batch_and_its_own_of_a_gathered_one(found: list[dict]) -> None:
    for rank in found:
        outcomes = {name: value for name, value in rank.items() if name.startswith(("sharded", "gathered"))}
        assert len(outcomes) == 10
        assert all(outcomes.values()), outcomes


def test_a_fault_on_one_rank_is_an_error_on_both(found: list[dict]) -> None:
    zero, one = found
    assert "layer 1: 1 of 2 layers did not capture" in one["incomplete"]
    assert "rank 1 of the group: a rank's part of a sharded batch cannot be used" in zero["incomplete"]
    assert "layer 1: 1 layers selected experts that do not exist" in one["physical"]
    assert "rank 1 of the group" in zero["physical"]
    assert zero["sound"] == one["sound"] == ""
