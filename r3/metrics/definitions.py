"""The per-token terms of every metric, and what may be called a log-prob.

d = log p_train - log p_rollout and r = exp(d), on tokens that the *rollout* sampled. Definitions: Schulman's k1, k2, k3;
F(tau) of arXiv 2510.11370; chi-square, ESS and their clamp of the log-ratio at 20 as in veRL
(`verl/trainer/ppo/rollout_corr_helper.py`); the Jensen-Shannon term of NeMo RL (`js_divergence_error`).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from r3.errors import MetricError

TAUS = (1.1, 1.5, 2.0, 3.0, 5.0, 10.0)
DIRECTION = "KL(rollout || train)"
IMPOSSIBLE = -700.0  # no sampled token has less, and exp(d) would overflow: vLLM writes -9999 where it has -inf
CLAMP = 20.0  # of log-ratios inside chi-square and ESS: veRL's SAFETY_BOUND

Float = npt.NDArray[np.float64]


def log_ratio(train_logprobs: npt.ArrayLike, rollout_logprobs: npt.ArrayLike, where: str = "tokens") -> Float:
    """d = log p_train - log p_rollout [n] in float64.

    Raises:
        MetricError: unequal shapes, no token, or values that are not log-probs.
    """
    train, rollout = np.asarray(train_logprobs, np.float64), np.asarray(rollout_logprobs, np.float64)
    if train.shape != rollout.shape or train.ndim != 1:
        raise MetricError(
            "log-probs of unequal shape cannot be compared",
            where=where,
            expected=list(rollout.shape),
            got=list(train.shape),
        )
    if train.size == 0:
        raise MetricError(
            "no sampled token to compare", where=where, remedy="the loss mask is empty: nothing was sampled"
        )
    for name, values, least in (("trainer", train, -math.inf), ("rollout", rollout, IMPOSSIBLE)):
        bad = np.flatnonzero(~np.isfinite(values) | (values > 1e-3) | (values < least))
        if len(bad):
            raise MetricError(
                f"the {name} gave something that is not a log-prob",
                where=f"{where}: token {int(bad[0])}",
                expected="a finite number <= 0"
                + (f", above {least:g} for a sampled token" if math.isfinite(least) else ""),
                got=float(values[bad[0]]),
                remedy="look for logits in place of log-probs, or a token that the engine gave no log-prob for (NaN is left out)",
            )
    return train - rollout


def k3_terms(d: Float) -> Float:
    """expm1(d) - d per token: never negative, exact near 0."""
    return np.expm1(d) - d


def js_terms(d: Float) -> Float:
    """Half the sum of two k3 terms against the mixture m = (p_train + p_rollout) / 2, per token, on the sampled tokens."""
    log_mixture = np.logaddexp(d, 0.0) - np.log(2.0)  # log m - log p_rollout
    return 0.5 * k3_terms(d - log_mixture) + 0.5 * k3_terms(-log_mixture)
