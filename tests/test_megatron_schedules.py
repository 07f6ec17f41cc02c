"""Replay under Megatron-core's real schedules: two gloo ranks, every layout and every kind of recompute, one after another.

The worker is megatron_ranks.py. Of each case: the ids at the dispatchers, in forward and in recompute; loss and gradients against
a plain loop on one process; and that nothing of a micro-batch outlives its graph.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from megatron_cases import CASES, EVEN, EXCEPTIONS, MICRO_BATCHES, SPEC, TEN, Case, run

pytestmark = pytest.mark.engine

Results = Callable[[Case], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the two ranks saw of a case."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = [case.name for case in [*CASES, *EXCEPTIONS]]
    torch.multiprocessing.spawn(run, args=(2, port, str(out), names), nprocs=2)
    return lambda case: [torch.load(out / f"{case.name}-{rank}.pt", weights_only=False) for rank in (0, 1)]


def recorded_rows(batches: list[Any]) -> int:
    return sum(int(np.count_nonzero(sample.routes.recorded)) for batch in batches for sample in batch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
class TestStep:
    def test_the_dispatchers_receive_the_recorded_experts(self, case: Case, results: Results) -> None:
        """On every recorded row of every layer, counted over the ranks, in the forward and again in each recompute."""
        got = results(case)
        rows = recorded_rows(EVEN if case.even else MICRO_BATCHES)
        runs = sum(1 + (layer in case.recomputed) for layer in SPEC.moe_layers)
        assert sum(one["exact"] for one in got) == rows * runs
        assert [one["wrong"] for one in got] == [0, 0]

    def test_live_rows_choose_the_same_experts_again(self, case: Case, results: Results) -> None:
        for one in results(case):
            assert one["forwards"][0] == one["forwards"][1]
            assert one["recomputes"][0] == one["recomputes"][1]
            assert one["changed"] == 0

    def test_loss_and_gradients_are_those_of_one_process(self, case: Case, results: Results) -> None:
        got = results(case)
        for one in got:
            assert one["loss"][0] == pytest.approx(one["loss"][1], rel=1e-5)
            assert one["error"] < 1e-4
            assert one["router gradient"] > 0.1
        names = set(itertools.chain(*(one["parameters"] for one in got)))
        assert sum("mlp.router.weight" in name for name in names) == SPEC.num_moe_layers
        assert sum("linear_fc2" in name for name in names) == SPEC.num_moe_layers * SPEC.num_experts + 1

    def test_each_layer_is_bound_by_its_global_number(self, case: Case, results: Results) -> None:
        layers = [one["layers"] for one in results(case)]
        if case.vpp:  # one layer a chunk, dealt round
            assert layers == [(2,), (1, 3)]
        else:
            assert layers == ([(1,), (2, 3)] if case.pp == 2 else [(1, 2, 3)] * 2)

    def test_coverage_adds_up_over_the_ranks_that_share_the_rows(self, case: Case, results: Results) -> None:
        rows = recorded_rows(EVEN if case.even else MICRO_BATCHES)
        replayed = [one["coverage"]["replayed"] for one in results(case)]
        if (
            case.pp == 2
        ):  # each stage routes every token; in the interleaved layout the second has two chunks with routers
            assert replayed == [rows, 2 * rows if case.vpp else rows]
        else:
            assert sum(replayed) == rows

    def test_nothing_outlives_the_step(self, case: Case, results: Results) -> None:
        for one in results(case):
            assert one["alive"] == 0
            assert one["left behind"] == []

    def test_a_forward_only_pass_replays_and_keeps_nothing(self, case: Case, results: Results) -> None:
        for one in results(case):
            loss, wrong, forwards, alive = one["forward only"]
            assert loss == pytest.approx(one["loss"][1], rel=1e-5)
            assert wrong == 0
            assert forwards > 0
            assert alive == 0


@pytest.mark.parametrize("case", EXCEPTIONS, ids=lambda case: case.name)
def test_after_an_exception_in_the_fourth_of_ten_micro_batches_the_next_step_is_right(
    case: Case, results: Results
) -> None:
    got = results(case)
    rows = recorded_rows(TEN)
    for one in got:
        assert one["alive"] == 0
        assert one["wrong"] == one["changed"] == 0
        assert one["loss"][0] == pytest.approx(one["loss"][1], rel=1e-5)
        assert one["error"] < 1e-4
        assert one["router gradient"] > 0.1
    assert sum(one["exact"] for one in got) == rows * SPEC.num_moe_layers * 2
