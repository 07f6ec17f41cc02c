"""The float floor: how much two implementations disagree on log-probs although every expert is the same.

Let t be the log-prob of the trainer in its dtype, f that of the same weights in float32, both with the recorded experts, and e
the engine's. t - f is the rounding error of one implementation of that dtype, e - f that of another (and, if replay were
incomplete, what routing still leaves). The gap after replay is d = (t - f) - (e - f). Two implementations that round as
coarsely as the trainer, independently, are apart by E[(t1 - t2)^2] = 2 E[(t - f)^2], so in the quadratic range of k3

    floor = 2 * k3(t against f),   residual = k3(t against e)   and   residual / floor <= 1

says that what is left after replay is no more than rounding of that dtype explains. It is an upper bound on innocence, not a
proof: implementations that round at the same places (the residual stream in bfloat16) are correlated and lie below it,
between k3(t against f) and the floor. The proof that routes have no part in the rest is `Diagnosis.route_effect`, which
needs no float32.
"""

from __future__ import annotations

from collections.abc import Mapping

from r3.diagnose.result import FLOAT32_REPLAY, REPLAY, FloatFloor
from r3.metrics import Bootstrap, Estimate, Float

_ROUNDING = "rounding"


def float_floor(
    rounding: Float, rows: Mapping[str, Float], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> FloatFloor | None:
    """The floor, from rows of sums [S, C] of the same sequences; None where there was no float32 pass.

    Args:
        rounding: Of replay in the trainer's dtype against replay in float32.
        rows: Of each forward against the rollout.
    """
    if not {REPLAY, FLOAT32_REPLAY} <= set(rows) or not len(rounding):
        return None
    tables = {_ROUNDING: rounding, REPLAY: rows[REPLAY], FLOAT32_REPLAY: rows[FLOAT32_REPLAY]}
    bootstrap = Bootstrap(tables, level=level, resamples=resamples, seed=seed)
    one, residual = bootstrap.estimate(_ROUNDING, "k3"), bootstrap.estimate(REPLAY, "k3")
    ratio = _scaled(bootstrap.ratio(REPLAY, _ROUNDING, "k3"), 0.5)
    floor = _scaled(one, 2.0)
    answer = "unknown" if not ratio.known else "within" if ratio.high <= 1 else "above" if ratio.low > 1 else "unknown"
    says = {
        "within": "what is left after replay is no more than the rounding of two forwards with the same experts",
        "above": "more is left after replay than the rounding of two forwards with the same experts",
        "unknown": "no interval says whether what is left after replay is more than rounding",
    }[answer]
    text = (
        f"{says}: k3 {_shown(residual, '.2e')} against a floor of {_shown(floor, '.2e')}, ratio {_shown(ratio, '.2f')}"
    )
    return FloatFloor(one, floor, residual, ratio, bootstrap.estimate(FLOAT32_REPLAY, "k3"), answer, text)


def _shown(estimate: Estimate, style: str) -> str:
    interval = f" [{estimate.low:{style}}, {estimate.high:{style}}]" if estimate.known else ""
    return f"{estimate.value:{style}}{interval}"


def _scaled(estimate: Estimate, by: float) -> Estimate:
    return Estimate(estimate.value * by, estimate.low * by, estimate.high * by)
