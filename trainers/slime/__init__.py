"""The trainer side of slime: hooks for its command line, so that no line of slime is changed. See docs/slime.md.

    --custom-megatron-init-path r3.trainers.slime.init                          always
    --custom-megatron-before-log-prob-hook-path r3.trainers.slime.before_log_prob       with r3_trainer: direct
    --custom-megatron-before-train-step-hook-path r3.trainers.slime.before_train_step   with r3_trainer: direct
    --rollout-data-postprocess-path r3.trainers.slime.kl_report                 the gap, every rollout; it wants log-probs:
    --get-mismatch-metrics --custom-tis-function-path r3.trainers.slime.no_correction

slime is looked up when a hook runs (`upstream`), never imported by this package.
"""

from __future__ import annotations

import os
from typing import Any

from r3.errors import ConfigError
from r3.rollout.slime.settings import Settings, require_routes_are_asked_for, require_unfused_router
from r3.trainers.slime import lazy
from r3.trainers.slime.kl import kl_report as kl_report
from r3.trainers.slime.kl import no_correction as no_correction
from r3.trainers.slime.upstream import SLIME_DIRECT, find

__all__ = ["before_log_prob", "before_train_step", "init", "kl_report", "no_correction"]

_ENABLED = "ENABLE_ROUTING_REPLAY"


def init(args: Any) -> None:
    """slime's Megatron init hook, before the model is built: prepare this rank's replay.

    Does nothing in a critic, which slime starts without ENABLE_ROUTING_REPLAY.

    Args:
        args: slime's arguments with the `r3_*` settings. With `r3_trainer: direct` slime's own replay is switched off in them.

    Raises:
        ConfigError: a setting or the flag is missing, the router is fused, or slime is not as it was read.
    """
    settings = Settings.from_args(args)
    require_routes_are_asked_for(args, "r3.trainers.slime.init")
    if not getattr(args, "use_routing_replay", False):
        raise ConfigError(
            "routing replay is on for the rollout and off for the trainer",
            where="r3.trainers.slime.init",
            expected="--use-rollout-routing-replay on the command line, which switches both on",
            got="use_rollout_routing_replay=True, use_routing_replay=False",
            remedy="a file of --custom-config-path is read after slime has derived the one from the other: take it out of there",
        )
    if os.environ.get(_ENABLED, "0") != "1":
        return
    require_unfused_router(args, "r3.trainers.slime.init")
    if settings.trainer == "lazy":
        if settings.routes == "full":
            return  # slime replays its own rows
        lazy.install()
        return
    find(SLIME_DIRECT)
    _require_hooks(args)
    os.environ[_ENABLED] = "0"  # read by slime's patch when a router is built and whenever it chooses
    args.use_routing_replay = args.use_rollout_routing_replay = False


def _require_hooks(args: Any) -> None:
    wanted = {
        "custom_megatron_before_log_prob_hook_path": "r3.trainers.slime.before_log_prob",
        "custom_megatron_before_train_step_hook_path": "r3.trainers.slime.before_train_step",
    }
    for name, path in wanted.items():
        if getattr(args, name, None) != path:
            raise ConfigError(
                "r3_trainer: direct needs both of its hooks: nothing would replay",
                where="r3.trainers.slime.init",
                expected=f"--{name.replace('_', '-')} {path}",
                got=getattr(args, name, None),
                remedy="pass both; a hook of your own can call r3's first",
            )


def __getattr__(name: str) -> Any:
    # Megatron is imported with these two alone.
    if name in ("before_log_prob", "before_train_step"):
        from r3.trainers.slime import direct

        return getattr(direct, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
