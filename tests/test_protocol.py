"""Routes are taken out of a response before its JSON is parsed: the same completion, or the same error, as if they were not."""

from __future__ import annotations

import json
import random
import resource
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from r3 import RoutingSpec, wire
from r3.budget.standin import routes_of
from r3.errors import EngineError
from r3.rollout.client import keep_freed_memory
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


class Pairs(list[tuple[str, Any]]):
    """A JSON object whose keys may repeat."""


TEXTS = [
    PAYLOAD,
    "",
    "a/b",
    "@taken",
    "routed_experts",
    '"routed_experts"',
    '"routed_experts":"x"',
    'x"routed_experts',
    "\\",
]


def anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 2 else 6)
    if kind < 6:
        return [rng.choice(TEXTS), rng.choice(TEXTS), rng.choice(TEXTS), PAYLOAD, None, 7][kind]
    below = [(rng.choice(["routed_experts", '"routed_experts', "k"]), anything(rng, depth + 1)) for _ in range(2)]
    return Pairs(below) if kind == 6 else [value for _, value in below]


def written(value: Any, rng: random.Random) -> str:
    """JSON with any white space and, of strings, any of the ways to escape them."""
    space = rng.choice(["", "", " ", "\r\n\t"])
    if isinstance(value, dict):
        value = Pairs(value.items())
    if isinstance(value, Pairs):
        items = (f"{written(key, rng)}{space}:{space}{written(of, rng)}" for key, of in value)
        return "{" + space + f"{space},{space}".join(items) + "}"
    if isinstance(value, list):
        return "[" + f"{space},".join(written(of, rng) for of in value) + space + "]"
    text = json.dumps(value)
    if isinstance(value, str) and rng.random() < 0.1:
        text = rng.choice(['"' + "".join(f"\\u{ord(c):04x}" for c in value) + '"', text.replace("/", "\\/")])
    return text


def outcome(content: bytes) -> Any:
    try:
        found = parse_completion(content, "url")
    except EngineError:
        return EngineError
    arrays = (found.prompt_token_ids, found.token_ids, found.logprobs)
    return [*(array.tolist() for array in arrays), routes_in(found), found.finish_reason]


@given(rng=st.randoms(use_true_random=False), cut=st.sampled_from([0, 0, 0, 3, 50]))
def test_a_response_means_what_its_json_means(rng, cut) -> None:
    choice = [*body(text=rng.choice(TEXTS))["choices"][0].items()][:-1]
    names = ["routed_experts", "routed_experts", '"routed_experts', "k"]
    choice += [(rng.choice(names), anything(rng)) for _ in range(rng.choice([1, 1, 2]))]
    rng.shuffle(choice)
    top = [("choices", [Pairs(choice)]), *[(rng.choice(names), anything(rng)) for _ in range(rng.choice([0, 0, 1]))]]
    rng.shuffle(top)
    content = written(Pairs(top), rng).encode()
    content = content[: len(content) - cut]
    # The same JSON, in which no key can be found without parsing.
    assert outcome(content) == outcome(content.replace(b'"routed_experts"', b'"routed\\u005fexperts"'))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_any_kind_are_decoded_as_the_text_is(kind) -> None:
    spec = RoutingSpec(3, (0, 1, 2), 8, 2)
    payload = routes_of(spec, 9, 0)
    expected = wire.decode(payload, spec, num_tokens=9).ids
    for sent in (kind(payload.encode()), kind(wire.decode_base64(payload, "here"))):
        assert np.array_equal(wire.decode(sent, spec, num_tokens=9).ids, expected)


def test_no_text_of_a_response_stands_for_the_place_of_its_routes() -> None:
    content = orjson.dumps(body("@taken", **{'"routed_experts': PAYLOAD}))
    content = content.replace(b'"routed_experts":"@taken"', b'"routed\\u005fexperts":"@taken"')
    assert routes_in(parse_completion(content, "url")) == "@taken"


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


def test_memory_is_kept_by_a_block_that_is_never_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        keep_freed_memory()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000, "32 MiB are 8,192 pages"
