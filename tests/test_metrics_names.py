"""Our metrics against veRL's own functions, on the same arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from r3.metrics import GapAccumulator
from r3.metrics.names import NAMES

pytestmark = pytest.mark.engine  # importing veRL takes longer than the tests without this mark may
DOCS = Path(__file__).resolve().parent.parent / "docs" / "kl-diagnostic.md"


@pytest.fixture(scope="module")
def verl() -> dict[str, float]:
    """What veRL 0.9.1 says of a batch [6, 40], float64, by the names that it logs."""
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_is_metrics, compute_offpolicy_metrics
    from verl.utils.debug.metrics import calculate_debug_metrics

    rollout, train, mask = (torch.from_numpy(x) for x in batch())
    found = {f"rollout_corr/{k}": v for k, v in compute_offpolicy_metrics(train, rollout, mask).items()}
    ratio = torch.exp(train - rollout)
    weights = compute_is_metrics(
        rollout_is_weights=ratio * mask,
        raw_rollout_is_weights=ratio * mask,
        log_ratio_for_metrics=train - rollout,
        response_mask=mask,
        rollout_is="token",
        rollout_is_threshold=1e6,
    )
    found |= {f"rollout_corr/{k}": v for k, v in weights.items()}
    tensors = {"rollout_log_probs": rollout, "old_log_probs": train, "response_mask": mask, "responses": mask}
    return {k: float(v) for k, v in {**found, **calculate_debug_metrics(DataProto.from_dict(tensors))}.items()}


def batch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    rollout = -0.3 - rng.exponential(1, (6, 40))
    mask = (np.arange(40) < rng.integers(5, 41, (6, 1))).astype(np.int64)
    return rollout, rollout + rng.normal(0, 0.05, (6, 40)), mask


@pytest.fixture(scope="module")
def ours() -> GapAccumulator:
    gap = GapAccumulator()
    for rollout, train, mask in zip(*batch(), strict=True):
        gap.add(train[mask > 0], rollout[mask > 0])
    return gap


@pytest.mark.parametrize("name", [n for n in NAMES if n.project == "verl"], ids=lambda n: n.theirs)
def test_a_metric_of_verl_is_ours(verl: dict[str, float], ours: GapAccumulator, name) -> None:
    gap, sequences = ours.metrics(), ours.sequence_metrics()
    attribute, _, part = name.ours.partition("[")
    value = getattr(gap, attribute) if hasattr(gap, attribute) else getattr(sequences, attribute)
    value = value[part.rstrip("]")] if part else value
    if name.theirs.endswith("eff_sample_size"):  # veRL clips the masked positions' weights, which it does not count
        assert value == pytest.approx(verl[name.theirs], rel=1e-4)
    else:
        assert value == pytest.approx(verl[name.theirs], rel=1e-6), name


def test_the_documentation_has_the_table() -> None:
    text = DOCS.read_text()
    missing = [name for name in NAMES if f"| `{name.ours}` | {name.project} | `{name.theirs}` |" not in text]
    assert missing == []
