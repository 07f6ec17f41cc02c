"""offline: the outputs of an in-process vLLM become samples, or an error that says what was not switched on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import SPEC

from r3 import Provenance, RoutingSpec, ShardStore
from r3.errors import ConfigError, EngineError, WireError
from r3.rollout.offline import provenance_of, samples_from_vllm_outputs
from r3.testing import random_rows

PROVENANCE = Provenance(engine="vllm", engine_version="0.30.0", model="tiny", temperature=0.8)


def output(num_completions: int = 1, **changes: Any) -> SimpleNamespace:
    """As vLLM's RequestOutput: a prompt of 4 tokens, 3 sampled ones."""
    rng = np.random.default_rng(0)
    completions = []
    for _ in range(num_completions):
        tokens = rng.integers(0, 100, 3).tolist()
        other = SimpleNamespace(logprob=-0.1)  # vLLM adds the most likely token where it was not the one sampled
        logprobs = [{101: other, token: SimpleNamespace(logprob=-0.5 - i)} for i, token in enumerate(tokens)]
        rows = random_rows(rng, SPEC, 6, hidden=True)
        rows.flags.writeable = False  # as out of msgpack or Ray
        values = {"token_ids": tokens, "logprobs": logprobs, "routed_experts": rows, "finish_reason": "length"}
        completions.append(SimpleNamespace(**{**values, **changes}))
    return SimpleNamespace(request_id="7", prompt_token_ids=[1, 2, 3, 4], outputs=completions)


def test_every_completion_becomes_a_sample() -> None:
    request = output(num_completions=2)
    samples = samples_from_vllm_outputs([request], SPEC, provenance=PROVENANCE, weight_version=5)
    assert [(sample.sample_id, sample.group_id) for sample in samples] == [("7.0", "7"), ("7.1", "7")]
    for sample, completion in zip(samples, request.outputs, strict=True):
        assert sample.tokens.tolist() == [1, 2, 3, 4, *completion.token_ids]
        assert sample.rollout_logprobs[4:].tolist() == [-0.5, -1.5, -2.5]
        assert np.array_equal(
            sample.routes.ids[:, :6], completion.routed_experts[:, list(SPEC.moe_layers)].transpose(1, 0, 2)
        )
        assert sample.routes.recorded.tolist() == [True] * 6 + [False]
        assert sample.weight_version.tolist() == [-1] * 4 + [5] * 3
        assert sample.provenance == replace(PROVENANCE, finish_reason="length")
        assert sample.routes.ids.flags.writeable
        assert not np.shares_memory(sample.routes.ids, completion.routed_experts)


def test_prompts_may_have_ids_of_their_own() -> None:
    (sample,) = samples_from_vllm_outputs([output()], SPEC, provenance=PROVENANCE, prompt_ids=["gsm8k/17"])
    assert (sample.sample_id, sample.group_id) == ("gsm8k/17.0", "gsm8k/17")
    with pytest.raises(ConfigError, match="expected 1, got 2"):
        samples_from_vllm_outputs([output()], SPEC, provenance=PROVENANCE, prompt_ids=["a", "b"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routed_experts": None}, "enable_return_routed_experts=True"),
        ({"logprobs": None}, "SamplingParams(logprobs=0)"),
        ({"finish_reason": None}, "not whole"),
        ({"finish_reason": "abort"}, "not whole"),
    ],
)
def test_what_was_not_switched_on_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError) as caught:
        samples_from_vllm_outputs([output(**changes)], SPEC, provenance=PROVENANCE)
    assert said in str(caught.value)
    assert "sample '7.0'" in str(caught.value)


def test_the_two_halves_of_vllm_021_are_joined() -> None:
    whole = output()
    rows = whole.outputs[0].routed_experts[:, list(SPEC.moe_layers)].astype(np.int16)
    prompt_length = len(whole.prompt_token_ids)
    split = output(routed_experts=rows[prompt_length:])
    split.prompt_routed_experts = rows[:prompt_length]
    (expected,), (got,) = (samples_from_vllm_outputs([each], SPEC, provenance=PROVENANCE) for each in (whole, split))
    assert got.routes.equal(expected.routes)


def test_routes_are_checked_as_on_the_wire() -> None:
    with pytest.raises(WireError, match="every expert id is 0") as caught:
        samples_from_vllm_outputs([output(routed_experts=np.zeros((6, 4, 2), np.uint8))], SPEC, provenance=PROVENANCE)
    assert "sample '7.0'" in str(caught.value)


def test_provenance_of_an_engine(tmp_path: Path) -> None:
    config = SimpleNamespace(model=str(tmp_path), logprobs_mode="processed_logprobs")
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=config)))
    params = SimpleNamespace(temperature=0.7, top_p=0.9, top_k=-1)
    provenance = provenance_of(llm, params)
    assert (provenance.temperature, provenance.top_p, provenance.top_k) == (0.7, 0.9, 0)
    assert (provenance.engine, provenance.model, provenance.model_fingerprint) == ("vllm", str(tmp_path), "")
    assert provenance.logprobs_mode == "processed_logprobs"


REAL = """
import json, sys
import vllm
from r3 import RoutingSpec, ShardStore
from r3.rollout.offline import provenance_of, samples_from_vllm_outputs
from r3.rollout.prompts import read_prompts

if __name__ == "__main__":
    model, root = sys.argv[1:]
    llm = vllm.LLM(model, enable_return_routed_experts=True, enforce_eager=True, dtype="bfloat16", max_model_len=256, seed=0)
    params = vllm.SamplingParams(n=2, temperature=0.8, max_tokens=16, logprobs=0, seed=1)
    outputs = llm.generate([prompt.payload for prompt in read_prompts(f"{model}/prompts.jsonl")[:4]], params)
    store = ShardStore(root, create=True)
    for sample in samples_from_vllm_outputs(outputs, RoutingSpec.from_config(model), provenance=provenance_of(llm, params)):
        store.add(sample)
    rows = [list(completion.routed_experts.shape) for output in outputs for completion in output.outputs]
    print("ROWS" + json.dumps(rows))
"""


@pytest.mark.engine
def test_a_real_engine_in_process(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text(REAL)  # a file, because vLLM's workers import the main module
    command = [sys.executable, str(tmp_path / "real.py"), str(tiny_model), str(tmp_path / "store")]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    spec = RoutingSpec.from_config(tiny_model)
    store = ShardStore(tmp_path / "store")
    assert len(store) == 8
    for sample in store:
        assert sample.routes.num_recorded == sample.num_tokens - 1
        assert (sample.rollout_logprobs[sample.prompt_length :] <= 0).all()
        assert sample.provenance.logprobs_mode == "raw_logprobs"
        assert sample.provenance.model_fingerprint
        assert (sample.provenance.temperature, sample.provenance.top_k) == (0.8, 0)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ROWS"))
    assert {tuple(shape[1:]) for shape in json.loads(line[4:])} == {(spec.num_layers, spec.top_k)}
