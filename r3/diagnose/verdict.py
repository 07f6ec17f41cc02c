"""The verdict: the one sentence that a hurried reader takes away, so it says no more than its interval does."""

from __future__ import annotations

import math

from r3.diagnose.result import LIVE, REPLAY, Diagnosis, Verdict
from r3.metrics import DIRECTION
from r3.metrics.bootstrap import MIN_SEQUENCES


def verdict(diagnosis: Diagnosis) -> Verdict:
    """From forwards, comparisons, floor and findings. The first error among the findings takes precedence over every number."""
    errors = [finding for finding in diagnosis.findings if finding.severity == "error"]
    compared = diagnosis.comparison("k3")
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return Verdict("bad", f"These numbers do not mean what they say{more}: {errors[0].text}.", "k3", errors[0].id)
    if compared is None:
        return _alone(diagnosis)
    ratio, live, replay = compared.ratio, diagnosis.forwards[LIVE].gap, diagnosis.forwards[REPLAY].gap
    values = f"k3, an estimate of {DIRECTION}, is {live.k3:.2e} live and {replay.k3:.2e} with replay"
    if not ratio.known:
        if live.k3 == replay.k3 == 0:
            return Verdict("good", f"There is no gap to close: {values}.", "k3", "value")
        if diagnosis.sequences - diagnosis.empty < MIN_SEQUENCES:
            why = "Too few sequences for an interval"
        elif math.isfinite(live.k3) and math.isfinite(replay.k3):
            why = "No interval, since only few sequences have a gap at all"
        else:
            why = (
                "No interval, since a token's ratio is beyond all numbers (worst tokens: is a log-prob a placeholder?)"
            )
        return Verdict("unknown", f"{why}: {values}.", "k3", "ratio of replay to live", ratio)
    interval = f"ratio {ratio.value:.2f}, 95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
    if ratio.low > 1:
        text = f"Replay makes the gap larger: {values} ({interval})."
        return Verdict("bad", text, "k3", "ratio of replay to live", ratio)
    if ratio.high >= 1:
        text = f"No effect of replay that these sequences can show: {values} ({interval})."
        return Verdict("unknown", text, "k3", "ratio of replay to live", ratio)
    text = f"Replay lowers the gap by {1 - ratio.high:.0%} to {1 - ratio.low:.0%}: {values} ({interval})."
    if diagnosis.floor is not None:
        text += f" {diagnosis.floor.text[0].upper()}{diagnosis.floor.text[1:]}."
    level = "warning" if any(f.severity == "warning" for f in diagnosis.findings) else "good"
    return Verdict(level, text, "k3", "ratio of replay to live", ratio)


def _alone(diagnosis: Diagnosis) -> Verdict:
    """Of a dump with no pair of forwards: the gap itself, judged by veRL's own warning levels."""
    name, forward = next(iter(diagnosis.forwards.items()))
    k3 = forward.intervals["k3"]
    text = f"k3 of {name}, an estimate of {DIRECTION}, is {k3.value:.2e}"
    if k3.known:
        text += f" (95 % interval {k3.low:.2e} to {k3.high:.2e})"
    if abs(forward.gap.k1) > 0.1 or forward.gap.ess < 0.3:
        return Verdict(
            "bad", f"{text}; |k1| is {abs(forward.gap.k1):.2f} and ESS {forward.gap.ess:.2f}, beyond veRL's warnings."
        )
    return Verdict(
        "unknown", f"{text}; without a second forward nothing says what replay would change.", "k3", "value", k3
    )
