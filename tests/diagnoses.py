"""Diagnoses of synthetic tokens, through the accumulators that real ones go through: for tests of the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from r3.diagnose import AGAIN, LIVE, REPLAY, Diagnosis, Finding
from r3.diagnose.accumulate import Accumulator, ScoredSequence
from r3.diagnose.verdict import verdict
from r3.metrics import RouteMismatch

STACK = {"framework": "transformers", "transformers": "5.10.4", "torch": "2.13.0", "dtype": "bfloat16", "device": "cpu"}
ROLLOUT = {
    "engine": "vllm",
    "engine_version": "0.30.0",
    "model": "tiny",
    "model_fingerprint": "f00d",
    "logprobs_mode": "raw_logprobs",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "weights": "same",
}


def synthetic(
    *,
    sequences: int = 12,
    tokens: int = 40,
    layers: int = 3,
    experts: int = 8,
    top_k: int = 2,
    versions: int = 1,
    vocabulary: int = 100,
    sample_id: str = "prompt-{}.0",
    label: str = "",
    findings: tuple[Finding, ...] = (),
    seed: int = 0,
) -> Diagnosis:
    """Live routes differ in 5 % of (token, layer), and log-probs of such tokens are further off; replay has rounding alone."""
    rng = np.random.default_rng(seed)
    names = (LIVE, REPLAY, AGAIN)
    total = Accumulator(names)
    total.routes = {name: RouteMismatch(layers, experts) for name in names}
    prompt = 8
    for number in range(sequences):
        rows = prompt + tokens
        record = rng.integers(0, experts, (layers, rows, 1)).astype(np.uint16)
        record = ((record + np.arange(top_k)) % experts).astype(np.uint16)
        live = record.copy()
        moved = rng.random((layers, rows)) < 0.05
        live[moved, 0] = (live[moved, 0] + top_k) % experts
        positions = np.arange(rows)
        differing = total.routes[LIVE].add(live, record, positions)
        for name in (REPLAY, AGAIN):
            total.routes[name].add(record, record, positions)
        used = np.arange(prompt, rows)
        rollout = -1.0 - rng.exponential(1.5, tokens)
        rounding = rng.normal(0, 0.005, tokens)
        jump = np.where(differing[used - 1] > 0, rng.normal(0, 0.2, tokens).clip(-0.9, 0.9), 0.0)
        total.add(
            ScoredSequence(
                sample_id=sample_id.format(number),
                positions=used,
                rollout=rollout,
                train={LIVE: rollout + rounding + jump, REPLAY: rollout + rounding, AGAIN: rollout + rounding},
                versions=np.full(tokens, number % versions, np.int32),
                tokens=rng.integers(0, vocabulary, rows),
                differing=differing[used - 1],
            )
        )
    result = Diagnosis(dict(STACK), dict(ROLLOUT), label, rows=sequences * (prompt + tokens))
    result.recorded, result.sequences = result.rows - sequences, sequences
    result.verified = result.recorded * layers
    result.run = {"command": ["r3", "diagnose", "shards"], "source": "shards", "moe_layers": list(range(1, layers + 1))}
    stacks: dict[str, dict[str, Any]] = dict.fromkeys(names, STACK)
    total.fill(result, routing={LIVE: "own", REPLAY: "rollout", AGAIN: "rollout"}, trainers=stacks, resamples=200)
    result.findings = list(findings)
    result.verdict = verdict(result)
    return result
