"""Options of slime and miles that decide whether routing replay happens, from a YAML file or the script that starts them."""

from __future__ import annotations

from r3.doctor import engine as engines
from r3.doctor import megatron
from r3.doctor.checks import Check, Settings, green, red, yellow
from r3.doctor.engine import Engine
from r3.spec import RoutingSpec

_SGLANG = "sglang_"


def replay_flag(s: Settings) -> Check:
    if s.on("use_rollout_routing_replay"):
        return green("routing replay", "--use-rollout-routing-replay: the engine's routes (R3)")
    if s.on("use_routing_replay"):
        return yellow(
            "routing replay",
            "--use-routing-replay alone is R2: the trainer's own record. It leaves the gap to the rollout engine",
            "--use-rollout-routing-replay",
        )
    return red("routing replay", "off: nothing is recorded or replayed", "--use-rollout-routing-replay")


def mtp(s: Settings) -> Check | None:
    """slime registers every router that is built, those of MTP layers too (slime 1556)."""
    if not (s.on("enable_mtp_training") or s.number("mtp_num_layers")):
        return None
    if s.get("r3_trainer") == "direct":
        return green(
            "multi-token prediction", "MTP layers, and r3 drives (r3_trainer: direct): it leaves their routers alone"
        )
    return red(
        "multi-token prediction",
        "with MTP layers slime's own replay counts too many routers and stops",
        "r3_trainer: direct in --custom-config-path, or train without MTP",
    )


def recompute(s: Settings) -> Check | None:
    """slime's cursors are right if each MoE layer is recomputed once, or never."""
    if s.get("recompute_granularity") is None or s.get("r3_trainer") == "direct":
        return None
    full, layers = s.get("recompute_granularity") == "full", s.number("recompute_num_layers")
    if full and s.get("recompute_method") == "block":
        return red(
            "recompute",
            f"block recompute of {layers or 1:.0f} layers: slime's replay reads its rows in order, forward and recompute, "
            "which holds only if every MoE layer is recomputed",
            "--recompute-method uniform, or r3_trainer: direct",
        )
    return green("recompute", str(s.get("recompute_granularity")))


def sampling(s: Settings) -> Check:
    top_p, top_k = s.number("rollout_top_p"), s.number("rollout_top_k")
    if (top_p is not None and top_p < 1) or (top_k is not None and top_k > 0):
        return yellow(
            "sampling",
            "top-p or top-k: sampled tokens are not draws of the policy that is trained, and engines may renormalise log-probs",
            "--rollout-top-p 1 --rollout-top-k -1",
        )
    return green("sampling", "of the whole distribution")


CHECKS = (replay_flag, mtp, recompute, sampling)


def examine(settings: Settings, spec: RoutingSpec | None) -> list[Check]:
    found = [one for check in CHECKS if (one := check(settings)) is not None]
    found += [one for one in megatron.examine(settings, spec) if one.name != "multi-token prediction"]
    arguments = Settings(
        {key.rsplit(".", 1)[-1].removeprefix(_SGLANG): value for key, value in settings.flat.items() if _SGLANG in key},
        settings.where,
    )
    engine = Engine(arguments, "sglang", "")
    engine_checks = (
        engines.parallelism,
        engines.prefix_cache,
        engines.speculative,
        engines.kernel,
        engines.expert_placement,
    )
    return found + engines.problems(engine, engine_checks)


def tokens_per_step(s: Settings) -> int | None:
    prompts, response = s.number("rollout_batch_size"), s.number("rollout_max_response_len")
    if prompts is None or response is None:
        return None
    samples = s.number("n_samples_per_prompt") or 1
    return int(prompts * samples * (response + (s.number("rollout_max_prompt_len") or 0)))
