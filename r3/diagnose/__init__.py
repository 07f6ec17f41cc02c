"""diagnose: did replay close the gap between rollout and training, and if not, what is in the way?

    from r3.diagnose import diagnose
    result = diagnose(store, TransformersScorer("checkpoints/step-12"))       # live, replay, replay again
    result.verdict.text, result.findings, result.forwards["live"].gap.k3

A comparison that would mean nothing is refused (`comparable`); what the numbers themselves betray becomes a named finding
(`guards`). Without a model, log-probs that a trainer dumped are diagnosed the same way (`dumped`); `compare` sets two results
side by side. All of it is numpy; the trainer behind a diagnosis is a `Scorer`.
"""

from r3.diagnose.result import (
    AGAIN,
    FLOAT32_LIVE,
    FLOAT32_REPLAY,
    FORWARDS,
    LIVE,
    R2,
    REPLAY,
    Comparison,
    Diagnosis,
    Finding,
    FloatFloor,
    Forward,
    Verdict,
)
from r3.diagnose.run import diagnose
from r3.diagnose.scoring import Scored, Scorer

__all__ = [
    "AGAIN",
    "FLOAT32_LIVE",
    "FLOAT32_REPLAY",
    "FORWARDS",
    "LIVE",
    "R2",
    "REPLAY",
    "Comparison",
    "Diagnosis",
    "Finding",
    "FloatFloor",
    "Forward",
    "Scored",
    "Scorer",
    "Verdict",
    "diagnose",
]
