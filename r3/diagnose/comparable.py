"""What may be compared: the samples' own words on how they were sampled, and the refusals that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from r3.diagnose.scoring import Scorer
from r3.errors import MetricError

_SAME = ("engine", "engine_version", "model", "model_fingerprint", "temperature", "top_p", "top_k", "logprobs_mode")


def comparable(
    samples: Sequence[tuple[str, dict[str, str]]], scorer: Scorer, allow_other_weights: bool
) -> dict[str, Any]:
    """What the shards say of the rollout, once for all of them.

    Args:
        samples: Sample ids with the metadata of their shards.

    Raises:
        MetricError: samples of different rollouts, or log-probs that no trainer can reproduce.
    """
    first_id, first = samples[0]
    for sample_id, metadata in samples:
        for name in _SAME:
            if metadata[name] != first[name]:
                raise MetricError(
                    f"samples of different rollouts in one store: {name} differs",
                    where=f"samples {first_id!r} and {sample_id!r}",
                    expected=first[name],
                    got=metadata[name],
                    remedy="give each rollout a store of its own",
                )
    mode, temperature = first["logprobs_mode"], float(first["temperature"])
    truncated = float(first["top_p"]) < 1 or int(first["top_k"]) > 0
    if mode not in ("raw_logprobs", "processed_logprobs") and (truncated or temperature != 1):
        raise MetricError(
            "the shards do not say which log-probs they hold, and the sampling makes a difference",
            expected="logprobs_mode raw_logprobs or processed_logprobs",
            got=repr(mode),
            remedy="collect with the r3 collector, which finds out, or sample at temperature 1 without top-p and top-k",
        )
    if mode == "processed_logprobs" and truncated:
        raise MetricError(
            "these log-probs are renormalised over the tokens that top-p or top-k left: no trainer can reproduce them",
            expected="raw_logprobs, or top_p=1 and top_k=0",
            got=f"processed_logprobs with top_p={first['top_p']}, top_k={first['top_k']}",
            remedy="start the engine with --logprobs-mode raw_logprobs (vLLM's default)",
        )
    if mode == "processed_logprobs" and temperature == 0:
        raise MetricError(
            "sampled greedily: the processed log-prob of every token is 0, there is nothing to compare",
            expected="raw_logprobs, or a temperature above 0",
            got="processed_logprobs at temperature 0",
        )
    fingerprint = first["model_fingerprint"]
    known = bool(fingerprint and scorer.fingerprint)
    weights = "unknown" if not known else "same" if fingerprint == scorer.fingerprint else "other"
    if weights == "other" and not allow_other_weights:
        raise MetricError(
            "the trainer's weights are not the weights that sampled",
            expected=f"model fingerprint {fingerprint}",
            got=scorer.fingerprint,
            remedy="give the checkpoint that the engine served, or pass --allow-other-weights to measure staleness as well",
        )
    return {
        **{name: first[name] for name in ("engine", "engine_version", "model", "model_fingerprint", "logprobs_mode")},
        "temperature": temperature,
        "top_p": float(first["top_p"]),
        "top_k": int(first["top_k"]),
        "weights": weights,
    }
