"""Guards on what was sampled and by whom: masks, weight versions, samplers, tails, and the replay itself (see `guards`)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from r3.diagnose.evidence import Evidence
from r3.diagnose.result import REPLAY, Diagnosis, Finding
from r3.metrics import Bootstrap
from r3.metrics.bootstrap import MIN_SEQUENCES

FEW_SEQUENCES = 40  # below it a nominal 95 % covers 90 % (r3.metrics.bootstrap)
# Complete replays of healthy bfloat16 runs lie at 1.0 to 1.3 (docs/kl-diagnostic.md): live routers differ where rounding is
# large.
ROUTE_EFFECT = 1.5


def masks(diagnosis: Diagnosis, _: Evidence) -> Iterator[Finding]:
    """Sequences and tokens that were asked for and could not be compared."""
    if diagnosis.empty:
        yield Finding(
            "empty-mask",
            "warning",
            f"{diagnosis.empty} of {diagnosis.sequences} sequences have no token to compare: their loss mask is empty, or covers "
            "only tokens without a rollout log-prob",
            "leave them out of the batch: a mean over nothing is NaN in most trainers",
            {"sequences": diagnosis.empty},
        )
    if diagnosis.missing:
        compared = next(iter(diagnosis.forwards.values())).gap.num_tokens
        yield Finding(
            "missing-logprobs",
            "warning",
            f"{diagnosis.missing:,} tokens under the loss mask have no rollout log-prob (NaN) and were left out; {compared:,} "
            "were compared",
            "tokens that the engine did not sample (tool output, a forced prefix) do not belong under the loss mask",
            {"missing": diagnosis.missing, "compared": compared},
        )


def versions(diagnosis: Diagnosis, evidence: Evidence) -> Iterator[Finding]:
    """Weights of several versions, and which of them are stale."""
    name, forward = next(iter(diagnosis.forwards.items()))
    found = [entry["version"] for entry in forward.by_version]
    if len(found) < 2:
        return
    by_version = ", ".join(f"{entry['version']}: {entry['k3']:.1e}" for entry in forward.by_version)
    yield Finding(
        "mixed-weight-versions",
        "warning",
        f"the tokens were sampled by weights of {len(found)} versions; k3 of {name} by version {by_version}",
        "the gap mixes engine and staleness: diagnose one version at a time, or step 0",
        {f"k3_{entry['version']}": entry["k3"] for entry in forward.by_version},
    )
    rows, main = evidence.total.rows()[name], np.array(evidence.total.main_version)
    k3 = {
        version: Bootstrap({name: rows[main == version]}).estimate(name, "k3")
        for version in found
        if (main == version).sum() >= MIN_SEQUENCES
    }
    if len(k3) < 2:
        return
    fresh = min(k3, key=lambda version: k3[version].value)
    stale = [version for version in k3 if k3[version].low > k3[fresh].high]
    if stale:
        yield Finding(
            "stale-weights",
            "error",
            f"samples of weight version {', '.join(map(str, stale))} were not sampled by these weights: k3 "
            + "; ".join(f"{v}: {e.value:.1e} [{e.low:.1e}, {e.high:.1e}]" for v, e in sorted(k3.items())),
            f"score each version with its own weights; these fit version {fresh} best",
            {f"k3_{version}": k3[version].value for version in k3},
        )


def weights(diagnosis: Diagnosis, _: Evidence) -> Iterator[Finding]:
    """Whether the trainer's weights are those that sampled."""
    says = diagnosis.rollout.get("weights")
    if says == "other":
        yield Finding(
            "other-weights",
            "warning",
            "the trainer's weights are not those that sampled: the gap contains the difference of the weights, which no replay "
            "of the rollout's routes closes",
            "score with the checkpoint that the engine served to see the engine's gap alone",
        )
    elif says == "unknown":
        yield Finding(
            "unknown-weights",
            "info",
            "nobody says whether the trainer's weights are those that sampled",
            "collect with --model, so that samples carry a fingerprint of the weights",
        )


def sampling(diagnosis: Diagnosis, _: Evidence) -> Iterator[Finding]:
    """Log-probs of another policy than the one that drew the tokens."""
    of = diagnosis.rollout
    if of["logprobs_mode"] == "processed_logprobs" or math.isnan(of["temperature"]):
        return  # a dump does not say
    if of["temperature"] != 1 or of["top_p"] < 1 or of["top_k"] > 0:
        yield Finding(
            "other-sampler",
            "info",
            f"sampled at temperature {of['temperature']:g}, top_p {of['top_p']:g}, top_k {of['top_k']}, compared before them: k3 "
            "is a mean over the tokens that were sampled, not an unbiased estimate of the KL of the two policies",
        )


def tail(diagnosis: Diagnosis, _: Evidence) -> Iterator[Finding]:
    """Few tokens or few sequences that everything hangs on."""
    for name, forward in diagnosis.forwards.items():
        if (
            forward.routes in ("own", "unknown")
            and forward.top_share.get("1", 0) > 0.5
            and forward.gap.num_tokens > 100
        ):
            token = forward.top_tokens[0]
            yield Finding(
                "one-token",
                "warning",
                f"one token carries {forward.top_share['1']:.0%} of the k3 of {name}: sample {token.sample_id!r}, token "
                f"{token.position}, p {math.exp(token.rollout_logprob):.1e} at the rollout and "
                f"{math.exp(token.train_logprobs[name]):.1e} at the trainer",
                "read F(tau) and the quantiles beside k3, and look at that token",
                {"share": forward.top_share["1"]},
            )
    compared = len(next(iter(diagnosis.forwards.values())).by_position) and diagnosis.sequences - diagnosis.empty
    if compared < FEW_SEQUENCES:
        yield Finding(
            "few-sequences",
            "warning",
            f"{compared} sequences: intervals over so few are too narrow"
            + ("" if compared >= MIN_SEQUENCES else f", below {MIN_SEQUENCES} there are none"),
            "score at least 50",
            {"sequences": compared},
        )


def replay_itself(diagnosis: Diagnosis, _: Evidence) -> Iterator[Finding]:
    """What the second replay and the route effect say of the first replay."""
    replay = diagnosis.forwards.get(REPLAY)
    if replay is None:
        return
    if diagnosis.noise > 0.1 * replay.gap.mean_abs:
        yield Finding(
            "noisy-trainer",
            "warning",
            f"two replays of the same tokens differ by {diagnosis.noise:.1e} on average, "
            f"{diagnosis.noise / replay.gap.mean_abs:.0%} of the mean |d| after replay: the trainer is not deterministic, and "
            "replay cannot go below that",
            "deterministic kernels (torch.use_deterministic_algorithms, attention backward, atomics) show what is left",
            {"noise": diagnosis.noise},
        )
    effect = diagnosis.route_effect.get(REPLAY)
    if effect is not None and effect.known and effect.low > ROUTE_EFFECT:
        yield Finding(
            "routing-left",
            "warning",
            f"after replay k3 is still {effect.value:.1f} times [{effect.low:.1f}, {effect.high:.1f}] as large on tokens whose "
            "live routes differ as on others of the same probability: routing is not fully replayed",
            "look at coverage, at rows without a record in the context, and at gate weights (only ids are replayed)",
            effect.to_dict(),
        )
