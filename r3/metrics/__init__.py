"""Metrics of the gap between rollout and training, in float64 on the tokens that the rollout sampled.

Per token: d = log p_train - log p_rollout, r = exp(d). Samples come from the *rollout* policy, so mean(expm1(d) - d), the
k3 estimator, estimates KL(rollout || train); the R3 paper and AReaL print it under the reverse name. It is dominated by
its tail, hence F(tau), quantiles, the tokens that carry it and the effective sample size beside it.

Contract: pure numpy, any number of tokens in memory that grows with sequences only, accumulators that merge over ranks.

    definitions   the terms, and what may be called a log-prob       sums        one row of sums a sequence
    gap           GapMetrics and its accumulator                     sketch      quantiles within 0.5 %
    bootstrap     paired intervals over sequences                    buckets     by probability, position, weight version
    routes        which experts, by layer, expert and position       toptokens   the tokens that carry k3
    names         what veRL, slime, NeMo RL and others call them
"""

from r3.metrics.bootstrap import Bootstrap, Estimate, bootstrap_interval
from r3.metrics.definitions import DIRECTION, TAUS, Float, js_terms, k3_terms, log_ratio
from r3.metrics.gap import GapAccumulator, GapMetrics, SequenceMetrics, gap_metrics
from r3.metrics.routes import RouteMismatch
from r3.metrics.toptokens import TopToken, TopTokens

__all__ = [
    "DIRECTION",
    "TAUS",
    "Bootstrap",
    "Estimate",
    "Float",
    "GapAccumulator",
    "GapMetrics",
    "RouteMismatch",
    "SequenceMetrics",
    "TopToken",
    "TopTokens",
    "bootstrap_interval",
    "gap_metrics",
    "js_terms",
    "k3_terms",
    "log_ratio",
]
