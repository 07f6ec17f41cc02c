"""Faults inside a shard that no token shows are caught by comparing recorded experts with the router's own choice.

Each fault is put into routes that the model really chose, and must be named before there is a gradient. A numpy count
over all compared rows is the reference for the shares that are reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from qwen import build, forward, loss, recorded, samples_of
from torch import nn

from r3 import RolloutSample, Routes, RoutingSpec
from r3.agreement import MIN_AGREEMENT, ROWS_PER_SAMPLE, Agreement, AgreementCheck
from r3.errors import ReplayError
from r3.replay import Replay
from r3.testing import FAULTS as FAULTS_ON_THE_WIRE
from r3.trainers.transformers import attach, detach, right_padded

EXPERTS = {"num_experts": 24, "num_local_experts": 24, "num_experts_per_tok": 4}
LENGTHS = (40, 64, 33)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> nn.Module:
    return build(**EXPERTS)


@pytest.fixture
def replay(model) -> Replay:
    return attach(model)


@pytest.fixture
def samples(model, replay) -> list[RolloutSample]:
    """Samples as a rollout would have made them: the model's own routes, none for the last token."""
    own = recorded(model, samples_of(*LENGTHS, spec=RoutingSpec.from_config(model.config)), replay)
    return [with_routes(s, s.routes.ids) for s in own]


def with_routes(sample: RolloutSample, ids: np.ndarray) -> RolloutSample:
    return replace(
        sample, routes=Routes(np.ascontiguousarray(ids), np.arange(sample.num_tokens) < sample.num_tokens - 1)
    )


def shifted(ids: np.ndarray) -> np.ndarray:
    return np.roll(ids, 1, axis=1)


def shifted_from_the_middle(ids: np.ndarray) -> np.ndarray:
    half = ids.shape[1] // 2
    return np.concatenate([ids[:, :half], np.roll(ids[:, half:], 1, axis=1)], axis=1)


def swapped(ids: np.ndarray) -> np.ndarray:
    return ids[[0, 2, 1]]


def injected(sample: RolloutSample, name: str) -> RolloutSample:
    """A fault of the injector, which works on the rows of a payload: [tokens, all layers, K]."""
    spec, rows = (
        sample.spec,
        np.zeros((sample.num_tokens, sample.spec.num_layers, sample.spec.top_k), sample.spec.dtype),
    )
    rows[:, list(spec.moe_layers)] = sample.routes.ids.transpose(1, 0, 2)
    broken = FAULTS_ON_THE_WIRE[name].inject(rows, spec, np.random.default_rng(0))
    return with_routes(sample, broken[:, list(spec.moe_layers)].transpose(1, 0, 2).astype(spec.dtype))


FAULTS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], str]] = {
    "shifted rows": (shifted, r"sample 's1', tokens 0 to 62"),
    "rows shifted from the middle on": (shifted_from_the_middle, r"sample 's1', tokens 32 to 62"),
    "swapped layers": (swapped, r"sample 's1', decoder layers \[2, 3\]"),
}


def test_routes_as_recorded_pass_and_their_share_is_reported(model, replay, samples) -> None:
    loss(model, samples, replay).backward()
    compared = sum(min(length - 1, ROWS_PER_SAMPLE) for length in LENGTHS) * 4
    assert replay.agreement.compared == {1: compared, 2: compared, 3: compared}
    assert replay.agreement.share == 1
    assert replay.agreement.by_layer() == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_one_of_three_samples_is_named_before_any_gradient(fault: str, model, replay, samples) -> None:
    spoil, words = FAULTS[fault]
    samples[1] = with_routes(samples[1], spoil(samples[1].routes.ids))
    with pytest.raises(ReplayError, match=f"{words}: the recorded experts are not those of this model's routers"):
        loss(model, samples, replay)
    assert all(p.grad is None for p in model.parameters())
    samples[1] = samples[0]
    loss(model, [samples[0]], replay).backward()  # and the handle is usable afterwards


@pytest.mark.parametrize("name", [name for name, fault in FAULTS_ON_THE_WIRE.items() if "agreement" in fault.later])
def test_what_no_check_of_a_payload_can_find(name: str, model, replay, samples) -> None:
    """The faults of `r3.testing` that leave this to agreement."""
    samples[1] = injected(samples[1], name)
    with pytest.raises(
        ReplayError, match=r"sample 's1', .*: the recorded experts are not those of this model's routers"
    ):
        loss(model, samples, replay)
    assert all(p.grad is None for p in model.parameters())


def test_routes_of_another_sample_are_named(model, replay, samples) -> None:
    """Its tokens are compared with those of the batch, so the fault that can reach replay is the exchange of routes alone."""
    samples[1] = with_routes(samples[1], np.resize(samples[0].routes.ids, samples[1].routes.ids.shape))
    with pytest.raises(ReplayError, match="sample 's1', "):
        loss(model, samples, replay)
    layout, input_ids, _ = right_padded(samples)
    with pytest.raises(ReplayError, match="the trainer's tokens are not the rollout's"):
        replay.micro_batch(samples, layout, input_ids[[0, 2, 1]]).__enter__()


def test_other_weights_are_told(samples) -> None:
    other = build(seed=1, **EXPERTS)
    with pytest.raises(ReplayError, match="or other weights than those that sampled"):
        forward(other, samples, attach(other))


def test_the_check_can_be_left_out(model, samples) -> None:
    detach(model)
    replay = attach(model, min_agreement=0)
    samples[1] = with_routes(samples[1], shifted(samples[1].routes.ids))
    loss(model, samples, replay)
    assert replay.agreement.compared == {}
    assert np.isnan(replay.agreement.share)


def test_shares_equal_a_count_by_hand() -> None:
    """Counts of a check against sets, row by row."""
    rng = np.random.default_rng(0)
    (sample,) = samples_of(20)
    layout = right_padded([sample])[0]
    own = rng.random((3, 20, 8)).argsort(-1)[..., :2]
    check = AgreementCheck([sample], layout, sample.routes.recorded, (1, 2, 3), minimum=0.0001)
    assert check.rows.tolist() == list(range(19))
    total = Agreement()
    for position, layer in enumerate((1, 2, 3)):
        ids = torch.from_numpy(sample.routes.ids[position].astype(np.int64))
        check.see(layer, ids[check.rows], torch.from_numpy(own[position])[check.rows])
    check.start()
    check.finish(total)
    for position, layer in enumerate((1, 2, 3)):
        pairs = zip(sample.routes.ids[position, :19].tolist(), own[position, :19].tolist(), strict=True)
        assert total.agreed[layer] == sum(len(set(a) & set(b)) for a, b in pairs)
    assert total.compared == {1: 38, 2: 38, 3: 38}


def test_a_few_ids_are_not_judged(model, replay) -> None:
    """Random routes on 5 tokens could agree or not by chance."""
    few = samples_of(5, spec=replay.spec)
    loss(model, few, replay)
    assert replay.agreement.share < MIN_AGREEMENT


def test_the_least_share_must_be_a_share(model) -> None:
    spec = RoutingSpec.from_config(model.config)
    with pytest.raises(ReplayError, match=r"min_agreement is a share"):
        Replay(spec, spec.moe_layers, torch.device("cpu"), min_agreement=65)
