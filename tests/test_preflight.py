"""preflight: each way in which a server can be the wrong one is told by name, before the first sample."""

from __future__ import annotations

import asyncio
import http.server
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import MODEL, FakeVllm, status
from helpers import SPEC

from r3 import RoutingSpec
from r3.errors import EngineError
from r3.rollout.preflight import EngineInfo, check_version, normalize_url, preflight
from r3.rollout.probe import logprobs_mode


def check(*servers: FakeVllm, **options: Any) -> EngineInfo:
    options = {"spec": SPEC, "timeout_s": 10.0, **options}
    return asyncio.run(preflight([server.url for server in servers], **options))


def refusal(*servers: FakeVllm, **options: Any) -> str:
    with pytest.raises(EngineError) as caught:
        check(*servers, **options)
    message = str(caught.value)
    assert "remedy" in message
    assert servers[-1].url in message
    return message


def card(**changes: Any) -> list[dict[str, Any]]:
    return [{"id": MODEL, "owned_by": "vllm", "root": MODEL, "parent": None, "max_model_len": 256, **changes}]


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm() as fake:
        yield fake


def test_a_server_that_is_right(server: FakeVllm) -> None:
    assert check(server) == EngineInfo(
        urls=(server.url,),
        spec=SPEC,
        model=MODEL,
        engine="vllm",
        engine_version="0.30.0",
        model_root=MODEL,
        max_model_len=256,
        logprobs_mode="raw_logprobs",
    )
    assert {body["temperature"] for body in server.requests} == {0.5, 2.0}
    assert all(body["max_tokens"] <= 2 for body in server.requests)


def test_processed_logprobs_are_recognised(server: FakeVllm) -> None:
    server.mode = "processed_logprobs"
    assert check(server).logprobs_mode == "processed_logprobs"


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_are_refused(server: FakeVllm, mode: str) -> None:
    server.mode = mode
    assert "logits in place of log-probs" in refusal(server)


def test_the_mode_of_peaked_and_of_undecidable_distributions() -> None:
    def tops(logits: list[float], *temperatures: float) -> list[dict[str, float]]:
        def one(t: float) -> dict[str, float]:
            z = math.log(sum(math.exp(x / t) for x in logits))
            return {str(i): x / t - z for i, x in enumerate(logits)}

        return [one(t) for t in temperatures]

    peaked = [30.0, 2.0, 1.0, 0.0]  # the most likely token has log-prob 0.000 at either temperature
    assert logprobs_mode(tops(peaked, 1.0, 1.0), "url") == "raw_logprobs"
    assert logprobs_mode(tops(peaked, 0.5, 2.0), "url") == "processed_logprobs"
    for undecidable in (tops([1.0] * 4, 0.5, 2.0), [{"a": -0.1}, {"b": -0.1}]):
        with pytest.raises(EngineError, match="cannot tell"):
            logprobs_mode(undecidable, "url")
    with pytest.raises(EngineError, match="logits"):
        logprobs_mode([{"a": -40.0, "b": -41.0}] * 2, "url")  # no probability of a largest token is e^-40


def test_nothing_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"no server can be reached \(.*[Rr]efused") as caught:
            asyncio.run(preflight(url, spec=SPEC))
    assert url in str(caught.value)


def test_a_port_that_does_not_speak_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"-ERR unknown command\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(EngineError, match="no usable answer to GET /version"):
            asyncio.run(preflight(f"127.0.0.1:{listener.getsockname()[1]}", spec=SPEC))


def test_some_other_http_server() -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(EngineError, match="not a vLLM server") as caught:
            asyncio.run(preflight(f"http://127.0.0.1:{other.server_port}", spec=SPEC))
        other.shutdown()
    assert "got some other HTTP server" in str(caught.value)


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        ("sglang", "looks like SGLang"),
        ("vllm", "a gateway in front of vLLM"),
        ("openai", "models are owned by openai"),
    ],
)
def test_other_servers_are_told_apart(owner: str, said: str) -> None:
    with FakeVllm(version=None, models=card(owned_by=owner)) as server:
        message = refusal(server)
    assert "not a vLLM server" in message
    assert said in message


def test_the_flag_is_off(server: FakeVllm) -> None:
    server.routes = "null"
    assert "restart it with --enable-return-routed-experts" in refusal(server)


def test_a_gateway_that_drops_fields(server: FakeVllm) -> None:
    server.routes = "absent"
    assert "no field routed_experts" in refusal(server)
    server.routes = "on"
    server.edit = lambda choice: choice.pop("token_ids")
    assert "no field token_ids" in refusal(server)
    server.edit = lambda choice: choice.update(logprobs=None)
    assert "no log-probs" in refusal(server)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (RoutingSpec(4, (1, 2, 3), 8, 3), "expected top-3, got top-2"),
        (RoutingSpec(6, (0, 1, 2), 8, 2), "expected 6 or 3, got 4"),
        (RoutingSpec(4, (0, 1, 3), 8, 2), "a layer that should be dense"),
        (RoutingSpec(4, (1, 2, 3), 4, 2), "out of range"),
    ],
)
def test_the_spec_of_another_model(server: FakeVllm, other: RoutingSpec, said: str) -> None:
    message = refusal(server, spec=other)
    assert said in message
    assert other.brief() in message


@pytest.mark.parametrize("version", ["0.14.1", "0.20.2", "0.21.0", "v0.21.1"])
def test_versions_without_routes_over_http(version: str) -> None:
    with FakeVllm(version=version) as server:
        message = refusal(server)
    assert version in message
    assert "0.22 or later" in message


def test_versions_that_are_warned_of() -> None:
    assert check_version("0.30.0", "url") == check_version("0.26.0", "url") == check_version("0.33.1", "url") == ()
    assert "layer 0" in check_version("0.25.1", "url")[0]
    assert "BlockObjectStoreError" in check_version("0.32.0", "url")[0]
    for version in ("0.1.dev7+g0123abc", "0.34.0.dev3", "unknown", ""):
        assert "development version" in check_version(version, "url")[0]


def test_a_model_that_is_not_served(server: FakeVllm) -> None:
    server.models = card() + card(id="adapter", parent=MODEL)
    message = refusal(server, model_name="nope")
    assert f"got {MODEL}, adapter" in message
    assert check(server, model_name="adapter").model == "adapter"
    server.models.reverse()
    assert check(server).model == MODEL  # the base model, not the adapter that comes first


def test_a_server_that_fails(server: FakeVllm) -> None:
    server.answer = status(500, times=-1)
    with pytest.raises(EngineError, match=r"fails a request of two tokens \(HTTP 500: busy\)"):
        check(server)


def test_a_server_that_wants_a_key(server: FakeVllm) -> None:
    server.api_key = "secret"
    assert "another API key (HTTP 401)" in refusal(server)
    assert "another API key (HTTP 401)" in refusal(server, api_key="guess")
    assert check(server, api_key="secret").model == MODEL


def test_the_model_given_must_be_the_model_served(server: FakeVllm, tmp_path: Path) -> None:
    served, copy, other = (tmp_path / name for name in ("served", "copy", "other"))
    for directory, weights in ((served, b"one"), (copy, b"one"), (other, b"two")):
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(weights)
    server.models = card(root=str(served))
    fingerprint = check(server).model_fingerprint
    assert fingerprint
    assert check(server, model_path=copy).model_fingerprint == fingerprint
    message = refusal(server, model_path=other)
    assert "other weights than those of --model" in message
    assert str(other) in message
    assert str(served) in message


def test_servers_must_agree(server: FakeVllm) -> None:
    with FakeVllm() as second:
        assert check(server, second).urls == (server.url, second.url)
        second.mode = "processed_logprobs"
        assert "differ in logprobs_mode" in refusal(server, second)
        second.models = card(max_model_len=128)
        assert "differ in max_model_len" in refusal(server, second)
        second.models = card(id="other")
        assert "differ in model" in refusal(server, second)
        second.version = "0.31.0"
        assert "differ in version" in refusal(server, second)


def test_the_routing_must_be_known_from_somewhere(server: FakeVllm) -> None:
    message = refusal(server, spec=None)
    assert f"got {MODEL}" in message
    assert "--model" in message


@pytest.mark.parametrize(
    ("given", "base"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        (" https://host/proxy/v1/ ", "https://host/proxy"),
        ("host:8000", "http://host:8000"),
        ("[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_urls(given: str, base: str) -> None:
    assert normalize_url(given) == base


@pytest.mark.parametrize("given", ["", "http://", "ftp://host", "http://host:port", "http://host:99999"])
def test_what_is_not_a_url(given: str) -> None:
    with pytest.raises(EngineError, match="not the URL of a server"):
        normalize_url(given)


@pytest.mark.engine
def test_a_real_server(engine: EngineInfo, tiny_model: Path) -> None:
    assert engine.engine_version
    assert engine.spec == RoutingSpec.from_config(tiny_model)
    assert engine.model == engine.model_root == str(tiny_model)
    assert engine.logprobs_mode == "raw_logprobs"
    assert len(engine.model_fingerprint) == 32
    assert engine.max_model_len


@pytest.mark.engine
def test_a_real_server_of_another_model(engine: EngineInfo, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "num_hidden_layers": 8, "num_experts_per_tok": 3}')
    with pytest.raises(EngineError, match="another number of experts") as caught:
        asyncio.run(preflight(engine.urls[0], model_path=tmp_path))
    assert "expected top-3, got top-2" in str(caught.value)
