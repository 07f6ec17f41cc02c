"""fill: miles' replay lists, with rows that are read from the shards when a router asks for them.

miles fills the lists of its replay managers by one function, `fill_replay_data`, for Megatron and FSDP alike: every rank holds
the int32 rows of all layers of all its samples, cuts them, and pins its part. r3 puts a function of the same name before it,
which hands the original *row numbers* in place of routes, catches what it makes of them (padding, zigzag or all-gather context
parallelism, thd or bshd, sequence parallelism), and puts a `LayerRows` of shard and row numbers into each list. Other data
(the indexer's) goes to the original.

miles' lists hold tensors, of which a router calls `.to(device)`; that is where `LayerRows` reads.

Contract: as in `r3.trainers.slime.lazy`. miles has no place for a resource that is told when a rollout ends, so rows that
nobody asked for are found when the next rollout is filled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from r3.errors import ConfigError
from r3.rollout.slime.settings import Settings, spec_of
from r3.spec import RoutingSpec
from r3.trainers.slime.finding import Shards, bound_replays
from r3.trainers.slime.lazy import FIELD, Filled, host_tokens, require_found
from r3.trainers.slime.rows import ChunkRows, LayerRows, ShardRows
from r3.trainers.slime.upstream import Need, find

HOOK = "--custom-generate-function-path r3.rollout.miles.generate"
_PARAMETERS = (
    "args",
    "models",
    "data_iterator",
    "num_microbatches",
    "rollout_data",
    "data_key",
    "replay_list",
    "register_replay_list_func",
    "if_sp_region",
    "indices_are_token_positions",
)
_NEEDS = (
    Need("miles.utils.replay_base", "routing_replay_manager"),
    Need("miles.utils.replay_base", "Replay.pop_forward", ("self",)),
    Need("miles.utils.replay_base", "Replay.pop_backward", ("self",)),
    Need("miles.backends.training_utils.replay_data", "fill_replay_data", _PARAMETERS),
)


def install(module_name: str) -> Callable[[], None]:
    """Put r3's function into a module of miles that calls `fill_replay_data`; returns what takes it out again. Idempotent.

    Args:
        module_name: `miles.backends.megatron_utils.actor` or `miles.backends.fsdp_utils.adaptations.routing_replay`.

    Raises:
        ConfigError: miles is not as it was read.
    """
    miles = find((*_NEEDS, Need(module_name, "fill_replay_data", _PARAMETERS)), "miles")
    module, original = importlib.import_module(module_name), miles["fill_replay_data"]
    if getattr(original, "is_r3", False):
        return lambda: None
    before = Filled()

    def fill_replay_data(
        *,
        args: Any,
        models: Any,
        data_iterator: Any,
        num_microbatches: Any,
        rollout_data: dict[str, Any],
        data_key: str,
        replay_list: list[Any],
        register_replay_list_func: Any,
        if_sp_region: bool = True,
        indices_are_token_positions: bool = False,
    ) -> None:
        def fill(data_key: str, replay_list: list[Any], register: Any) -> None:
            original(
                args=args,
                models=models,
                data_iterator=data_iterator,
                num_microbatches=num_microbatches,
                rollout_data=rollout_data,
                data_key=data_key,
                replay_list=replay_list,
                register_replay_list_func=register,
                if_sp_region=if_sp_region,
                indices_are_token_positions=indices_are_token_positions,
            )

        if data_key != FIELD:
            fill(data_key, replay_list, register_replay_list_func)
            return
        before.close()
        before.chunks = _fill(args, models, rollout_data, replay_list, miles["routing_replay_manager"], fill)

    fill_replay_data.is_r3 = True  # type: ignore[attr-defined]
    module.fill_replay_data = fill_replay_data  # type: ignore[attr-defined]

    def uninstall() -> None:
        module.fill_replay_data = original  # type: ignore[attr-defined]

    return uninstall


def _fill(
    args: Any,
    models: Any,
    rollout_data: dict[str, Any],
    replay_list: list[Any],
    manager: Any,
    fill: Callable[[str, list[Any], Any], None],
) -> list[ChunkRows]:
    settings, spec = Settings.from_args(args), spec_of(args)
    _require_all_tokens_rows(rollout_data)
    members = _open(Shards(settings.store, spec, HOOK), rollout_data)
    by_layer, is_fsdp = _replays(models, replay_list, spec)
    numbers = []
    for member in members:
        rows = torch.arange(member.first, member.first + member.num_tokens - 1, dtype=torch.int32)
        numbers.append(rows.reshape(-1, 1, 1))
    rollout_data[FIELD] = numbers
    local: list[torch.Tensor] = []

    def catch(_replays: Any, replay_data: torch.Tensor, **_: Any) -> None:
        local.append(replay_data.reshape(-1))

    fill(FIELD, [], catch)  # pads with -1, and deletes the field in the end
    # miles' check of agreement skips -1; so do its FSDP routers, and r3's adapters route such rows live.
    absent = -1 if is_fsdp or manager.enable_check_replay_result else None
    chunks = []
    for numbers_of_rank in local:
        rows_of_rank = numbers_of_rank.numpy().astype(np.int64)
        held = [m for m in members if ((rows_of_rank >= m.first) & (rows_of_rank < m.first + m.num_tokens)).any()]
        for replays in by_layer:
            chunk = ChunkRows(held, rows_of_rank, tuple(replays), spec, absent=absent)
            chunks.append(chunk)
            for layer, replay in replays.items():
                replay.top_indices_list.append(LayerRows(chunk, layer, None))
    return chunks


def _open(shards: Shards, rollout_data: dict[str, Any]) -> list[ShardRows]:
    out, first = [], 0
    indices = rollout_data.get("sample_indices")
    for i, tokens in enumerate(rollout_data["tokens"]):
        each = host_tokens(tokens)
        member = ShardRows.open(shards.find(None, None if indices is None else int(indices[i]), each), first)
        member.require_complete()
        out.append(member)
        first += len(each)
    return out


def _replays(
    models: nn.Module | Sequence[nn.Module], replay_list: list[Any], spec: RoutingSpec
) -> tuple[list[dict[int, Any]], bool]:
    """Replay objects by layer, for each chunk; and whether they are of FSDP, which numbers them by global decoder layer."""
    numbered = [replay.stream_idx is not None for replay in replay_list]
    if replay_list and all(numbered):
        found = {int(replay.stream_idx): replay for replay in replay_list}
        if tuple(sorted(found)) != spec.moe_layers:
            raise ConfigError(
                "miles registered routers of other layers than the model's MoE layers",
                where="miles.backends.fsdp_utils.adaptations.routing_replay",
                expected=list(spec.moe_layers),
                got=sorted(found),
                remedy="the adapter of this family finds the wrong module class: see docs/miles.md",
            )
        return [{layer: found[layer] for layer in spec.moe_layers}], True
    chunks = [models] if isinstance(models, nn.Module) else list(models)
    return bound_replays(chunks, replay_list, spec), False


def _require_all_tokens_rows(rollout_data: dict[str, Any]) -> None:
    require_found(rollout_data)
    if rollout_data.get(FIELD) is None:
        raise ConfigError(
            "the routes field did not come through to the trainer",
            where="rollout_data",
            expected=FIELD,
            got=sorted(rollout_data),
            remedy=f"is {HOOK} on the command line, and --use-rollout-routing-replay? Does a convert function drop the field?",
        )
