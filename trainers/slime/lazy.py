"""lazy: slime's own routing replay, with its rows read from the shards when a router asks for them.

slime fills its replay lists before a rollout is trained (`MegatronTrainRayActor.fill_routing_replay`): every rank holds the int32
rows of all layers of all its samples, cuts them, and copies its part into pinned memory. Here the same method puts a `LayerRows`
into each list: which rows of which shard, and no ids. Everything after that is slime's: stages, cursors, the patched top-k.

Where each local row comes from is not described but asked: row *numbers* go through slime's own
`prepare_routed_experts_for_routing_replay`, so context parallelism, padding and sequence parallelism are whatever slime makes of
them.

Contract: what was filled must be used. When slime clears its lists at the end of the rollout, a layer whose rows no router asked
for is an error: training went on without replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from r3.errors import ConfigError, ReplayError
from r3.rollout.slime.settings import Settings, spec_of
from r3.trainers.slime.finding import Shards, bound_replays
from r3.trainers.slime.rows import ChunkRows, LayerRows, ShardRows
from r3.trainers.slime.upstream import SLIME_LAZY, find

_BASE = 1 << 30  # row numbers begin here: slime's padding counts from 0
FIELD = "rollout_routed_experts"
HOOK = "--rollout-sample-hook-path r3.rollout.slime.write_shard"


def install() -> Callable[[], None]:
    """Put r3's `fill_routing_replay` into slime's trainer class; returns what takes it out again. Idempotent.

    Raises:
        ConfigError: slime is not as it was read.
    """
    slime = find(SLIME_LAZY)
    actor = slime["MegatronTrainRayActor"]
    original = actor.fill_routing_replay
    if getattr(original, "is_r3", False):
        return lambda: None

    def fill_routing_replay(self: Any, data_iterator: Any, num_microbatches: Any, rollout_data: Any) -> None:
        _fill(self, data_iterator, num_microbatches, rollout_data, slime)

    fill_routing_replay.is_r3 = True  # type: ignore[attr-defined]
    actor.fill_routing_replay = fill_routing_replay

    def uninstall() -> None:
        actor.fill_routing_replay = original

    return uninstall


def _fill(actor: Any, data_iterator: Any, num_microbatches: Any, rollout_data: dict[str, Any], slime: Any) -> None:
    args, replays = actor.args, slime["RoutingReplay"].all_routing_replays
    settings, spec = Settings.from_args(args), spec_of(args)
    shards = Shards(settings.store, spec, HOOK)
    chunks = bound_replays(actor.model, replays, spec)
    require_found(rollout_data)
    for iterator in data_iterator:
        iterator.reset()
    filled, coverage = Filled(), [1.0] * len(rollout_data["tokens"])
    for indices in data_iterator[0].micro_batch_indices[: sum(num_microbatches)]:
        batch = data_iterator[0].get_next(["tokens", "sample_indices", FIELD])
        members = _open(shards, batch)
        rows = _local_rows(args, slime, batch["tokens"])
        for index, member in zip(indices, members, strict=True):
            coverage[index] = member.coverage
        for replays_of_chunk in chunks:
            chunk = ChunkRows(members, rows, tuple(replays_of_chunk), spec)
            filled.chunks.append(chunk)
            for layer, replay in replays_of_chunk.items():
                replay.record(LayerRows(chunk, layer, slime["current_device"]))
    slime["RoutingReplay.register_lazy_resource"](filled)
    rollout_data.pop(FIELD, None)
    # One number a sample: slime averages it over the ranks into its own metrics, as rollout/r3_row_coverage.
    rollout_data["r3_row_coverage"] = coverage
    for iterator in data_iterator:
        iterator.reset()


def _open(shards: Shards, batch: dict[str, Any]) -> list[ShardRows]:
    tokens = [host_tokens(each) for each in batch["tokens"]]
    indices = batch["sample_indices"] or [None] * len(tokens)
    carried = batch[FIELD] or [None] * len(tokens)
    out, first = [], 0
    for index, each, routes in zip(indices, tokens, carried, strict=True):
        member = ShardRows.open(shards.find(routes, index, each), first)
        member.require_complete()
        out.append(member)
        first += len(each)
    return out


def _local_rows(args: Any, slime: Any, tokens: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """[n] int64: the row of each local position in the concatenation of the samples, -1 for none."""
    numbers, first = [], _BASE
    for each in tokens:
        count = int(each.shape[0])
        numbers.append(torch.arange(first, first + count - 1, dtype=torch.int32).reshape(-1, 1, 1))
        first += count
    local = slime["prepare_routed_experts_for_routing_replay"](
        numbers,
        tokens,
        num_experts=_BASE,  # slime numbers its padding modulo this
        data_pad_size_multiplier=args.data_pad_size_multiplier,
        sequence_parallel=args.sequence_parallel,
        allgather_cp=args.allgather_cp,
    )
    rows = local.reshape(-1).numpy().astype(np.int64)
    return np.where(rows >= _BASE, rows - _BASE, -1)


def host_tokens(tokens: Any) -> npt.NDArray[np.int64]:
    """[T] int64 of a sample's tokens, which slime has on the device by then."""
    return np.asarray(tokens.cpu() if isinstance(tokens, torch.Tensor) else tokens, np.int64)


def require_found(rollout_data: dict[str, Any]) -> None:
    """Raise if nothing in the training data names the samples.

    Raises:
        ConfigError: neither the routes field nor the indices came through.
    """
    if rollout_data.get(FIELD) is None and rollout_data.get("sample_indices") is None:
        raise ConfigError(
            "the training data names no routes and no samples",
            where="rollout_data",
            expected=f"{FIELD} or sample_indices",
            got=sorted(rollout_data),
            remedy="a --custom-convert-samples-to-train-data-path function drops both: copy them as slime's own does",
        )


class Filled:
    """What was put into the replay lists of one rollout, as slime's lazy resource: closed when the lists are cleared."""

    def __init__(self) -> None:
        self.chunks: list[ChunkRows] = []

    def begin_pass(self, release_stage: str) -> None:
        """Part of slime's contract; rows are let go layer by layer."""

    def close(self) -> None:
        """Raise if rows were never asked for, and let go of all.

        Raises:
            ReplayError: some router of this rank did not replay.
        """
        unused = [(i, layer) for i, chunk in enumerate(self.chunks) for layer, n in chunk.served.items() if n == 0]
        for chunk in self.chunks:
            chunk.drop()
        self.chunks = []
        if unused:
            raise ReplayError(
                f"{len(unused)} layers of micro-batches were trained without their recorded experts",
                where=f"micro-batch {unused[0][0]} of this rank, layer {unused[0][1]}",
                expected="every router asks slime's routing replay in every forward of the actor",
                got="no call",
                remedy="is --moe-router-fusion off? Is this Megatron-core slime's patched build? Is ENABLE_ROUTING_REPLAY 1?",
            )
