"""The Megatron trainer in the diagnostic, on real vLLM rollouts: replay closes the gap as it does in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron_shards import rollouts  # noqa: F401 - a fixture

from r3 import ShardStore
from r3.diagnose import AGAIN, LIVE, REPLAY, Diagnosis, Scorer, diagnose
from r3.errors import ConfigError, ReplayError
from r3.trainers.score import TransformersScorer

pytestmark = pytest.mark.engine

Scored = tuple[Scorer, Diagnosis]


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    yield
    from megatron.core import parallel_state

    torch.distributed.destroy_process_group()
    parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def both(request, tiny_model: Path, rollouts: ShardStore, process_group: None) -> tuple[str, Scored, Scored]:  # noqa: ARG001, F811
    """(dtype, Megatron, transformers), each with its diagnosis of the same rollouts."""
    from r3.trainers.megatron.score import MegatronScorer

    scorers = [MegatronScorer(tiny_model, dtype=request.param), TransformersScorer(tiny_model, dtype=request.param)]
    first, second = ((scorer, diagnose(rollouts, scorer)) for scorer in scorers)
    return request.param, first, second


def test_replay_closes_the_gap(both) -> None:
    _, (_, megatron), _ = both
    live, replay = megatron.gaps[LIVE], megatron.gaps[REPLAY]
    assert live.num_tokens > 2000
    assert megatron.mismatch[LIVE].share > 0.005
    assert replay.k3 < 0.6 * live.k3
    assert live.exceed["1.1"] > 0
    assert replay.exceed["1.1"] <= live.exceed["1.1"] / 4
    assert megatron.mismatch[REPLAY].share == megatron.mismatch[AGAIN].share == 0
    assert megatron.noise == 0


def test_every_recorded_route_is_seen_at_the_dispatcher(both, rollouts: ShardStore) -> None:  # noqa: F811
    _, (scorer, megatron), _ = both
    recorded = sum(sample.routes.num_recorded for sample in rollouts)
    assert megatron.verified == recorded * scorer.spec.num_moe_layers
    assert scorer.replay.coverage.replayed == 2 * recorded  # replay, and replay again


def test_both_trainers_agree_under_replay(both, rollouts: ShardStore) -> None:  # noqa: F811
    """In float32 to rounding. In bfloat16 they differ like either of them from vLLM: the sums run in another order."""
    dtype, (megatron, of_megatron), (transformers, of_transformers) = both
    samples = list(rollouts)[:16]
    a, b = (scorer.score(samples, replay=True, temperature=1.0) for scorer in (megatron, transformers))
    gap = np.concatenate([np.abs(x.logprobs - y.logprobs)[1:] for x, y in zip(a, b, strict=True)])
    assert gap.max() < (2e-5 if dtype == "float32" else 0.25)
    assert gap.mean() < (1e-6 if dtype == "float32" else 0.015)
    k3 = of_megatron.gaps[REPLAY].k3, of_transformers.gaps[REPLAY].k3
    assert k3[0] == pytest.approx(k3[1], rel=1e-3 if dtype == "float32" else 0.5)


def test_the_report_names_the_stack(both, tiny_model: Path) -> None:
    dtype, (scorer, _), _ = both
    described = scorer.describe()
    assert (described["framework"], described["dtype"], described["parallel"]) == (
        "megatron-core",
        dtype,
        "one process",
    )
    assert described["model"] == str(tiny_model)


def test_a_temperature_divides_the_logits(both, rollouts: ShardStore) -> None:  # noqa: F811
    _, (scorer, _), _ = both
    (plain,), (warm,) = (scorer.score(list(rollouts)[:1], replay=True, temperature=t) for t in (1.0, 2.0))
    assert warm.logprobs[1:].min() > plain.logprobs[1:].min()


def test_a_temperature_does_not_round_logits_twice(both) -> None:  # noqa: ARG001 - Megatron's groups
    from r3.trainers.megatron.score import label_logprobs

    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(2, 16, 64, generator=generator)
    labels = torch.randint(0, 64, (2, 16), generator=generator)
    logits = logits.bfloat16()
    exact = (logits.double() / 0.7).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    assert (label_logprobs(logits, labels, 0.7) - exact).abs().max() < 1e-5


def test_what_cannot_be_scored_is_refused(tiny_model: Path, process_group: None) -> None:  # noqa: ARG001
    from r3.trainers.megatron.score import MegatronScorer

    with pytest.raises(ConfigError, match="unknown dtype"):
        MegatronScorer(tiny_model, dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="runs on the GPU where there is one"):
            MegatronScorer(tiny_model, device="cuda")


def test_a_dispatcher_that_loses_an_expert_is_seen(both, rollouts: ShardStore) -> None:  # noqa: F811
    """The observation does not ask the override: a router that answers with fewer experts is found out behind it."""
    _, (scorer, _), _ = both
    router = scorer.chunks[0].decoder.layers[3].mlp.router

    def lossy(
        _module: object, _args: object, output: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = output
        routing_map = routing_map.clone()
        routing_map[0, routing_map[0].nonzero()[0]] = False
        return probs, routing_map

    handle = router.register_forward_hook(lossy)
    try:
        with pytest.raises(ReplayError, match="layer 3: a token goes to another number of experts"):
            scorer.score(list(rollouts)[:1], replay=True)
    finally:
        handle.remove()
