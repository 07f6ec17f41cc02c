"""The endpoint over the transformers engine, as a real process: `r3 collect` speaks to it as to vLLM, and knows what it is."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import transformers
from typer.testing import CliRunner

from r3 import ShardStore, cli, wire
from r3.errors import EngineError, PromptError
from r3.rollout import server as server_module
from r3.rollout.client import VllmClient
from r3.rollout.collector import collect_sync
from r3.rollout.preflight import EngineInfo, check_version, preflight
from r3.rollout.prompts import Prompt, read_prompts
from r3.rollout.protocol import Sampling
from r3.rollout.server import TransformersServer
from r3.rollout.transformers.engine import TransformersEngine

BLOCKS = 64


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[TransformersServer]:
    # float32, so that what it samples does not depend on its batches.
    with TransformersServer(tiny_model, dtype="float32", extra_args=["--num-blocks", str(BLOCKS)]) as running:
        yield running


@pytest.fixture(scope="module")
def info(server: TransformersServer) -> EngineInfo:
    return asyncio.run(preflight(server.url))


def post(server: TransformersServer, path: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_command_line() -> None:
    server = TransformersServer(
        "m", dtype="bfloat16", served_model_name="tiny", seed=3, port=8000, routed_experts=False
    )
    assert server.command()[1:] == [
        *(
            "-m",
            "r3.rollout.transformers.server",
            "--model",
            "m",
            "--host",
            "127.0.0.1",
            "--port",
            "8000",
            "--dtype",
            "bfloat16",
        ),
        *("--seed", "3", "--no-routes", "--served-model-name", "tiny"),
    ]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_installed", lambda name: name != "uvicorn")
    with pytest.raises(EngineError, match="uvicorn not installed"), TransformersServer("m"):
        pass


def test_versions_of_transformers_are_not_looked_up_as_vllms() -> None:
    assert check_version("0.1.0", "url", "transformers") == ()
    with pytest.raises(EngineError, match=r"vLLM 0\.1\.0 cannot be used"):
        check_version("0.1.0", "url")


@pytest.mark.engine
def test_a_preflight_knows_what_answers(info: EngineInfo, tiny_model: Path) -> None:
    assert (info.engine, info.engine_version) == ("transformers", transformers.__version__)
    assert info.logprobs_mode == "raw_logprobs"  # measured, at two temperatures
    assert (info.model, info.model_root) == (str(tiny_model), str(tiny_model))
    assert info.max_model_len == (BLOCKS - 1) * 16 - 1
    assert info.model_fingerprint
    assert info.warnings == ()


@pytest.mark.engine
def test_the_command_collects_what_the_engine_itself_samples(
    server: TransformersServer, tiny_model: Path, tmp_path: Path
) -> None:
    prompts = read_prompts(tiny_model / "prompts.jsonl")[:4]
    prompts = [prompts[0], prompts[1], Prompt("ids", 0, "prompt_token_ids", list(range(40)))]
    prompts.append(Prompt("chat", 0, "messages", [{"role": "user", "content": "Write f"}]))
    lines = [json.dumps({"id": prompt.prompt_id, prompt.kind: prompt.payload}) for prompt in prompts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    options = ["--seed", "3", "--max-tokens", "16", "--temperature", "0.9", "-n", "2", "--weight-version", "5"]
    arguments = ["collect", str(tmp_path / "prompts.jsonl"), str(tmp_path / "server"), "--server", server.url, *options]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert f"transformers {transformers.__version__} serves" in " ".join(result.output.split())
    sampling = Sampling(temperature=0.9, max_tokens=16, seed=3)
    direct = ShardStore(tmp_path / "direct", create=True)
    with TransformersEngine(tiny_model, dtype="float32", sampling=sampling) as engine:
        collect_sync(
            prompts, direct, engine.info, sampling=sampling, n=2, weight_version=5, sampler=engine, fsync=False
        )
    served = ShardStore(tmp_path / "server")
    assert sorted(served.sample_ids()) == sorted(direct.sample_ids())
    assert len(served.sample_ids()) == 8
    for sample_id in served.sample_ids():
        ours, theirs = direct.open(sample_id), served.open(sample_id)
        assert ours.provenance == theirs.provenance
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert ours.routes.equal(theirs.routes)
        assert np.allclose(ours.rollout_logprobs, theirs.rollout_logprobs, atol=1e-4, equal_nan=True)


@pytest.mark.engine
def test_choices_share_the_prompt_and_each_has_its_routes(server: TransformersServer, info: EngineInfo) -> None:
    prompt = list(range(3, 43))
    status, body = post(
        server, "/v1/completions", prompt=prompt, n=3, seed=1, max_tokens=5, logprobs=0, return_token_ids=True
    )
    assert status == 200
    assert len({tuple(choice["token_ids"]) for choice in body["choices"]}) == 3  # a seed for each choice
    for choice in body["choices"]:
        routes = wire.decode_vllm(choice["routed_experts"], info.spec, num_tokens=45)
        assert routes.num_recorded == 44
    _, again = post(server, "/v1/completions", prompt=prompt, n=1, max_tokens=2)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}  # two whole blocks


def health(server: TransformersServer) -> dict[str, int]:
    with urllib.request.urlopen(f"{server.url}/health", timeout=10) as response:
        found = json.load(response)
    assert isinstance(found, dict)
    return found


@pytest.mark.engine
def test_a_client_that_goes_away_cancels_its_request(server: TransformersServer) -> None:
    before = health(server)["tokens"]

    async def leave() -> None:
        body = {"prompt": [5] * 20, "max_tokens": 900, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            asked = [asyncio.create_task(session.post(f"{server.url}/v1/completions", json=body)) for _ in range(3)]
            while (await asyncio.to_thread(health, server))["tokens"] < before + 100:
                await asyncio.sleep(0.01)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(leave())
    deadline = time.monotonic() + 300
    while health(server)["running"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert health(server)["tokens"] < before + 2000  # three whole responses are 2,700


@pytest.mark.engine
@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 5000}, 400, "maximum context length is 1007 tokens"),
        ("/v1/completions", {"prompt": [99999]}, 400, "not a prompt of this model"),
        ("/v1/completions", {"prompt": "a", "min_p": 0.5}, 400, "does not sample with min_p"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature: Input should be greater"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "does not exist"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}], "stream": True}, 400, ""),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "one of prompt and messages"),
    ],
)
def test_errors_are_in_openais_form(
    server: TransformersServer, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    got, answer = post(server, path, **body)
    assert (got, answer["error"]["code"]) == (status, status)
    assert said in answer["error"]["message"]


@pytest.mark.engine
def test_a_prompt_that_is_too_long_is_told_as_such(server: TransformersServer, info: EngineInfo) -> None:
    async def ask() -> None:
        async with VllmClient([server.url], info.model, Sampling(max_tokens=2000)) as client:
            await client.sample(Prompt("p", 1, "prompt", "x"))

    with pytest.raises(PromptError, match="maximum context length") as caught:
        asyncio.run(ask())
    assert "shorten the prompt" in str(caught.value.remedy)


@pytest.mark.engine
def test_stop_strings_and_tokenize(server: TransformersServer) -> None:
    _, free = post(server, "/v1/completions", prompt="def f(x):\n", temperature=0, max_tokens=24, return_token_ids=True)
    text = free["choices"][0]["text"]
    stop = text[4:7]
    _, body = post(
        server, "/v1/completions", prompt="def f(x):\n", temperature=0, max_tokens=24, stop=stop, return_token_ids=True
    )
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == text[: text.find(stop)]
    assert choice["token_ids"] == free["choices"][0]["token_ids"][: len(choice["token_ids"])]
    _, tokens = post(server, "/tokenize", prompt="def")
    assert tokens["tokens"] == list(b"def")
    assert post(server, "/tokenize", messages=[{"role": "user", "content": "hi"}])[1]["count"] > 2


@pytest.mark.engine
def test_a_server_whose_engine_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EngineError, match="ended while starting") as caught, TransformersServer(tmp_path):
        pass
    assert "r3: " in str(caught.value)
    assert "cannot load this model" in str(caught.value)
