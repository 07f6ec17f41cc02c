"""rollout/transformers without an engine: refusals, how rows join, how tokens are drawn, the endpoint's bodies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import qwen
import torch
import transformers
from pydantic import ValidationError
from transformers.generation.continuous_batching.cache_manager import BlockManager

from r3 import wire
from r3.errors import ConfigError, EngineError, PromptError
from r3.rollout.prompts import Prompt
from r3.rollout.protocol import Sampling
from r3.rollout.transformers import surface
from r3.rollout.transformers.api import ChatRequest, CompletionRequest, TokenizeRequest, error, response
from r3.rollout.transformers.engine import TransformersEngine
from r3.rollout.transformers.params import Params
from r3.rollout.transformers.requests import Output, RoutedState, Run
from r3.rollout.transformers.sampling import draw, warped
from r3.rollout.transformers.text import Text
from r3.testing import random_rows

EOS = frozenset({7})
NO_TEXT = Text()


# What it builds on


def test_the_installed_transformers_is_the_known_one() -> None:
    surface.require_known()


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "__version__", "5.11.0")
    with pytest.raises(EngineError, match=r"transformers 5\.11\.0 is not known") as caught:
        TransformersEngine(qwen.build())
    assert "5.10.4" in str(caught.value.remedy)


def test_a_method_with_another_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "get_free_blocks", lambda self, n_blocks, shareable: None)  # noqa: ARG005
    with pytest.raises(EngineError, match=r"BlockManager\.get_free_blocks is not as r3 knows it"):
        surface.require_known()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"use_cuda_graph": True}, "CUDA graphs"),
        ({"use_async_batching": True}, "asynchronous batching"),
        ({"use_default_compile_configs": True}, "torch.compile"),
        ({"max_blocks_per_request": 8}, "block-table decode path"),
        ({"cpu_offload_space": 1.0}, "offloading"),
        ({"cpu_offload_space": None}, "offloading"),
        ({"scheduler_type": "prefill_first"}, "another scheduler"),
        ({"return_logprobs": False}, "return_logprobs"),
    ],
)
def test_ways_of_running_that_cannot_be_captured_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(EngineError, match=f"does not run with .*{what}"):
        TransformersEngine(qwen.build(), options=options)


def test_a_model_that_cannot_be_loaded_is_named() -> None:
    with pytest.raises(EngineError, match="cannot load this model") as caught:
        TransformersEngine("nothing/here/at/all")
    assert caught.value.where == "nothing/here/at/all"


# Sampling


def test_params_take_what_is_known_and_neutral() -> None:
    sampling = Sampling(0.7, 0.9, 5, 11, 3, {"stop": "x", "stop_token_ids": [4], "min_p": 0.0, "repetition_penalty": 1})
    assert Params.of(sampling, EOS) == Params(0.7, 0.9, 5, 11, frozenset({4, 7}), ("x",))
    assert Params.of(Sampling(extra={"ignore_eos": True}), EOS).stop_token_ids == frozenset()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"min_p": 0.1}, "does not sample with min_p"),
        ({"repetition_penalty": 1.1}, "does not sample with repetition_penalty"),
        ({"use_beam_search_": True}, "does not know the field use_beam_search_"),
        ({"skip_special_tokens": False}, "does not sample with skip_special_tokens"),
        ({"stop": [""]}, "stop holds strings that are not empty"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids integers"),
    ],
)
def test_params_refuse_what_would_be_ignored(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Params.of(Sampling(extra=extra), EOS)


def reference_support(logits: np.ndarray, params: Params) -> set[int]:
    """Token ids that top-k, then top-p, leave; float64."""
    scaled = logits.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    kept = list(order[: params.top_k] if params.top_k else order)
    weights = np.exp(scaled[kept] - scaled[kept].max())
    weights /= weights.sum()
    mass, out = 0.0, set()
    for token, weight in zip(kept, weights, strict=True):
        if mass >= params.top_p - 1e-9 and out:
            break
        out.add(int(token))
        mass += weight
    return out


def test_top_k_and_top_p_leave_what_a_reference_leaves() -> None:
    rng = np.random.default_rng(0)
    params = [
        Params(t, p, k) for t, p, k in [(1, 1, 0), (0.7, 0.8, 0), (1.3, 1, 3), (1, 0.5, 5), (2, 0.01, 0), (1, 1, 1000)]
    ]
    logits = rng.normal(size=(len(params), 40)).astype(np.float32) * 2
    left = warped(torch.from_numpy(logits), params).isfinite()
    for row, each in enumerate(params):
        assert set(left[row].nonzero()[:, 0].tolist()) == reference_support(logits[row], each), each


def test_draws_follow_the_distribution_and_each_request_its_own_generator() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    n = 4000
    generator = torch.Generator().manual_seed(3)
    counts = torch.bincount(draw(logits.expand(n, 4), [Params()] * n, [generator] * n), minlength=4) / n
    expected = logits[0].softmax(-1)
    assert ((counts - expected).abs() < 4 * (expected * (1 - expected) / n).sqrt()).all(), counts

    def alone_and_in_company(company: int) -> list[int]:
        mine = torch.Generator().manual_seed(5)
        others = [torch.Generator().manual_seed(100 + i) for i in range(company)]
        rows = logits.expand(1 + company, 4)
        return [int(draw(rows, [Params()] * (1 + company), [mine, *others])[0]) for _ in range(20)]

    assert alone_and_in_company(0) == alone_and_in_company(3)


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.tensor([[0.0, 3.0], [0.0, -30.0], [5.0, 0.0]])
    tokens = draw(logits, [Params(0), Params(1), Params(0)], [torch.Generator().manual_seed(0)] * 3)
    assert tokens.tolist() == [1, 0, 0]


# Rows of one request


def run_of(prompt: list[int], params: Params | None = None, **changes: Any) -> Run:
    values = {"request_id": "r", "seed": 0, "generator": torch.Generator(), "weight_version": 1, "row_shape": (3, 2)}
    return Run(prompt=prompt, params=params or Params(), **{**values, **changes})


def test_rows_join_and_those_of_a_second_forward_are_left_out() -> None:
    rows = random_rows(np.random.default_rng(0), qwen.SPEC, 90)
    other = (rows + 1) % 8
    run = run_of(list(range(40)))
    run.share(rows[:16])
    run.place(16, rows[16:40])
    run.place(40, rows[40:41])
    run.share(other[:16])  # found again after a preemption
    run.place(16, np.concatenate([other[16:41], rows[41:43]]))  # and the rest computed again, with two more tokens
    run.place(43, rows[43:90])
    run.tokens, run.finish_reason = list(range(51)), "length"
    output = run.output()
    assert output.rows is not None
    assert np.array_equal(output.rows, rows)
    assert (output.shared, output.recomputed) == (16, 25)


def test_a_hole_and_a_missing_row_are_errors_that_name_the_position() -> None:
    rows = random_rows(np.random.default_rng(0), qwen.SPEC, 9)
    run = run_of([1, 2, 3])
    run.place(0, rows[:3])
    with pytest.raises(EngineError, match="request r, position 3"):
        run.place(4, rows[:1])
    run.tokens = [1, 2, 3]
    with pytest.raises(EngineError, match=r"3 \+ 3 - 1 = 5 rows"):
        run.output()


def test_an_evicted_request_goes_on_where_it_was() -> None:
    run = run_of([1, 2], Params(max_tokens=4, stop_token_ids=EOS))
    state = RoutedState.of(run)
    state.status = 2
    assert not state.update_and_check_completion(5, -0.5)
    again = state.create_equivalent_initial_request()
    assert (type(again), again.run) == (RoutedState, run)
    assert (again.initial_tokens, again.max_new_tokens) == ([1, 2, 5], 3)
    again.status = 2
    assert not again.update_and_check_completion(6, -1.0)
    assert again.update_and_check_completion(7, -1.5)
    assert (run.tokens, run.logprobs, run.finish_reason) == ([5, 6, 7], [-0.5, -1.0, -1.5], "stop")


def test_a_stop_string_ends_a_request_and_its_last_token_by_length_does() -> None:
    letters = {"decode": lambda tokens: "".join(chr(97 + token) for token in tokens)}
    run = run_of([1], Params(max_tokens=9, stop=("cd", "zz")), **letters)
    state = RoutedState.of(run)
    state.status = 2
    assert [state.update_and_check_completion(token, 0.0) for token in (0, 2, 3)] == [False, False, True]
    assert (run.finish_reason, run.stop_text) == ("stop", "cd")
    run = run_of([1], Params(max_tokens=1))
    state = RoutedState.of(run)
    state.status = 2
    assert state.update_and_check_completion(3, 0.0)
    assert run.finish_reason == "length"


# Bodies of the endpoint


def output_of(rows: Any = None, **changes: Any) -> Output:
    values = {
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4],
        "logprobs": [-0.5, -1.0],
        "top_logprobs": [[(9, -0.1)], [(4, -1.0)]],
        "finish_reason": "length",
        "stop_text": None,
        "weight_version": 5,
        "shared": 1,
        "recomputed": 0,
    }
    return Output(rows=rows, **{**values, **changes})


def test_a_completion_is_in_vllms_format() -> None:
    spec = qwen.SPEC
    rows = random_rows(np.random.default_rng(0), spec, 3)
    whole = np.zeros((3, spec.num_layers, 2), np.uint8)
    whole[:, list(spec.moe_layers)] = rows
    request = CompletionRequest(
        prompt=[1, 2], logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, max_tokens=2
    )
    body = response(request, [output_of(rows)], "m", NO_TEXT, lambda _: whole)
    (choice,) = body["choices"]
    routes = wire.decode_vllm(choice["routed_experts"], spec, num_tokens=4)
    assert np.array_equal(routes.ids[:, :3], rows.transpose(1, 0, 2))
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([3, 4], [1, 2])
    assert choice["logprobs"]["token_logprobs"] == [-0.5, -1.0]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:9": -0.1, "token_id:3": -0.5}
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert body["weight_version"] == 5


def test_a_chat_completion_has_its_prompt_ids_at_the_top() -> None:
    request = ChatRequest(messages=[{"role": "user", "content": "hi"}], logprobs=True, return_token_ids=True)
    body = response(request, [output_of(), output_of()], "m", NO_TEXT, lambda rows: rows)
    assert body["prompt_token_ids"] == [1, 2]
    assert [item["logprob"] for item in body["choices"][1]["logprobs"]["content"]] == [-0.5, -1.0]
    assert body["choices"][0]["routed_experts"] is None
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "a", "stream": True}, "not streamed"),
        ({"prompt": "a", "min_p": 0.2}, "min_p"),
        ({"prompt": "a", "guided_json": "{}"}, "does not know the field guided_json"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "one prompt a request"),
        ({"prompt": []}, "one prompt a request"),
    ],
)
def test_requests_that_would_be_misunderstood_are_refused(body: dict[str, Any], message: str) -> None:
    request = CompletionRequest(**body)
    with pytest.raises((ConfigError, PromptError), match=message):
        request.params(EOS, 100) and request.prompt_of()


def test_requests_are_read_as_vllm_reads_them() -> None:
    request = CompletionRequest(prompt=[[1, 2]], top_k=-1, user="me", max_tokens=None)
    assert request.prompt_of() == Prompt("request", 0, "prompt_token_ids", [1, 2])
    assert request.params(EOS, 100) == Params(max_tokens=16, stop_token_ids=EOS)
    chat = ChatRequest(
        messages=[{"role": "user", "content": "x"}], max_completion_tokens=9, logprobs=True, top_logprobs=3
    )
    assert chat.params(EOS, 100) == Params(max_tokens=9, stop_token_ids=EOS, top_logprobs=3)
    assert chat.model_copy(update={"max_tokens": 4}).params(EOS, 100).max_tokens == 9  # the newer name first
    assert chat.model_copy(update={"max_completion_tokens": None}).params(EOS, 100).max_tokens == 100
    with pytest.raises(ValidationError):
        CompletionRequest(prompt="a", top_p=0)
    with pytest.raises(PromptError, match="one of prompt and messages"):
        TokenizeRequest().prompt_of()
    assert error("no", 400, "BadRequestError", "top_p")["error"]["param"] == "top_p"


def test_a_stop_string_is_cut_from_the_text_and_its_tokens_stay() -> None:
    letters = Text(SimpleNamespace(decode=lambda tokens, **_: "".join(chr(97 + token) for token in tokens)))
    request = CompletionRequest(prompt="a", return_token_ids=True)
    body = response(request, [output_of(token_ids=[0, 1, 2], stop_text="bc")], "m", letters, lambda rows: rows)
    assert (body["choices"][0]["text"], body["choices"][0]["token_ids"]) == ("a", [0, 1, 2])
    assert body["choices"][0]["stop_reason"] == "bc"


def test_text_and_chat_need_a_tokenizer() -> None:
    with pytest.raises(PromptError, match="has no tokenizer"):
        NO_TEXT.tokens_of(Prompt("p", 1, "prompt", "hello"))
    assert NO_TEXT.tokens_of(Prompt("p", 1, "prompt_token_ids", [4])) == [4]
