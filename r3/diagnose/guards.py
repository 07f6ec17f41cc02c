"""Guards: what the numbers themselves say is wrong with a comparison, each as a named Finding with its numbers and a remedy.

Metadata can be silent and can lie, so nothing here trusts it: a shift shows in correlations at neighbouring tokens, a
temperature in a fit, renormalised or padded probabilities in the mean importance ratio (which is 1 for any two
normalised policies, however far apart), routes of other tokens in the live routers' own choice. docs/kl-diagnostic.md has the
table of findings; each has a test that injects its fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from r3.diagnose.cautions import masks, replay_itself, sampling, tail, versions, weights
from r3.diagnose.evidence import Evidence
from r3.diagnose.result import LIVE, REPLAY, Diagnosis, Finding

SEVERITIES = ("error", "warning", "info")
# A router repeats at least this share of a right record (r3.agreement measures 0.98 to 1, and at most 0.64 for wrong ones).
MIN_OVERLAP = 0.65
SLOPE_MARGIN = 0.05
_SHIFT_MARGIN = 0.1  # of a correlation or an overlap at a neighbour above that in place
_MEAN_RATIO_MARGIN = 0.005
_TEMPERATURE_GAIN = (
    0.3  # a right temperature leaves rounding alone: 0.02 of the mean |d| on real shards; top-p leaves half
)
_TEMPERATURE_MARGIN = 0.03  # of log temperature: three times the search's resolution
_WRONG_LOGPROBS = ("token-shift", "uncorrelated", "processed-logprobs", "raw-logprobs", "temperature")

Guard = Callable[[Diagnosis, Evidence], Iterator[Finding]]


def find_all(diagnosis: Diagnosis, evidence: Evidence) -> list[Finding]:
    """Every finding, errors first; what another finding explains is left out."""
    found = [finding for guard in GUARDS for finding in guard(diagnosis, evidence)]
    if any(finding.id in _WRONG_LOGPROBS for finding in found):
        found = [finding for finding in found if finding.id != "not-normalised"]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def token_shift(_: Diagnosis, evidence: Evidence) -> Iterator[Finding]:
    """Log-probs that stand one token beside their own."""
    r = evidence.total.offsets.correlations()
    best = max(r, key=lambda offset: r[offset] if math.isfinite(r[offset]) else -2.0)
    numbers = {f"correlation_at_{offset:+d}": value for offset, value in r.items()}
    if best != 0 and r[best] > (r[0] if math.isfinite(r[0]) else -1.0) + _SHIFT_MARGIN:
        yield Finding(
            "token-shift",
            "error",
            f"the trainer's log-probs stand one token {'later' if best > 0 else 'earlier'} than the rollout's: they correlate "
            f"{r[best]:.3f} at offset {best:+d} and {r[0]:.3f} in place",
            "logits at position t predict token t + 1: shift labels, not log-probs; check the mask and where the prompt ends",
            numbers,
        )
    elif evidence.fit is None and r[0] > 0.9 and abs(evidence.total.offsets.slope - 1) > SLOPE_MARGIN:
        slope = evidence.total.offsets.slope
        yield Finding(
            "slope",
            "warning",
            f"the trainer's log-probs rise {slope:.2f} times as fast as the rollout's: they look like those of another "
            "temperature",
            "compare log-probs at one temperature: raw with raw, or the trainer's logits divided by the sampling temperature",
            {"slope": slope},
        )
    elif r[0] < 0.8:
        yield Finding(
            "uncorrelated",
            "error",
            f"the trainer's log-probs hardly follow the rollout's: correlation {r[0]:.3f}",
            "log-probs of other tokens or of another model; compare the token ids and the weights",
            numbers,
        )


def routes_out_of_place(diagnosis: Diagnosis, evidence: Evidence) -> Iterator[Finding]:
    """Recorded routes that are not this model's choice for these tokens: rows shifted, layers swapped, another sample's."""
    live = diagnosis.mismatch.get(LIVE)
    if live is None or not live.rows:
        return
    overlap = live.overlap / live.rows
    low = [evidence.moe_layers[i] for i in np.flatnonzero(overlap < MIN_OVERLAP)]
    if not low:
        if evidence.suspects:
            worst = max(evidence.suspects, key=lambda name: evidence.suspects[name])
            yield Finding(
                "samples-misrouted",
                "error",
                f"{len(evidence.suspects)} of {diagnosis.sequences} samples carry routes that are not this model's choice for "
                f"their tokens; in sample {worst!r} the live routers choose another set in {evidence.suspects[worst]:.0%} of "
                "(token, layer)",
                "rows shifted against the tokens, or another sample's routes: look at how these samples were stitched",
                {"samples": len(evidence.suspects), "worst_share": evidence.suspects[worst]},
            )
        return
    offsets = evidence.route_offsets.overlaps() if evidence.route_offsets is not None else {}
    best = max(offsets, key=lambda offset: offsets[offset]) if offsets else 0
    best = best if best and offsets[best] > offsets[0] + _SHIFT_MARGIN else 0
    numbers = {"layers": len(low), "overlap": float(overlap.min())}
    numbers |= {f"overlap_at_{offset:+d}": value for offset, value in offsets.items()}
    if best != 0:
        yield Finding(
            "route-shift",
            "error",
            f"the recorded routes stand one row {'later' if best > 0 else 'earlier'} than their tokens: the live routers repeat "
            f"{offsets[best]:.0%} of the ids at offset {best:+d} and {offsets[0]:.0%} in place",
            "a row was lost or added between engine and shard; do not train with these routes",
            numbers,
        )
    elif len(low) == len(overlap):
        yield Finding(
            "routes-of-other-tokens",
            "error",
            f"in every layer the live routers repeat less than {MIN_OVERLAP:.0%} of the recorded ids ({overlap.mean():.0%} on "
            "average)",
            "another model's routes, physical expert ids (EPLB), or weights far from those that sampled",
            numbers,
        )
    else:
        yield Finding(
            "layer-misrecorded",
            "error",
            f"decoder layers {low} are recorded wrongly: there the live routers repeat "
            f"{overlap[overlap < MIN_OVERLAP].mean():.0%} of the recorded ids, in the other layers "
            f"{overlap[overlap >= MIN_OVERLAP].mean():.0%}",
            "layers out of order or overwritten (an MTP layer that shares a number): check the engine's version with `r3 doctor`",
            numbers,
        )


def temperature(diagnosis: Diagnosis, evidence: Evidence) -> Iterator[Finding]:
    """Log-probs at another temperature than the metadata say."""
    fit = evidence.fit
    if fit is None or abs(math.log(fit.fitted / fit.claimed)) < _TEMPERATURE_MARGIN:
        return
    if fit.mean_abs_fitted > _TEMPERATURE_GAIN * fit.mean_abs_claimed:
        return  # no temperature explains them
    sampled, mode = float(diagnosis.rollout["temperature"]), diagnosis.rollout["logprobs_mode"]
    gain = (
        f"at {fit.fitted:.2f} the mean |d| of {fit.tokens} tokens is {fit.mean_abs_fitted:.1e}, at {fit.claimed:g} it is "
        f"{fit.mean_abs_claimed:.1e}"
    )

    def near(value: float) -> bool:
        return value > 0 and abs(math.log(fit.fitted / value)) < _TEMPERATURE_MARGIN

    if mode != "processed_logprobs" and near(sampled):
        yield Finding(
            "processed-logprobs",
            "error",
            f"these are log-probs after the sampling temperature {sampled:g}, not the {mode or 'raw_logprobs'} that they are "
            f"taken for: {gain}",
            "mark the samples processed_logprobs, or start the engine with --logprobs-mode raw_logprobs",
            fit.to_dict(),
        )
    elif mode == "processed_logprobs" and near(1.0):
        yield Finding(
            "raw-logprobs",
            "error",
            f"these are log-probs before the sampling temperature {sampled:g}, not processed_logprobs: {gain}",
            "mark the samples raw_logprobs",
            fit.to_dict(),
        )
    else:
        yield Finding(
            "temperature",
            "error",
            f"the rollout's log-probs are those of temperature {fit.fitted:.2f}, not {fit.claimed:g}: {gain}",
            "find out which temperature the engine applied, and give it to the trainer's softmax as well",
            fit.to_dict(),
        )


def normalisation(diagnosis: Diagnosis, evidence: Evidence) -> Iterator[Finding]:
    """A mean importance ratio that is not 1: one side does not sum to 1 over the same vocabulary."""
    if evidence.padding_mass and (mass := float(np.mean(evidence.padding_mass))) > 1e-6:
        yield Finding(
            "vocabulary-padding",
            "error" if mass > 1e-3 else "warning",
            f"the trainer's logits are wider than the vocabulary, and {mass:.2%} of its probability lies on ids that no rollout "
            "can sample: every log-prob is too low by as much",
            "cut the logits to the vocabulary before the softmax, or set the padding's logits to -inf",
            {"padding_mass": mass},
        )
        return
    name = REPLAY if REPLAY in diagnosis.forwards else next(iter(diagnosis.forwards))
    ratio = diagnosis.forwards[name].intervals["mean_ratio"]
    if not ratio.known or ratio.low <= 1 <= ratio.high or abs(ratio.value - 1) < _MEAN_RATIO_MARGIN:
        return
    numbers = ratio.to_dict()
    rollout = diagnosis.rollout
    truncated = float(rollout.get("top_p", 1.0)) < 1 or int(rollout.get("top_k", 0)) > 0
    says = f"the mean of p_train / p_rollout is {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}], it should be 1"
    if truncated and ratio.value < 1:
        yield Finding(
            "processed-logprobs",
            "error",
            f"these log-probs are renormalised over what top-p or top-k left, not raw: {says}; d contains "
            f"log S = {math.log(ratio.value):+.3f}",
            "start the engine with --logprobs-mode raw_logprobs",
            numbers,
        )
    else:
        yield Finding(
            "not-normalised",
            "error",
            f"{says}: the two are not normalised over the same tokens, or the rollout's log-probs are not of the policy that "
            "sampled",
            "look for truncated sampling (top-p, top-k, min-p), a logit bias, a penalty, a temperature, or padded logits",
            numbers,
        )


def coverage(diagnosis: Diagnosis, _: Evidence) -> Iterator[Finding]:
    """Rows that replay should have had and that have no record."""
    if not diagnosis.rows or diagnosis.replay_coverage >= 0.999:
        return
    text = (
        f"{1 - diagnosis.replay_coverage:.1%} of the rows that replay needs have no record and were routed live "
        f"({diagnosis.recorded - diagnosis.recorded_last:,} of {diagnosis.rows - diagnosis.sequences:,} are recorded)"
    )
    numbers = {"replay_coverage": diagnosis.replay_coverage}
    replay = diagnosis.forwards.get(REPLAY)
    if replay is not None:
        known = sum(bucket["tokens"] for bucket in replay.by_live_mismatch)
        with_record = sum(bucket["tokens"] * bucket["k3"] for bucket in replay.by_live_mismatch)
        rest = replay.gap.num_tokens - known
        if known and rest:
            numbers["k3_recorded"] = with_record / known
            numbers["k3_unrecorded"] = max(replay.gap.k3 * replay.gap.num_tokens - with_record, 0.0) / rest
            text += (
                f"; after replay k3 is {numbers['k3_recorded']:.1e} on tokens predicted by recorded rows and "
                f"{numbers['k3_unrecorded']:.1e} on the others"
            )
    yield Finding(
        "coverage",
        "warning" if diagnosis.replay_coverage >= 0.5 else "error",
        text,
        "find where rows are lost: prefix cache, preemption, prompts cut before the engine, stitching of turns (`r3 verify`)",
        numbers,
    )


GUARDS: tuple[Guard, ...] = (
    *(token_shift, routes_out_of_place, temperature, normalisation, coverage, masks, versions, weights),
    *(sampling, tail, replay_itself),
)
