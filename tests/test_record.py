"""R2: what `replay.record` keeps is what the experts received, narrow, on the host; and it replays."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from qwen import SPEC, build, forward, gradients, loss, recorded, samples_of
from torch import nn

from r3 import Layout, RoutingSpec
from r3.errors import ReplayError
from r3.trainers.transformers import attach, observe, right_padded

SAMPLES = samples_of(9, 12, 5)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model() -> nn.Module:
    return build()


def received(spec: RoutingSpec, seen: dict[int, torch.Tensor], layout: Layout) -> list[np.ndarray]:
    """What the experts of a forward received, [L, tokens, K] of each sample, cut out of the batch here by hand."""
    by_layer = np.stack([seen[layer].numpy() for layer in spec.moe_layers])
    out = []
    for sample in range(len(layout.lengths)):
        positions = [p for p, row in enumerate(layout.rows) if row >= 0 and layout.locate_row(int(row))[0] == sample]
        out.append(by_layer[:, positions])
    return out


@pytest.mark.parametrize("num_experts", [8, 300])
def test_the_record_is_what_the_experts_received(num_experts: int) -> None:
    model = build(num_experts=num_experts, num_local_experts=num_experts)
    spec = RoutingSpec.from_config(model.config)
    samples = samples_of(9, 12, 5, spec=spec)
    layout, input_ids, mask = right_padded(samples)
    replay = attach(model)
    with observe(model, spec) as seen, torch.no_grad(), replay.record(layout) as recording:
        model(input_ids, attention_mask=mask, use_cache=False)
    routes = recording.routes()
    for one, ids in zip(routes, received(spec, seen, layout), strict=True):
        assert one.ids.dtype == (np.uint8 if num_experts == 8 else np.uint16)
        assert np.array_equal(one.ids, ids)
        assert one.recorded.all()
    assert max(int(one.ids.max()) for one in routes) > (255 if num_experts == 300 else 5)


def test_replaying_a_record_with_the_same_weights_changes_no_bit(model) -> None:
    live = forward(model, SAMPLES)
    live.logsumexp(-1).mean().backward()
    live_gradients = gradients(model)
    replay = attach(model)
    samples = recorded(model, SAMPLES, replay)
    replayed = forward(model, samples, replay)
    replayed.logsumexp(-1).mean().backward()
    assert torch.equal(replayed, live)
    assert torch.equal(gradients(model), live_gradients)
    assert replay.coverage.share == 1
    assert replay.agreement.share == 1


def test_a_record_outlives_a_change_of_the_weights(model) -> None:
    replay = attach(model)
    samples = recorded(model, SAMPLES, replay)
    with torch.no_grad():
        for index in SPEC.moe_layers:
            model.model.layers[index].mlp.gate.weight.add_(torch.randn(8, 32))
    layout = right_padded(samples)[0]
    with observe(model, SPEC) as seen, torch.no_grad():
        forward(model, samples)
        live = received(SPEC, seen, layout)
        forward(model, samples, replay)
        replayed = received(SPEC, seen, layout)
    for sample, now, ids in zip(samples, live, replayed, strict=True):
        assert np.array_equal(ids, sample.routes.ids)
        assert (np.sort(now) != np.sort(ids)).mean() > 0.2
    assert replay.agreement.share < 0.8


def test_recording_changes_nothing_and_keeps_nothing_on_the_device(model) -> None:
    live = forward(model, SAMPLES)
    replay = attach(model)
    layout, input_ids, mask = right_padded(SAMPLES)
    with replay.record(layout) as recording:
        logits = model(input_ids, attention_mask=mask, use_cache=False).logits
    assert torch.equal(logits, live)
    kept = [weakref.ref(ids) for ids in recording._ids.values()]
    assert [(ids().dtype, tuple(ids().shape), ids().device.type) for ids in kept] == [(torch.uint8, (36, 2), "cpu")] * 3
    assert replay.coverage.replayed == 0
    del recording, logits
    gc.collect()
    assert [ids() for ids in kept] == [None] * 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recording_a_pass_that_trains(model, use_reentrant: bool) -> None:
    """The recompute of a recorded forward routes live again, and is not recorded a second time."""
    loss(model, SAMPLES).backward()
    reference = gradients(model)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    replay = attach(model)
    layout, input_ids, mask = right_padded(SAMPLES)
    with replay.record(layout) as recording:
        logits = model(input_ids, attention_mask=mask, use_cache=False).logits
    before = [routes.ids.copy() for routes in recording.routes()]
    logits.logsumexp(-1).square().mean().backward()
    torch.testing.assert_close(gradients(model), reference)
    for routes, ids in zip(recording.routes(), before, strict=True):
        assert np.array_equal(routes.ids, ids)


def test_records_replay_in_other_batches(model) -> None:
    """Recorded three in a batch, replayed alone: rows follow their tokens."""
    replay = attach(model)
    samples = recorded(model, SAMPLES, replay)
    together = forward(model, samples, replay)
    for line, sample in enumerate(samples):
        alone = forward(model, [sample], replay)[0]
        torch.testing.assert_close(alone, together[line, : sample.num_tokens], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_recorded_is_refused(model) -> None:
    replay = attach(model)
    layout, input_ids, mask = right_padded(SAMPLES)
    with replay.record(layout):
        model(input_ids, attention_mask=mask, use_cache=False)
        with pytest.raises(ReplayError, match="layer 1: a recording holds one forward"):
            model(input_ids, attention_mask=mask, use_cache=False)
    with pytest.raises(ReplayError, match="no forward of the attached model"), replay.record(layout) as recording:
        pass
    with pytest.raises(ReplayError, match="nothing is recorded"):
        recording.routes()
    half = layout.chunk(0, 2, batch=3)
    with torch.no_grad(), replay.record(half) as recording:
        model(input_ids[:, :6], attention_mask=mask[:, :6], use_cache=False)
    with pytest.raises(
        ReplayError, match="sample 0 of the micro-batch, token 6: tokens of this sample are not on this"
    ):
        recording.routes()
