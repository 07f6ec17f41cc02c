"""Routes are taken out of a response before its JSON is parsed: the same completion, or the same error, as if they were not."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3.errors import EngineError
from r3.rollout.protocol import Completion, parse_completion

PAYLOAD = "k05VTVBZAQB2AHsn+/=="


def body(routes: Any = PAYLOAD, text: str = "ab", **more: Any) -> dict[str, Any]:
    logprobs = {"tokens": [text, "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{text: -1.0}, {"b": -2.0}]}
    choice = {"text": text + "b", "logprobs": logprobs, "token_ids": [5, 6], "prompt_token_ids": [1, 2, 3]}
    return {"id": "c", "choices": [{**choice, "finish_reason": "stop", "routed_experts": routes, **more}]}


def routes_in(completion: Completion) -> Any:
    payload = completion.routed_experts
    return bytes(payload).decode() if isinstance(payload, memoryview) else payload


@given(
    text=st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            ["routed_experts", '"routed_experts"', '"routed_experts":"', '\\"routed_experts\\":\\"x"', "@taken", ":"]
        ),
    ),
    spaces=st.booleans(),
)
def test_nothing_else_changes_whatever_the_text_says(text, spaces) -> None:
    response = body(text=text)
    content = json.dumps(response).encode() if spaces else orjson.dumps(response)
    completion = parse_completion(content, "url")
    assert routes_in(completion) == PAYLOAD
    assert np.array_equal(completion.token_ids, [5, 6])
    assert np.array_equal(completion.prompt_token_ids, [1, 2, 3])
    assert completion.finish_reason == "stop"


def test_usual_routes_are_a_view_of_the_response() -> None:
    content = orjson.dumps(body())
    payload = parse_completion(content, "url").routed_experts
    assert isinstance(payload, memoryview)
    assert payload.obj is content


@pytest.mark.parametrize("routes", [None, "", "@taken", ["lists", 1], {"data": "x"}, 3])
def test_other_routes_come_as_they_are(routes) -> None:
    assert routes_in(parse_completion(orjson.dumps(body(routes)), "url")) == routes


def test_what_json_escapes_is_unescaped() -> None:
    content = orjson.dumps(body("a/b")).replace(b"a/b", b"a\\/b")
    assert routes_in(parse_completion(content, "url")) == "a/b"


def test_the_last_of_equal_keys_counts_as_json_has_it() -> None:
    content = orjson.dumps(body("first")).replace(b'"first"', b'"first","routed_experts":"second"')
    assert routes_in(parse_completion(content, "url")) == "second"


def test_routes_beside_the_choice_are_not_taken_for_its_own() -> None:
    content = orjson.dumps({"routed_experts": "elsewhere", **body(None)})
    assert parse_completion(content, "url").routed_experts is None


@pytest.mark.parametrize("end", range(1, 40, 3))
def test_a_response_that_was_cut_is_an_error(end) -> None:
    content = orjson.dumps(body())
    with pytest.raises(EngineError, match="not a completion in vLLM's format"):
        parse_completion(content[:-end], "url")
