"""Which trainer a configuration is of, and the checks that all trainers share."""

from __future__ import annotations

from r3.doctor import megatron, slime, verl
from r3.doctor.checks import Check, Settings
from r3.errors import ConfigError
from r3.spec import RoutingSpec


def kind_of(settings: Settings) -> str:
    """`verl`, `slime` or `megatron`.

    Raises:
        ConfigError: nothing in it is of one of these.
    """
    names = [key.rsplit(".", 1)[-1] for key in settings.flat]
    if any(key.startswith("actor_rollout_ref.") for key in settings.flat):
        return "verl"
    if any(
        name.startswith(("sglang_", "use_rollout_routing", "use_routing_replay", "rollout_num_gpus")) for name in names
    ):
        return "slime"
    if any(name.startswith("moe_") or name in ("num_experts", "num_moe_experts") for name in names):
        return "megatron"
    raise ConfigError(
        "not a configuration that the doctor knows",
        where=settings.where,
        expected="veRL (actor_rollout_ref...), slime or miles (--use-rollout-routing-replay...), or Megatron (moe_...)",
        got=", ".join(list(settings.flat)[:8]),
        remedy="a trainer of your own in transformers or FSDP has nothing to check here: use --model",
    )


def examine(settings: Settings, spec: RoutingSpec | None) -> list[Check]:
    """All checks of one trainer configuration; raises ConfigError where it is of no known trainer."""
    kind = kind_of(settings)
    if kind == "verl":
        return verl.examine(settings, spec)
    if kind == "slime":
        return slime.examine(settings, spec)
    return megatron.examine(settings, spec)


def tokens_per_step(settings: Settings) -> int | None:
    """Tokens of one training step at full length, where the configuration says enough."""
    if kind_of(settings) == "verl":
        return verl.tokens_per_step(settings)
    if kind_of(settings) == "slime":
        return slime.tokens_per_step(settings)
    return None
