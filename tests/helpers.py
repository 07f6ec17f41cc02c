"""Small builders that many tests share: specs, routes and samples from a seeded generator."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from r3 import Provenance, RolloutSample, Routes, RoutingSpec
from r3.testing import random_rows

SPEC = RoutingSpec(num_layers=4, moe_layers=(1, 2, 3), num_experts=8, top_k=2, model_type="qwen3_moe")


def random_routes(rng: np.random.Generator, spec: RoutingSpec, num_tokens: int) -> Routes:
    return Routes.from_rows(random_rows(rng, spec, max(num_tokens - 1, 0)), num_tokens, spec)


def random_sample(
    rng: np.random.Generator,
    spec: RoutingSpec = SPEC,
    num_tokens: int = 12,
    *,
    sample_id: str = "s0",
    prompt_length: int = 4,
    vocabulary: int = 100,
    **overrides: Any,
) -> RolloutSample:
    values: dict[str, Any] = {
        "sample_id": sample_id,
        "group_id": "g",
        "spec": spec,
        "prompt_tokens": rng.integers(0, vocabulary, prompt_length),
        "response_tokens": rng.integers(0, vocabulary, num_tokens - prompt_length),
        "response_logprobs": -rng.random(num_tokens - prompt_length),
        "routes": random_routes(rng, spec, num_tokens),
        "weight_version": 3,
        "provenance": Provenance("vllm", "0.30.0", "tiny", "f00d", 0.7, 0.9, 5, "raw_logprobs", "length", {"k": "v"}),
    }
    return RolloutSample.from_rollout(**{**values, **overrides})


def r3(monkeypatch, capsys, *arguments: object) -> tuple[int, str]:
    """Exit status and output of the command line, in this process."""
    from r3 import cli  # not at the top: ranks and workers import these helpers too

    monkeypatch.setattr(sys, "argv", ["r3", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    captured = capsys.readouterr()
    return int(end.value.code or 0), " ".join((captured.out + captured.err).split())
