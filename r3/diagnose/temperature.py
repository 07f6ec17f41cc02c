"""At which temperature do the trainer's logits explain the rollout's log-probs best? Metadata may be silent, or lie.

The metadata says which temperature must be applied: 1 for `raw_logprobs`, the sampling temperature for
`processed_logprobs`. The trainer scores a few samples at that temperature and at 5 % above and below. If the claim is the
best of the three by mean |d|, it stands. If not, a golden-section search over [0.2, 5] finds the temperature that is. A wrong
temperature of 0.7 for 1 is a mean |d| of 0.4 on the tiny model, against 0.006 at the right one: no other fault looks like it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from r3.diagnose.scoring import Scorer
from r3.sample import RolloutSample

PROBE_TOKENS = 1024
_STEP = 1.05
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class TemperatureFit:
    """Attributes:
    claimed: What the metadata asks for.
    fitted: The best one; equal to `claimed` where it is the best of its neighbours.
    mean_abs_claimed, mean_abs_fitted: mean |d| there.
    tokens: Compared tokens of the samples that were scored.
    """

    claimed: float
    fitted: float
    mean_abs_claimed: float
    mean_abs_fitted: float
    tokens: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def fit_temperature(
    scorer: Scorer,
    samples: Sequence[RolloutSample],
    used: Callable[[RolloutSample], np.ndarray[tuple[int], np.dtype[np.bool_]]],
    claimed: float,
) -> TemperatureFit | None:
    """Fit on the first PROBE_TOKENS compared tokens, live. None where nothing was sampled.

    Args:
        used: [T] bool, the compared tokens of a sample.
    """
    probe: list[RolloutSample] = []
    tokens = 0
    for sample in samples:
        if tokens >= PROBE_TOKENS:
            break
        if used(sample).any():
            probe.append(sample)
            tokens += int(used(sample).sum())
    if not probe:
        return None
    rollout = np.concatenate([s.rollout_logprobs[used(s)] for s in probe]).astype(np.float64)

    def mean_abs(temperature: float) -> float:
        scores = scorer.score(probe, replay=False, temperature=temperature)
        train = np.concatenate([score.logprobs[used(s)] for s, score in zip(probe, scores, strict=True)])
        return float(np.abs(train.astype(np.float64) - rollout).mean())

    at_claim = mean_abs(claimed)
    if at_claim <= mean_abs(claimed * _STEP) and at_claim <= mean_abs(claimed / _STEP):
        return TemperatureFit(claimed, claimed, at_claim, at_claim, tokens)
    fitted, best = _golden_section(mean_abs, math.log(0.2), math.log(5.0))
    return TemperatureFit(claimed, fitted, at_claim, best, tokens)


def _golden_section(of: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """The temperature between exp(low) and exp(high) that minimises `of`, within 1 %, and the minimum."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = of(math.exp(a)), of(math.exp(b))
    while high - low > 0.01:
        if at_a < at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = of(math.exp(a))
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = of(math.exp(b))
    return (math.exp(a), at_a) if at_a < at_b else (math.exp(b), at_b)
