"""loops: veRL's single-turn and tool loops, with their routes checked, stored and handed on.

Each class is veRL's own loop with one method around it: `run` calls veRL's `run`, then makes a sample of the requests that it
made (`r3.rollout.verl.legs`), writes its shard, and leaves either the path of the shard or the routes in the output, with a
note (`r3.handoff`) in `extra_fields` that the trainer's engine reads. A loop of one's own does the same with

    class MyLoop(ReplayLoopMixin, TheirLoop): ...

Contract: an output goes on with routes that were checked, or the sample fails loudly. Samples of a validation are left as they
are, without routes: nobody trains on them.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import uuid
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop as _SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop as _ToolAgentLoop

from r3.errors import ConfigError
from r3.handoff import NOTE, Note
from r3.rollout.verl.legs import Request, dense_rows, sample_of, tapped
from r3.rollout.verl.settings import Settings, check_config, require_trainer, settings_of
from r3.routes import runs_of
from r3.sample import UNKNOWN_VERSION, Provenance, RolloutSample
from r3.shard.files import is_url
from r3.spec import RoutingSpec
from r3.store import ShardStore


class ReplayLoopMixin:
    """Stands before an `AgentLoopBase` subclass whose `run` returns one AgentLoopOutput.

    Keyword arguments are those of `Settings`; the others go to the loop.

    Raises:
        ConfigError: on construction, a configuration that cannot work; on the first `run`, a trainer that does not replay, or
            a loop that returns a list of outputs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.settings = settings_of(kwargs)
        super().__init__(*args, **{k: v for k, v in kwargs.items() if k not in Settings.__dataclass_fields__})
        loop: Any = self  # what AgentLoopBase has set
        check_config(loop.config, self.settings)
        self._requests: list[Request] = []
        loop.server_manager = tapped(loop.server_manager, self._requests)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        if self.settings.trainer == "r3":
            require_trainer_once()
        sampling = dict(sampling_params)  # a server may change the dict
        loop: Any = super()
        output = await loop.run(sampling_params, **kwargs)
        if isinstance(output, list):
            raise ConfigError(
                "this loop returns several outputs, and which request belongs to which cannot be told",
                where=type(self).__qualname__,
                expected="one AgentLoopOutput",
                got=f"a list of {len(output)}",
                remedy="let the loop return one output, or leave r3 out of it (and VERL_ENGINE_VENDOR unset)",
            )
        if _is_validation(self, sampling):
            output.routed_experts = None
            return output
        # A response of 16,000 tokens takes tens of milliseconds: not on the loop that feeds the engine.
        output.routed_experts, note = await asyncio.to_thread(self._keep, output, sampling, kwargs)
        output.extra_fields[NOTE] = note.to_json()
        return output

    def _keep(self, output: Any, sampling: dict[str, Any], kwargs: dict[str, Any]) -> tuple[Any, Note]:
        """Check, store; what the batch carries of the routes, and the note."""
        sample = self._sample(output, sampling, kwargs)
        key = self._write(sample, kwargs) if self.settings.store else ""
        carry_key = self.settings.carry == "key"
        note = Note(
            digest=sample.token_digest,
            num_tokens=sample.num_tokens,
            recorded=runs_of(sample.routes.recorded),
            shard=key if carry_key else "",
            weight_versions=_versions(sample),
        )
        return None if carry_key else dense_rows(sample, may_have_holes=self.settings.trainer != "verl"), note

    def _sample(self, output: Any, sampling: dict[str, Any], kwargs: dict[str, Any]) -> RolloutSample:
        loop: Any = self
        model, rollout = loop.config.actor_rollout_ref.model, loop.config.actor_rollout_ref.rollout
        uid = str(kwargs.get("uid", "") or uuid.uuid4().hex)
        session = kwargs.get("session_id")
        # A prompt may be sampled again after a failure or a resume: the suffix keeps the two apart.
        name = [uid] + ([] if session is None else [str(int(session))]) + [uuid.uuid4().hex[:8]]
        return sample_of(
            output,
            self._requests,
            spec_of(str(model.path), bool(model.get("trust_remote_code", False))),
            sample_id=".".join(name),
            group_id=uid,
            policy=self.settings.wire_policy,
            provenance=Provenance(
                engine=str(rollout.name),
                engine_version=_version_of(str(rollout.name)),
                model=str(model.path),
                temperature=float(sampling.get("temperature", 1.0)),
                top_p=float(sampling.get("top_p", 1.0)),
                top_k=max(0, int(sampling.get("top_k", 0))),  # -1 is "off" as well
                logprobs_mode=str(rollout.get("logprobs_mode", "")),
                finish_reason=self._requests[-1].stop_reason if self._requests else "",
                extra={"framework": f"verl {importlib.metadata.version('verl')}", "turns": str(len(self._requests))},
            ),
        )

    def _write(self, sample: RolloutSample, kwargs: dict[str, Any]) -> str:
        step = kwargs.get("global_steps")
        step = max(_versions(sample)[1], 0) if step is None else int(step)
        place = self.settings.store
        run = ShardStore(place if is_url(place) else Path(place).absolute(), create=True)
        if self.settings.keep_steps and not run.has_step(step):
            run.step(step, create=True)
            run.keep_steps(self.settings.keep_steps, newest=step)
        store = run.step(step, create=True)
        store.add(sample, fsync=self.settings.fsync)
        return store.key_of(sample.sample_id)


class SingleTurnAgentLoop(ReplayLoopMixin, _SingleTurnAgentLoop):  # type: ignore[misc]
    """veRL's `single_turn_agent` with routes."""


class ToolAgentLoop(ReplayLoopMixin, _ToolAgentLoop):  # type: ignore[misc]
    """veRL's `tool_agent` with routes: each turn's rows are those of the request that sampled from them."""


@functools.cache
def require_trainer_once() -> None:
    """`require_trainer`, asked once in this process: the trainers are initialized before the loops start."""
    require_trainer()


@functools.cache
def spec_of(path: str, trust_remote_code: bool) -> RoutingSpec:
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    return RoutingSpec.from_config(AutoConfig.from_pretrained(copy_to_local(path), trust_remote_code=trust_remote_code))


@functools.cache
def _version_of(engine: str) -> str:
    for name in (engine, f"{engine}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _versions(sample: RolloutSample) -> tuple[int, int]:
    known = sample.weight_version[sample.weight_version != UNKNOWN_VERSION]
    return (int(known.min()), int(known.max())) if len(known) else (UNKNOWN_VERSION, UNKNOWN_VERSION)


def _is_validation(loop: Any, sampling: dict[str, Any]) -> bool:
    """veRL does not tell a loop that it validates; the sampling parameters of a validation do, where they are its own."""
    rollout = loop.config.actor_rollout_ref.rollout
    names = ("temperature", "top_p", "top_k")
    asked = tuple(sampling.get(name) for name in names)
    return asked != tuple(rollout.get(n) for n in names) and asked == tuple(rollout.val_kwargs.get(n) for n in names)
