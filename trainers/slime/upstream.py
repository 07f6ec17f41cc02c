"""upstream: the parts of slime that r3 uses in the trainer, looked up late and checked by capability.

slime has no releases that its users pin; they build an image of some commit. So nothing here asks for a version: each name
that is used is looked up when the hook runs, with the parameters by which it is called, and a difference is one message that
says what was found, what is expected and which commit was read. Contract: nothing of slime is changed before all of it is
found.

    READ     the commit whose source these expectations were read from, see docs/slime.md
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from r3.errors import ConfigError

READ = {"slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515", "miles": "31f1ca961a94cb860cec3b2dea34ec332bfa8f76"}


@dataclass(frozen=True)
class Need:
    """A name that is used: `module` and dotted `name` in it, and the parameters by which it is called (None: any).

    `older` is the module in which earlier commits have it.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    older: str = ""


SLIME_LAZY = (
    Need("slime.backends.megatron_utils.actor", "MegatronTrainRayActor"),
    Need(
        "slime.backends.megatron_utils.actor",
        "MegatronTrainRayActor.fill_routing_replay",
        ("self", "data_iterator", "num_microbatches", "rollout_data"),
    ),
    Need(
        "slime.backends.megatron_utils.cp_utils",
        "prepare_routed_experts_for_routing_replay",
        (
            "rollout_routed_experts",
            "tokens",
            "num_experts",
            "data_pad_size_multiplier",
            "sequence_parallel",
            "allgather_cp",
        ),
    ),
    Need("slime.utils.routing_replay", "RoutingReplay"),
    Need("slime.utils.routing_replay", "RoutingReplay.all_routing_replays"),
    Need("slime.utils.routing_replay", "RoutingReplay.record", ("self", "top_indices")),
    Need("slime.utils.routing_replay", "RoutingReplay.pop_forward", ("self",)),
    Need("slime.utils.routing_replay", "RoutingReplay.pop_backward", ("self",)),
    Need("slime.utils.routing_replay", "RoutingReplay.register_lazy_resource", ("resource",)),
    Need("slime.utils.accelerator", "current_device", (), older="torch.cuda"),
)
SLIME_DIRECT = (
    Need(
        "slime.backends.megatron_utils.model",
        "get_batch",
        ("data_iterator", "keys", "pad_multiplier", "allgather_cp"),
    ),
    Need("slime.backends.megatron_utils.cp_utils", "slice_with_cp", ("tokens", "pad_value")),
    Need("slime.backends.megatron_utils.cp_utils", "mpu.get_context_parallel_world_size"),
    Need("slime.backends.megatron_utils.cp_utils", "mpu.get_context_parallel_rank"),
    Need("slime.backends.megatron_utils.cp_utils", "mpu.get_tensor_model_parallel_world_size"),
    Need("slime.backends.megatron_utils.data", "DataIterator.get_next", ("self", "keys")),
)
SLIME_KL = (
    Need(
        "slime.backends.megatron_utils.cp_utils",
        "get_logits_and_tokens_offset_with_cp",
        ("total_length", "response_length"),
    ),
    Need("slime.backends.megatron_utils.cp_utils", "mpu.is_pipeline_last_stage"),
    Need("slime.backends.megatron_utils.cp_utils", "mpu.get_tensor_model_parallel_rank"),
    Need("slime.backends.megatron_utils.cp_utils", "mpu.get_context_parallel_world_size"),
    Need(
        "slime.observability.train_metric_utils",
        "gather_log_data",
        ("metric_name", "args", "rollout_id", "log_dict"),
        older="slime.backends.megatron_utils.data",
    ),
)


def find(needs: Sequence[Need], framework: str = "slime") -> dict[str, Any]:
    """All of these, by their name.

    Raises:
        ConfigError: one is absent, or is called by other parameters.
    """
    return {need.name: _find(need, framework) for need in needs}


def _find(need: Need, framework: str) -> Any:
    where = f"{need.module}.{need.name}"
    try:
        found = _look_up(need.module, need.name)
    except (ImportError, AttributeError) as error:
        try:
            found = _look_up(need.older, need.name) if need.older else None
        except (ImportError, AttributeError):
            found = None
        if found is None:
            raise _moved(framework, where, "to be there", f"{type(error).__name__}: {error}") from error
    if need.parameters is not None:
        parameters = tuple(inspect.signature(found).parameters)
        if parameters[: len(need.parameters)] != need.parameters:
            raise _moved(framework, where, f"({', '.join(need.parameters)})", f"({', '.join(parameters)})")
        surplus = list(inspect.signature(found).parameters.values())[len(need.parameters) :]
        if any(
            each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in surplus
        ):
            raise _moved(framework, where, f"({', '.join(need.parameters)})", f"({', '.join(parameters)})")
    return found


def _look_up(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _moved(framework: str, where: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        f"this {framework} is not as r3 knows it",
        where=where,
        expected=f"{expected}, as in commit {READ[framework][:8]}",
        got=got,
        remedy=f"docs/{framework}.md has the table of commits; without r3's trainer hooks (and with r3_routes: full) the "
        "framework's own replay still works",
    )
