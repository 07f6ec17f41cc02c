"""settings: what an agent loop of r3 is told, and which combinations with veRL's configuration cannot work.

All of it is refused before the first request, by the name of the key that is wrong: a run that goes on without replay is the
failure that nobody notices.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, fields
from typing import Any, Literal

from r3.errors import ConfigError
from r3.handoff import announced_trainers
from r3.wire.checks import LENIENT, STRICT, Policy

_ROLLOUT = "actor_rollout_ref.rollout"
_PLUGIN = "r3.trainers.verl.plugin"


@dataclass(frozen=True)
class Settings:
    """The keys of an entry in the agent loops' YAML, beside `name` and `_target_`.

    Attributes:
        store: Directory (path or URL) of the run's shards, seen by rollout workers and trainers alike; "" writes none.
        carry: What goes into the batch: `key` (path or URL of the shard; needs a store) or `batch` (the routes). Default: `key`
            where there is a store.
        trainer: Who replays: `r3` (its engine, docs/verl.md), `verl` (veRL's own Megatron or VeOmni replay), or `none`: the
            shards are kept for `r3 diagnose`, and training goes on as before.
        policy: `strict` refuses a sample with a row that cannot be trusted, `lenient` leaves such rows unrecorded.
        keep_steps: Step directories to keep in the store; 0 keeps all.
        fsync: As in `r3.shard.save_file`.

    Raises:
        ConfigError: a value that is none of these.
    """

    store: str = ""
    carry: Literal["key", "batch", ""] = ""
    trainer: Literal["r3", "verl", "none"] = "r3"
    policy: Literal["strict", "lenient"] = "strict"
    keep_steps: int = 0
    fsync: bool = True

    def __post_init__(self) -> None:
        if not self.carry:
            object.__setattr__(self, "carry", "key" if self.store else "batch")
        choices = {"carry": ("key", "batch"), "trainer": ("r3", "verl", "none"), "policy": ("strict", "lenient")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} has no such value",
                    where="agent loops of r3",
                    expected=" or ".join(allowed),
                    got=getattr(self, name),
                )
        if self.carry == "key" and not self.store:
            raise ConfigError(
                "a key can only travel if there is a shard behind it",
                where="agent loops of r3",
                expected="store: a directory that rollout workers and trainers see",
                got="no store",
            )
        if self.trainer == "none" and self.carry != "key":
            raise ConfigError(
                "with no trainer to replay and no store there is nothing to do",
                where="agent loops of r3",
                expected="store: a directory",
                got=f"store: {self.store or '(none)'}, carry: {self.carry}",
            )
        if self.trainer == "verl" and self.carry == "key":
            raise ConfigError(
                "veRL's own replay needs the routes in the batch",
                where="agent loops of r3",
                expected="carry: batch",
                got="carry: key",
            )

    @property
    def wire_policy(self) -> Policy:
        return STRICT if self.policy == "strict" else LENIENT


def settings_of(entry: Any) -> Settings:
    """The settings in an entry of the agent loops' YAML, beside the keys of the loop itself.

    Raises:
        ConfigError: a value that is none of the allowed, or a misspelled key: veRL's loops take any key and say nothing.
    """
    known = [field.name for field in fields(Settings)]
    for key in entry:
        meant = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if meant and key not in known:
            raise ConfigError(f"unknown setting {key!r}", where="agent loops of r3", expected=meant[0], got=key)
    return Settings(**{name: entry[name] for name in known if name in entry})


def check_config(config: Any, settings: Settings) -> None:
    """Refuse what cannot work, by veRL's configuration (an OmegaConf of the whole) and this process's environment.

    Raises:
        ConfigError: naming the key, and what to write.
    """
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if not rollout.get("enable_rollout_routing_replay", False):
        raise ConfigError(
            "the rollout engine is not asked for routes",
            where=f"{_ROLLOUT}.enable_rollout_routing_replay",
            expected=True,
            got=rollout.get("enable_rollout_routing_replay", None),
            remedy=f"{_ROLLOUT}.enable_rollout_routing_replay=True",
        )
    if rollout.name not in ("vllm", "sglang"):
        raise ConfigError(
            "this rollout engine returns no routes in veRL",
            where=f"{_ROLLOUT}.name",
            expected="vllm or sglang",
            got=rollout.name,
        )
    mode = _replay_mode(actor)
    if settings.trainer == "r3":
        _check_r3(config, actor, mode)
    elif settings.trainer == "verl":
        _check_verl(actor, mode)


def _check_r3(config: Any, actor: Any, mode: str) -> None:
    if actor.strategy not in ("fsdp", "fsdp2", "megatron"):
        raise ConfigError(
            "r3 has no engine for this trainer",
            where="actor_rollout_ref.actor.strategy",
            expected="fsdp, fsdp2 or megatron (with trainer: verl in the agent loops' YAML also veomni)",
            got=actor.strategy,
        )
    if mode != "disabled":
        raise ConfigError(
            "two would replay: veRL's own router replay and r3's engine",
            where=f"actor_rollout_ref.actor.{actor.strategy}.router_replay.mode",
            expected="disabled, or trainer: verl in the agent loops' YAML",
            got=mode,
        )
    libraries = config.actor_rollout_ref.model.get("external_lib", None) or []
    libraries = [libraries] if isinstance(libraries, str) else list(libraries)
    if os.environ.get("VERL_ENGINE_VENDOR") != "r3" and _PLUGIN not in libraries:
        raise ConfigError(
            "veRL was not told to use r3's engine: its own would train without replay",
            where="environment of the Ray job",
            expected="VERL_ENGINE_VENDOR=r3 (veRL 0.9 and later), "
            f"or actor_rollout_ref.model.external_lib={_PLUGIN} (0.8)",
            got=f"VERL_ENGINE_VENDOR={os.environ.get('VERL_ENGINE_VENDOR', '(unset)')}, external_lib={libraries or None}",
            remedy="+ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR=r3",
        )


def _check_verl(actor: Any, mode: str) -> None:
    if mode == "R3" and not _router_fusion(actor):
        return
    if mode == "R3":
        raise ConfigError(
            "Megatron's fused router returns before the replay: it would silently do nothing",
            where="actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_fusion",
            expected=False,
            got=True,
        )
    replays = actor.strategy in ("megatron", "veomni")
    where = f"actor_rollout_ref.actor.{actor.strategy}.router_replay.mode" if replays else "actor_rollout_ref.actor"
    raise ConfigError(
        "veRL's own engine would not replay" + ("" if replays else f": it has no replay for {actor.strategy}"),
        where=where,
        expected="R3" if replays else "strategy megatron or veomni, or r3's engine (trainer: r3)",
        got=mode if replays else f"strategy {actor.strategy}",
        remedy=f"{where}=R3" if replays else "take out trainer: verl, and set VERL_ENGINE_VENDOR=r3",
    )


def _replay_mode(actor: Any) -> str:
    section = actor.get(actor.strategy, None)
    replay = None if section is None else section.get("router_replay", None)
    return "disabled" if replay is None else str(replay.get("mode", "disabled"))


def _router_fusion(actor: Any) -> bool:
    override = (actor.get("megatron", None) or {}).get("override_transformer_config", None) or {}
    return bool(override.get("moe_router_fusion", False))


def require_trainer() -> None:
    """Refuse to sample for a trainer that does not replay. Does nothing where no Ray job runs.

    Raises:
        ConfigError: no engine of r3 has announced itself.
    """
    trainers = announced_trainers()
    if trainers is not None and not trainers:
        raise ConfigError(
            "r3 was asked for, and no engine of r3 is in this job: veRL's own would train without replay",
            where="trainers of this Ray job",
            expected="an actor engine that announced itself when it was initialized",
            got="none",
            remedy="the plug-in did not load in the trainer's processes: VERL_ENGINE_VENDOR=r3 must be in their environment "
            f"(runtime_env), VERL_USE_EXTERNAL_PLUGINS must not leave r3 out, and `python -c 'import {_PLUGIN}'` "
            "must work there",
        )
