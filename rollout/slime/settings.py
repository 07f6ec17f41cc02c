"""settings: what r3 is told by the user of slime or miles, and what it reads of the framework's own arguments.

Both frameworks load any key of the file named by `--custom-config-path` into their argument namespace, which travels with every
Ray actor. So r3 has no file, environment variable or option of its own: its settings are the keys of that file that begin with
`r3_`, and rollout and trainer cannot see different ones. A key that r3 does not know is refused: it would have no effect.

The arguments are read as plain attributes; neither framework is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Literal

from r3.errors import ConfigError
from r3.spec import RoutingSpec
from r3.wire.checks import LENIENT, STRICT, Policy

_PREFIX = "r3_"
_CHOICES = {"routes": ("key", "full"), "trainer": ("lazy", "direct"), "policy": ("strict", "lenient")}


@dataclass(frozen=True)
class Settings:
    """The `r3_*` keys.

    Attributes:
        store: Directory or URL of the shards, which the rollout manager and every trainer rank see.
        routes: What stays in the sample for the way to the trainer: `key` (some hundred bytes that name the shard) or `full`
            (the framework's own int32 rows; needed when its own replay shall run).
        trainer: slime alone: how the trainer replays. `lazy`: slime's routing replay, its rows read from the shards layer by
            layer; `direct`: r3's own override of Megatron's routers, slime's is switched off.
        evaluation: Write shards of evaluation samples too.
        keep_steps: Rollout steps whose shards are kept; 0 keeps all. At least 2 with asynchronous training or partial rollouts.
        fsync: As in `r3.shard.save_file`. Off: a crash of the machine loses samples that the run would sample again anyway.
        policy: `strict` refuses a sample with damaged rows, which ends the run; `lenient` marks such rows unrecorded.
        generate: Dotted path of the generate function that `r3.rollout.slime.generate` calls; "" for the framework's own.
    """

    store: str
    routes: Literal["key", "full"] = "key"
    trainer: Literal["lazy", "direct"] = "lazy"
    evaluation: bool = False
    keep_steps: int = 0
    fsync: bool = False
    policy: Literal["strict", "lenient"] = "strict"
    generate: str = ""

    @classmethod
    def from_args(cls, args: Any) -> Settings:
        """Read them from the framework's arguments.

        Raises:
            ConfigError: no store, an unknown key, or a value that is none of the allowed.
        """
        known = {each.name: each for each in fields(cls)}
        given = {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(
                f"unknown settings {[_PREFIX + name for name in unknown]}",
                where="--custom-config-path",
                expected=[_PREFIX + name for name in known],
                remedy="correct the name: a setting that is not known would have no effect",
            )
        if not given.get("store"):
            raise ConfigError(
                "r3 is not told where its shards are",
                where="--custom-config-path",
                expected="r3_store: a directory that the rollout manager and every trainer rank see",
                remedy="start from configs/slime/r3.yaml or configs/miles/r3.yaml and pass the file with --custom-config-path",
            )
        for name, value in given.items():
            _require_valid(name, value)
        return cls(**{**given, "store": str(given["store"])})

    @property
    def wire_policy(self) -> Policy:
        return STRICT if self.policy == "strict" else LENIENT


def _require_valid(name: str, value: Any) -> None:
    wanted: dict[str, tuple[type, str]] = {
        "evaluation": (bool, "true or false"),
        "fsync": (bool, "true or false"),
        "generate": (str, "a dotted path"),
    }
    kind, expected = wanted.get(name, (object, ""))
    if name in _CHOICES:
        valid, expected = value in _CHOICES[name], " or ".join(_CHOICES[name])
    elif name == "keep_steps":
        valid, expected = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "an integer from 0"
    else:
        valid = isinstance(value, kind)
    if not valid:
        raise ConfigError(
            f"no such value of {_PREFIX}{name}", where="--custom-config-path", expected=expected, got=value
        )


def spec_of(args: Any) -> RoutingSpec:
    """The routing of the model, from the Megatron arguments if they are there, else from `hf_checkpoint` (miles with FSDP).

    Raises:
        SpecError: neither says how the model routes.
    """
    if getattr(args, "num_experts", None):
        return RoutingSpec.from_config(
            SimpleNamespace(
                num_layers=args.num_layers,
                num_moe_experts=args.num_experts,
                moe_router_topk=args.moe_router_topk,
                moe_layer_freq=getattr(args, "moe_layer_freq", 1),
            )
        )
    return _spec_of_checkpoint(str(args.hf_checkpoint))


@lru_cache(maxsize=4)
def _spec_of_checkpoint(path: str) -> RoutingSpec:
    return RoutingSpec.from_config(path)


def require_routes_are_asked_for(args: Any, hook: str) -> None:
    """Raise unless the engine is asked for routes.

    Raises:
        ConfigError: the flag is missing.
    """
    if not getattr(args, "use_rollout_routing_replay", False):
        raise ConfigError(
            "the rollout engine is not asked for routes",
            where=hook,
            expected="--use-rollout-routing-replay on the command line: it starts SGLang with --enable-return-routed-experts and "
            "asks for routes with every request",
            got="use_rollout_routing_replay=False",
            remedy="add --use-rollout-routing-replay, or take r3's hooks out of the command line",
        )


def require_unfused_router(args: Any, hook: str) -> None:
    """Raise if the trainer's router is fused.

    Raises:
        ConfigError: it is.
    """
    if getattr(args, "moe_router_fusion", False):
        raise ConfigError(
            "the fused router chooses experts inside its kernel: replay would silently do nothing",
            where=hook,
            expected="moe_router_fusion=False",
            got="moe_router_fusion=True",
            remedy="take --moe-router-fusion out of the model arguments",
        )
