"""veRL on a CPU for tests: its platform, its whole configuration composed, and a server handle for its LLM client.

veRL, which takes seconds, is imported when it is first needed, and only inside `environment()`: it reads its environment then.
A test module has `pytestmark = pytest.mark.usefixtures("verl_environment")`, and other modules nothing of it.

What is veRL's own: the agent-loop worker, its loops, its clients, the batches, the workers and their engines. What stands in: the
server actor (veRL's `vLLMHttpServer` is a Ray actor around an in-process engine), of which only `generate.remote(...)` is spoken,
to the real vLLM server of the session over HTTP. (tests/test_verl_main.py has the actor itself.)
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from omegaconf import OmegaConf

if TYPE_CHECKING:
    from verl import DataProto
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

_VERL = importlib.util.find_spec("verl")
assert _VERL is not None
assert _VERL.origin is not None
CONFIG_DIR = str(Path(_VERL.origin).parent / "trainer" / "config")
PROMPT_LENGTH, RESPONSE_LENGTH = 256, 48
ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "r3.trainers.verl.cpu", "VERL_ENGINE_VENDOR": "r3"}


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """veRL on its CPU platform with r3's engines, in this process and those that it starts; afterwards as it was before."""
    before = dict(os.environ)
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in before})
    if "verl" in sys.modules:  # another test has imported it, and it has looked for an accelerator
        from verl.plugin.platform import platform_manager

        from r3.trainers.verl.cpu import PlatformCPU

        platform_manager._current_platform = PlatformCPU()
    try:
        yield
    finally:
        for name in ENVIRONMENT.keys() - before.keys():
            os.environ.pop(name, None)


def compose(model: Path, *overrides: str, name: str = "ppo_trainer") -> Any:
    """veRL's whole configuration for the tiny model on this machine, with overrides on top."""
    fsdp = [
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile=False",
    ]
    base = [
        *(fsdp if name == "ppo_trainer" else []),
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"actor_rollout_ref.rollout.prompt_length={PROMPT_LENGTH}",
        f"actor_rollout_ref.rollout.response_length={RESPONSE_LENGTH}",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
        f"data.max_prompt_length={PROMPT_LENGTH}",
        f"data.max_response_length={RESPONSE_LENGTH}",
        "trainer.device=cpu",
    ]
    import hydra

    with hydra.initialize_config_dir(config_dir=CONFIG_DIR, version_base=None):
        config = hydra.compose(config_name=name, overrides=[*base, *overrides])
    OmegaConf.resolve(config)
    return config


class HttpServer:
    """The handle of a server actor, as veRL's client uses it: `await handle.generate.remote(...)`.

    Args:
        model: The name under which the servers serve.
        urls: The vLLM server of each request in turn, the last one for all further; likewise
        versions: its `global_steps`.
        cuts: Request number -> number of tokens after which it is "aborted", as by a weight update.
        most: Tokens of a response at most.
    """

    def __init__(
        self,
        model: str,
        urls: Sequence[str],
        versions: Sequence[int] = (3,),
        *,
        cuts: dict[int, int] | None = None,
        most: int = RESPONSE_LENGTH,
    ) -> None:
        self.model, self.urls, self.versions = model, list(urls), list(versions)
        self.cuts, self.most = dict(cuts or {}), most
        self.asked: list[list[int]] = []
        self.answered: list[TokenOutput] = []

    @property
    def generate(self) -> HttpServer:
        return self

    async def remote(self, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        from verl.workers.rollout.replica import TokenOutput

        number = len(self.asked)
        self.asked.append(list(prompt_ids))
        cut = self.cuts.get(number)
        limit = min(int(sampling_params.get("max_tokens", self.most)), self.most)
        body = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": limit if cut is None else min(cut, limit),
            "temperature": sampling_params["temperature"],
            "top_p": sampling_params["top_p"],
            "seed": number,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
        }
        url = self.urls[min(number, len(self.urls) - 1)]
        async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            choice = (await response.json())["choices"][0]
        routes = choice["routed_experts"]
        output = TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=choice["logprobs"]["token_logprobs"] if sampling_params.get("logprobs") else None,
            routed_experts=None if routes is None else np.load(io.BytesIO(base64.b64decode(routes))),
            stop_reason="completed" if cut is None else "aborted",
            num_preempted=0,
            extra_fields={
                "global_steps": self.versions[min(number, len(self.versions) - 1)],
                "num_cached_tokens": None,
            },
        )
        self.answered.append(output)
        return output


def client(config: Any, server: Any, *, resuming: bool = False) -> LLMServerClient:
    """veRL's own client, which asks `server` in place of a load balancer for a server."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

    base = FullyAsyncLLMServerClient if resuming else LLMServerClient

    class Client(base):  # type: ignore[misc,valid-type]
        async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:  # noqa: ARG002
            return "server", server

        def _release_server(self, server_id: str, request_id: str | None = None) -> None:
            pass

    return Client(config)


def generate(
    config: Any, server: HttpServer, prompts: Sequence[str], *, resuming: bool = False, **meta: Any
) -> DataProto:
    """What veRL's agent-loop worker makes of some prompts: the batch of its trainer."""
    from verl import DataProto
    from verl.experimental.agent_loop import AgentLoopWorker

    batch = DataProto.from_dict(
        non_tensors={
            "raw_prompt": np.array([[{"role": "user", "content": text}] for text in prompts], dtype=object),
            "uid": np.array([f"prompt{i}" for i in range(len(prompts))], dtype=object),
        },
        meta_info={"global_steps": 3, **meta},
    )

    async def work() -> DataProto:
        worker = AgentLoopWorker(config, client(config, server, resuming=resuming))
        return await worker.generate_sequences(batch)

    return asyncio.run(work())


def loops(path: Path, **settings: Any) -> str:
    """The override that puts r3's loops in the places of veRL's, with these settings."""
    targets = {"single_turn_agent": "SingleTurnAgentLoop", "tool_agent": "ToolAgentLoop"}
    entries = [{"name": name, "_target_": f"r3.rollout.verl.{kind}", **settings} for name, kind in targets.items()]
    OmegaConf.save(OmegaConf.create(entries), path)
    return f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}"
