"""veRL's rollout side without veRL: requests to samples, notes, settings, and what the plug-in loads."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import SPEC
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from r3 import Provenance, wire
from r3.errors import ConfigError, R3Error, ReplayError, SampleError, WireError
from r3.handoff import Note, announce_trainer, announced_trainers
from r3.rollout.verl.legs import Request, dense_rows, sample_of, tapped
from r3.rollout.verl.settings import Settings, check_config, settings_of
from r3.routes import runs_of
from r3.testing import random_rows

PROVENANCE = Provenance(engine="vllm", engine_version="0.30.0")


def request(
    rng: np.random.Generator, prompt: list[int], tokens: list[int], *, version: int = 0, **changes: Any
) -> Request:
    """A request whose engine computed rows of its own for all its tokens but the last."""
    fields: dict[str, Any] = {
        "prompt_ids": prompt,
        "token_ids": tokens,
        "log_probs": [-0.1 * (version + 1)] * len(tokens),
        "routed_experts": random_rows(rng, SPEC, len(prompt) + len(tokens) - 1),
        "weight_version": version,
        "stop_reason": "completed",
        "cached_tokens": None,
    }
    return Request(**{**fields, **changes})


def output(prompt: list[int], response: list[int], mask: list[int]) -> Any:
    logprobs = [-0.5 if m else 0.0 for m in mask]
    return SimpleNamespace(prompt_ids=prompt, response_ids=response, response_mask=mask, response_logprobs=logprobs)


def make(result: Any, requests: list[Request], **more: Any) -> Any:
    return sample_of(result, requests, SPEC, sample_id="s", group_id="g", provenance=PROVENANCE, **more)


def rows_of(request: Request, start: int, stop: int) -> np.ndarray:
    """[L, n, K], as the request's engine computed them."""
    return np.asarray(request.routed_experts)[start:stop].transpose(1, 0, 2)


def test_two_turns_take_each_row_from_the_request_that_sampled_from_it() -> None:
    rng = np.random.default_rng(0)
    first = request(rng, [1, 2, 3], [10, 11], version=4)
    second = request(rng, [1, 2, 3, 10, 11, 50, 51, 52], [12, 13, 14], version=5)
    sample = make(output([1, 2, 3], [10, 11, 50, 51, 52, 12, 13, 14], [1, 1, 0, 0, 0, 1, 1, 1]), [first, second])
    ids = sample.routes.ids
    np.testing.assert_array_equal(ids[:, :4], rows_of(first, 0, 4))  # though the second computed them again
    np.testing.assert_array_equal(ids[:, 4:10], rows_of(second, 4, 10))  # the boundary row and the tool's with it
    assert sample.routes.recorded.tolist() == [True] * 10 + [False]
    assert sample.loss_mask.tolist() == [False] * 3 + [True, True, False, False, False, True, True, True]
    assert sample.weight_version.tolist() == [-1] * 3 + [4, 4, -1, -1, -1, 5, 5, 5]
    assert sample.prompt_length == 3
    assert np.isnan(sample.rollout_logprobs[[0, 5]]).all()
    assert sample.rollout_logprobs[3] == np.float32(-0.5)


def test_an_interrupted_response_keeps_the_rows_of_the_weights_that_sampled() -> None:
    rng = np.random.default_rng(1)
    first = request(rng, [1, 2], [5, 6], version=1, stop_reason="aborted")
    nothing = request(rng, [1, 2, 5, 6], [], version=2, routed_experts=None, log_probs=None, stop_reason="aborted")
    last = request(rng, [1, 2, 5, 6], [7], version=2)
    sample = make(output([1, 2], [5, 6, 7], [1, 1, 1]), [first, nothing, last])
    np.testing.assert_array_equal(sample.routes.ids[:, :3], rows_of(first, 0, 3))
    np.testing.assert_array_equal(sample.routes.ids[:, 3:4], rows_of(last, 3, 4))
    assert sample.weight_version.tolist() == [-1, -1, 1, 1, 2]


def test_cut_responses_and_edited_contexts_lose_their_rows_with_their_tokens() -> None:
    rng = np.random.default_rng(2)
    one = request(rng, [1, 2, 3], [10, 11, 12, 13])
    cut = make(output([1, 2, 3], [10, 11], [1, 1]), [one])
    assert cut.num_tokens == 5
    np.testing.assert_array_equal(cut.routes.ids, rows_of(one, 0, 5))  # the last one too: the engine did compute it
    # The second turn's context has lost token 13: rows from there on are the second's.
    two = request(rng, [1, 2, 3, 10, 11, 12, 60], [14])
    edited = make(output([1, 2, 3], [10, 11, 12, 60, 14], [1, 1, 1, 0, 1]), [one, two])
    np.testing.assert_array_equal(edited.routes.ids[:, :6], rows_of(one, 0, 6))
    np.testing.assert_array_equal(edited.routes.ids[:, 6:7], rows_of(two, 6, 7))
    # Tokens of a tool at the end, after the last request: no row, and said so.
    tail = make(output([1, 2, 3], [10, 11, 12, 13, 70, 71], [1, 1, 1, 1, 0, 0]), [one])
    assert tail.routes.recorded.tolist() == [True] * 6 + [False] * 3


def test_a_mask_over_tokens_that_nobody_sampled_is_refused() -> None:
    one = request(np.random.default_rng(3), [1, 2, 3], [10, 11])
    with pytest.raises(SampleError, match="tokens that no request sampled") as caught:
        make(output([1, 2, 3], [10, 99], [1, 1]), [one])
    assert "token 4" in str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda _rows: None, "no routes|null"),
        (lambda rows: rows[:-1], "rows"),
        (lambda rows: np.where(np.arange(len(rows))[:, None, None] == 1, 0, rows), "zeros"),
        (lambda rows: rows + SPEC.num_experts, "out of range"),
        (lambda rows: rows[:, :-1], "layers"),
    ],
)
def test_an_engine_that_gave_bad_routes_is_refused_by_leg(spoil: Any, match: str) -> None:
    rng = np.random.default_rng(4)
    good = request(rng, [1, 2], [5])
    bad = request(rng, [1, 2, 5, 6], [7, 8])
    bad = request(rng, [1, 2, 5, 6], [7, 8], routed_experts=spoil(np.asarray(bad.routed_experts)))
    with pytest.raises(WireError, match=match) as caught:
        make(output([1, 2], [5, 6, 7, 8], [1, 0, 1, 1]), [good, bad])
    assert "leg 1" in str(caught.value)


def test_dense_rows_have_zeros_where_nothing_is_recorded_if_somebody_knows() -> None:
    rng = np.random.default_rng(7)
    one = request(rng, [1, 2, 3], [10, 11])
    sample = make(output([1, 2, 3], [10, 11], [1, 1]), [one])
    rows = dense_rows(sample, may_have_holes=False)
    np.testing.assert_array_equal(rows[:4], one.routed_experts)
    assert not rows[4].any()
    recorded = sample.routes.recorded.copy()
    recorded[1] = False
    holed = replace(sample, routes=replace(sample.routes, recorded=recorded))
    assert not dense_rows(holed, may_have_holes=True)[1].any()
    with pytest.raises(SampleError, match="cannot tell a missing row from expert 0") as caught:
        dense_rows(holed, may_have_holes=False)
    assert "token 1" in str(caught.value)


def test_every_request_of_a_resuming_client_is_seen() -> None:
    """As veRL's client does it: a server is acquired for each attempt, several times in one `generate`."""

    def answer(tokens: list[int], version: int) -> Any:
        rows = random_rows(np.random.default_rng(version), SPEC, 4)
        fields = {"global_steps": version, "num_cached_tokens": 2}
        return SimpleNamespace(
            token_ids=tokens, log_probs=[0.0], routed_experts=rows, stop_reason="x", extra_fields=fields
        )

    class Server:
        @property
        def generate(self) -> Any:
            return self

        async def remote(self, *, prompt_ids: list[int]) -> Any:
            return answer([len(prompt_ids)], len(prompt_ids))

    class Client:
        async def _acquire_server(self, _request_id: str) -> Any:
            return "a", Server()

        def _release_server(self, _server_id: str) -> None: ...

        async def generate(self, prompt_ids: list[int]) -> list[int]:
            for _ in range(2):
                _, server = await self._acquire_server("r")
                prompt_ids = prompt_ids + (await server.generate.remote(prompt_ids=prompt_ids)).token_ids
            return prompt_ids

    seen: list[Request] = []
    client = Client()
    assert asyncio.run(tapped(client, seen).generate([7, 7])) == [7, 7, 2, 3]
    assert [(r.prompt_ids, r.token_ids, r.weight_version) for r in seen] == [([7, 7], [2], 2), ([7, 7, 2], [3], 3)]
    assert "_acquire_server" not in vars(client)  # the worker's own client is as before


def test_requests_of_another_kind_of_client_are_seen_too() -> None:
    class Client:
        async def generate(self, **_: Any) -> Any:
            return SimpleNamespace(
                token_ids=[3], log_probs=None, routed_experts=None, stop_reason=None, extra_fields={}
            )

    seen: list[Request] = []
    asyncio.run(tapped(Client(), seen).generate(prompt_ids=[1]))
    assert [(r.prompt_ids, r.token_ids, r.weight_version) for r in seen] == [([1], [3], -1)]


# Notes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=40))
def test_a_note_survives_the_trip_with_its_mask(bits: list[bool]) -> None:
    mask = np.asarray(bits, np.bool_)
    note = Note("xxh3_128:0", len(bits), runs_of(mask), "/a/b.safetensors", (3, 4))
    assert Note.from_json(note.to_json()) == note
    np.testing.assert_array_equal(note.mask(), mask)


@pytest.mark.parametrize("text", [None, "", "{}", '{"digest": 1}', 7])
def test_what_is_not_a_note_is_refused(text: Any) -> None:
    with pytest.raises(ReplayError, match="not a note"):
        Note.from_json(text)


def test_without_ray_nothing_is_announced_and_nothing_is_claimed() -> None:
    assert announce_trainer(engine="x") is False
    assert announced_trainers() is None


# Settings against veRL's configuration: the matrix of what cannot work


def config(**changes: Any) -> Any:
    tree = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"external_lib": None},
                "rollout": {"name": "vllm", "enable_rollout_routing_replay": True},
                "actor": {"strategy": "fsdp2", "megatron": {"router_replay": {"mode": "disabled"}}},
            }
        }
    )
    for key, value in changes.items():
        OmegaConf.update(tree, f"actor_rollout_ref.{key}", value)
    return tree


R3, VERL = Settings(), Settings(trainer="verl")
MEGATRON = {"actor.strategy": "megatron"}


@pytest.mark.parametrize(
    ("changes", "vendor", "settings", "match"),
    [
        ({"rollout.enable_rollout_routing_replay": False}, "r3", R3, "enable_rollout_routing_replay=True"),
        ({"rollout.name": "trtllm"}, "r3", R3, "returns no routes"),
        ({}, "", R3, "VERL_ENGINE_VENDOR=r3"),
        ({}, "nvidia", R3, r"VERL_ENGINE_VENDOR=nvidia"),
        ({"actor.strategy": "torchtitan"}, "r3", R3, "no engine for this trainer"),
        ({**MEGATRON, "actor.megatron.router_replay.mode": "R3"}, "r3", R3, "two would replay"),
        (MEGATRON, "", VERL, r"router_replay\.mode=R3"),
        ({}, "", VERL, "no replay for fsdp2"),
        (
            {**MEGATRON, "actor.megatron.router_replay.mode": "R3",
             "actor.megatron.override_transformer_config": {"moe_router_fusion": True}},
            "", VERL, "moe_router_fusion",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_key_to_set(
    changes: dict[str, Any], vendor: str, settings: Settings, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    with pytest.raises(ConfigError, match=match):
        check_config(config(**changes), settings)


@pytest.mark.parametrize(
    ("changes", "vendor", "settings"),
    [
        ({}, "r3", R3),
        (MEGATRON, "r3", R3),
        ({"model.external_lib": "r3.trainers.verl.plugin"}, "", R3),  # veRL 0.8
        ({**MEGATRON, "actor.megatron.router_replay.mode": "R3"}, "", VERL),
        ({}, "", Settings(trainer="none", store="/s")),  # shards for `r3 diagnose`, training as before
    ],
)
def test_what_works_is_let_through(
    changes: dict[str, Any], vendor: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_ENGINE_VENDOR", vendor)
    check_config(config(**changes), settings)


def test_settings_are_read_from_an_entry_and_contradictions_refused() -> None:
    entry = {"name": "x", "_target_": "y", "store": "/s", "keep_steps": 3, "max_turns": 4}
    assert settings_of(entry) == Settings(store="/s", carry="key", keep_steps=3)
    assert settings_of({}).carry == "batch"
    for misspelled in ("stroe", "keep_step", "polcy", "Store"):
        with pytest.raises(ConfigError, match=f"unknown setting '{misspelled}'"):
            settings_of({"store": "/s", misspelled: "x"})
    of_verl = ("trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls", "data_config", "tools")
    assert settings_of(dict.fromkeys(of_verl)) == Settings()
    for wrong in (
        {"carry": "key"},
        {"carry": "pigeon"},
        {"policy": "lax"},
        {"store": "/s", "trainer": "verl"},
        {"trainer": "none"},
    ):
        with pytest.raises(R3Error):
            Settings(**wrong)


def test_the_plug_in_is_light_and_silent_unless_it_is_asked_for() -> None:
    code = (
        "import sys, r3.trainers.verl.plugin as p; "
        "assert not {'torch', 'verl', 'ray'} & set(sys.modules), sys.modules.keys(); "
        "print(any(isinstance(f, p._AfterImport) for f in sys.meta_path))"
    )
    for vendor, waits in (("nvidia", "False"), ("r3", "True")):
        run = [sys.executable, "-c", code]
        out = subprocess.run(run, env={"VERL_ENGINE_VENDOR": vendor}, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == waits


def test_the_parts_for_tests_leave_the_environment_of_other_tests_alone() -> None:
    code = "import os; before = dict(os.environ); import verl_parts; assert dict(os.environ) == before"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)


def test_the_legs_routes_are_those_that_the_wire_would_decode() -> None:
    """The same checks as on the wire: what `r3.wire` makes of an engine's array is what the sample holds."""
    one = request(np.random.default_rng(6), [1, 2, 3], [10, 11])
    sample = make(output([1, 2, 3], [10, 11], [1, 1]), [one])
    assert sample.routes.equal(wire.routes_from_rows(one.routed_experts, SPEC, num_tokens=5))
