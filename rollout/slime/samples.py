"""samples: slime's (or miles') `Sample` read into a RolloutSample, leg by leg.

A slime sample says all of its tokens, one mask and one log-prob a response token, the rows of its *last* request, and one weight
version a request. Three things follow that its own replay gets wrong or cannot know:

- Partial rollouts: a request that goes on with an aborted response is prefilled again, perhaps with newer weights, and its rows
  replace the first leg's. Here each leg keeps the rows of the forward that sampled it (`previous`); later rows only fill in what
  has no record yet, first of all the boundary row, which the first leg never computed.
- Weight versions: one a request in `weight_versions`, given to the tokens of the leg they belong to; several within one leg
  (turns of a conversation) to the runs of sampled tokens, one each, or, where the counts differ, to none (-1): nothing is
  guessed.
- A tail that nobody sampled (a tool's answer at the end) was never fed to the engine: its rows are absent, and no sampled token
  depends on them.

T tokens, prompt and response; T - 1 rows, slime's count rule.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from r3 import wire
from r3.errors import SampleError, WireError
from r3.routes import Mask, Routes
from r3.sample import UNKNOWN_VERSION, Provenance, RolloutSample, narrow_tokens, token_digest
from r3.spec import RoutingSpec
from r3.wire.checks import Policy
from r3.wire.engines import Context

_ORIGIN = {"slime": "slime.rollout.sglang_rollout.generate", "miles": "miles.rollout.generate_hub.single_turn.generate"}


def sample_id_of(index: int | None, tokens: Any) -> str:
    """`<index>-<12 digits of the token digest>`: what rollout and trainer both know, so that a shard is found without a key."""
    digest = token_digest(np.asarray(tokens, np.int64)).rpartition(":")[2][:12]
    return f"{'x' if index is None else index}-{digest}"


def read_sample(
    sample: Any,
    args: Any,
    spec: RoutingSpec,
    *,
    policy: Policy,
    previous: RolloutSample | None = None,
    versions_before: int = 0,
    has_rows: bool = True,
    framework: str = "slime",
) -> RolloutSample:
    """The RolloutSample of what a `Sample` holds now.

    Args:
        sample: slime's or miles' Sample, after a request.
        args: The framework's arguments, for the provenance.
        previous: What was read of it after an earlier request.
        versions_before: How many of its weight versions `previous` has used up.
        has_rows: False for an aborted request that returned none: its tokens wait for the rows of the next leg's prefill.

    Raises:
        WireError: no routes, or routes that cannot be trusted.
        SampleError: parts that do not fit each other, or tokens of `previous` that are others now.
    """
    tokens = np.asarray(sample.tokens, np.int64).ravel()
    prompt_length = len(tokens) - int(sample.response_length)
    sample_id = sample_id_of(sample.index, tokens)
    where = f"{framework} sample {sample_id!r} (index {sample.index}, group {sample.group_index})"
    mask = _per_token(sample.loss_mask, 1, tokens, prompt_length, "loss_mask", where) != 0
    logprobs = _per_token(sample.rollout_log_probs, np.nan, tokens, prompt_length, "rollout_log_probs", where)
    # slime writes 0.0 for tokens that nobody sampled; 0 is a log-prob, of a token that was certain.
    logprobs[~mask & (logprobs == 0)] = np.nan
    _require_sampled(mask, logprobs, where)
    routes = Routes.empty(len(tokens), spec)
    if has_rows:
        routes = _read_routes(sample, tokens, mask, spec, policy, where, framework)
    begin = prompt_length if previous is None else previous.num_tokens
    versions = np.full(len(tokens), UNKNOWN_VERSION, np.int32)
    versions[begin:] = spread_versions(mask[begin:], _versions(sample)[versions_before:])
    if previous is not None:
        _require_same(previous, tokens, where)
        versions[:begin] = previous.weight_version
        routes = _keep_rows(previous, routes)
    return RolloutSample(
        sample_id=sample_id,
        group_id="" if sample.group_index is None else str(sample.group_index),
        spec=spec,
        tokens=narrow_tokens(tokens),
        routes=routes,
        prompt_length=prompt_length,
        rollout_logprobs=logprobs,
        loss_mask=mask,
        weight_version=versions,
        provenance=_provenance(sample, args),
    )


def has_new_rows(sample: Any, previous: RolloutSample | None) -> bool:
    """Whether the rows in an aborted sample are those of its last request, and not none or an earlier leg's."""
    count = 0 if sample.rollout_routed_experts is None else len(sample.rollout_routed_experts)
    fits = count in (len(sample.tokens) - 1, len(sample.tokens))
    return fits and (previous is None or count >= previous.num_tokens)


def spread_versions(mask: Mask, versions: Sequence[int]) -> npt.NDArray[np.int32]:
    """[n] int32: one version for each run of sampled tokens, or one for all; -1 where that cannot be told."""
    out = np.full(len(mask), UNKNOWN_VERSION, np.int32)
    starts = mask & ~np.concatenate([[False], mask[:-1]])
    if len(set(versions)) == 1:
        out[mask] = versions[0]
    elif versions and int(starts.sum()) == len(versions):
        out[mask] = np.asarray(versions, np.int32)[np.cumsum(starts)[mask] - 1]
    return out


def framework_rows(sample: RolloutSample, *, missing: int | None = None) -> npt.NDArray[np.int32]:
    """[T-1, all layers, K] int32, dense layers zero: the form in which slime and miles carry routes.

    Args:
        missing: The id that marks rows without a record (miles: -1); None gives such rows distinct experts, which shift from
            row to row and layer to layer so that no expert gets them all.
    """
    spec, count = sample.spec, max(sample.num_tokens - 1, 0)
    rows = np.zeros((count, spec.num_layers, spec.top_k), np.int32)
    rows[:, list(spec.moe_layers)] = sample.routes.ids[:, :count].transpose(1, 0, 2)
    absent = np.flatnonzero(~sample.routes.recorded[:count])
    for layer in spec.moe_layers:
        rows[absent, layer] = spread_experts(absent, layer, spec) if missing is None else missing
    return rows


def spread_experts(positions: npt.NDArray[np.int64], layer: int, spec: RoutingSpec) -> npt.NDArray[np.int64]:
    """[n, K] distinct experts for rows that stand for nothing: consecutive rows and layers take the next experts in turn.

    A fixed choice sends all padding to one expert-parallel rank, which then runs out of memory (slime issues 941, 2308).
    """
    first = positions[:, None] * spec.top_k + layer
    return (first + np.arange(spec.top_k)) % spec.num_experts


def needed_rows(loss_mask: Mask) -> Mask:
    """[T] rows on which a sampled token depends: all before the last token of the loss."""
    sampled = np.flatnonzero(loss_mask)
    return np.arange(len(loss_mask)) < (sampled[-1] if len(sampled) else 0)


def _per_token(
    values: Any, default: float, tokens: npt.NDArray[np.int64], prompt_length: int, name: str, where: str
) -> npt.NDArray[np.float32]:
    """[T] float32 from a response's values: nothing (0 or NaN) for the prompt, `default` where the sample has none at all."""
    out = np.full(len(tokens), np.nan if np.isnan(default) else 0, np.float32)
    if prompt_length < 0:
        raise SampleError(
            "the response is longer than the sample",
            where=where,
            expected=f"0..{len(tokens)}",
            got=len(tokens) - prompt_length,
        )
    if values is None:
        out[prompt_length:] = default
    elif len(values) != len(tokens) - prompt_length:
        raise SampleError(
            f"{name} does not fit the response",
            where=where,
            expected=f"{len(tokens) - prompt_length} (response_length)",
            got=len(values),
            remedy="a custom generate function cut or added tokens without this field: use Sample.append_response_tokens",
        )
    else:
        out[prompt_length:] = np.asarray(values, np.float32)
    return out


def _require_sampled(mask: Mask, logprobs: npt.NDArray[np.float32], where: str) -> None:
    missing = np.flatnonzero(mask & np.isnan(logprobs))
    if len(missing):
        raise SampleError(
            f"{len(missing)} of {int(mask.sum())} tokens of the loss have no log-prob",
            where=f"{where}: token {int(missing[0])}",
            expected="rollout_log_probs for the whole response",
            remedy="send return_logprob: true with every request, as the framework's own generate does",
        )


def _read_routes(
    sample: Any,
    tokens: npt.NDArray[np.int64],
    mask: Mask,
    spec: RoutingSpec,
    policy: Policy,
    where: str,
    framework: str,
) -> Routes:
    rows, num_tokens = sample.rollout_routed_experts, len(tokens)
    if rows is None:
        raise WireError(
            "this sample has no routes",
            where=where,
            expected=f"rollout_routed_experts of {num_tokens - 1} rows",
            got="None",
            remedy=f"a custom generate function must send return_routed_experts: true, as {_ORIGIN[framework]} does, and give "
            "meta_info to the sample;\n    or a gateway between the framework and SGLang drops the field: ask SGLang itself;\n"
            "    or SGLang was started by hand without --enable-return-routed-experts",
        )
    sampled = np.flatnonzero(mask)
    last, covered = int(sampled[-1]) if len(sampled) else 0, num_tokens
    if last <= len(rows) < num_tokens - 1:
        covered = len(rows) + 1  # the tokens behind were appended by the environment and never fed to the engine
    context = Context(
        engine="sglang",
        version=_sglang_version(),
        finish_reason=str(sample.status.value),
        prompt_tokens=num_tokens - int(sample.response_length),
    )
    got = wire.decode(rows, spec, num_tokens=covered, policy=policy, where=where, context=context)
    routes = Routes.empty(num_tokens, spec)
    routes.ids[:, :covered], routes.recorded[:covered] = got.ids, got.recorded
    return routes


def _keep_rows(previous: RolloutSample, routes: Routes) -> Routes:
    """The rows of the legs so far where they have a record, the new ones elsewhere."""
    kept = np.flatnonzero(previous.routes.recorded)
    routes.ids[:, kept] = previous.routes.ids[:, kept]
    routes.recorded[kept] = True
    return routes


def _require_same(previous: RolloutSample, tokens: npt.NDArray[np.int64], where: str) -> None:
    before = previous.tokens
    common = min(len(before), len(tokens))
    differ = np.flatnonzero(before[:common] != tokens[:common])
    if len(differ) or common < len(before):
        first = int(differ[0]) if len(differ) else common
        raise SampleError(
            "the tokens of an earlier leg are not those of this one",
            where=f"{where}: token {first}",
            expected=int(before[first]),
            got=int(tokens[first]) if first < len(tokens) else f"{len(tokens)} tokens in all",
            remedy="go on with token ids, not with text that is encoded again; a context that was edited is another sample",
        )


def _versions(sample: Any) -> list[int]:
    return [int(v) if str(v).isdigit() else UNKNOWN_VERSION for v in sample.weight_versions]


def _provenance(sample: Any, args: Any) -> Provenance:
    extra = {"status": str(sample.status.value), "weight_versions": ",".join(map(str, sample.weight_versions))}
    return Provenance(
        engine="sglang",
        engine_version=_sglang_version(),
        model=str(getattr(args, "hf_checkpoint", "") or ""),
        temperature=float(getattr(args, "rollout_temperature", 1.0)),
        top_p=float(getattr(args, "rollout_top_p", 1.0)),
        top_k=max(0, int(getattr(args, "rollout_top_k", 0) or 0)),
        # SGLang's sampler divides logits by the temperature in place and takes log-probs then, unless it is told otherwise.
        logprobs_mode="raw_logprobs" if _is_set("SGLANG_RETURN_ORIGINAL_LOGPROB") else "processed_logprobs",
        finish_reason=str(sample.status.value),
        extra=extra,
    )


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true")


@lru_cache(maxsize=1)
def _sglang_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return ""  # the servers run elsewhere
