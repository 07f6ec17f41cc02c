"""samples: whose routes a micro-batch of veRL replays, from shards by key or from the batch's own field.

    extra_fields["r3"] or the column "r3"    a note of r3's agent loops: a shard's path, or which rows of the batch are recorded
    routed_experts                           [batch, tokens, layers, K], of veRL's own loops or r3's with `carry: batch`

Contract: each sample of the micro-batch comes back with the tokens that the batch has, or the micro-batch is refused. veRL fills
up batches with synthetic samples without a loss; they are copies of a real one's fields, and route live.

B samples of a micro-batch, T_b tokens of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from r3 import shard, wire
from r3.errors import NoShardError, ReplayError
from r3.handoff import NOTE, Note
from r3.partial import PartialSample, Replayable
from r3.routes import Routes
from r3.sample import RolloutSample, narrow_tokens, token_digest
from r3.spec import RoutingSpec
from r3.wire.checks import Policy

# An all-zero row is veRL's fill for a row without a record: no router chooses expert 0 K times.
_FILLED = Policy(lost_rows="unrecorded", max_unrecorded=0.99)


def samples_of(micro_batch: Any, spec: RoutingSpec, layers: Sequence[int] | None = None) -> list[Replayable | None]:
    """The sample of each sequence of a micro-batch [B]; None for veRL's synthetic ones.

    Args:
        micro_batch: A TensorDict in veRL's no-padding format: `input_ids` [B, T_b] jagged.
        layers: Global indices of the decoder layers that this rank needs; of a shard no others are read. None for all.

    Raises:
        ReplayError: no routes, or routes of other tokens.
        ShardError: a shard that is gone or damaged.
        WireError: routes in the batch that cannot be trusted.
    """
    tokens = sequences(micro_batch["input_ids"])
    trained = [bool(np.any(mask)) for mask in sequences(micro_batch["loss_mask"])]
    notes = notes_of(micro_batch, len(tokens))
    field = micro_batch.get("routed_experts", None)
    if field is None and not any(note is not None and note.shard for note in notes):
        raise ReplayError(
            "this batch has no routes to replay",
            where="veRL's actor",
            expected="routed_experts, or notes of r3's agent loops",
            got=f"the fields {sorted(map(str, micro_batch.keys()))}",
            remedy="actor_rollout_ref.rollout.enable_rollout_routing_replay=True, agent loops of r3 "
            "(agent.agent_loop_config_path), and no step in between that drops `routed_experts` or `extra_fields`; to train "
            "without replay unset VERL_ENGINE_VENDOR",
        )
    rows = [None] * len(tokens) if field is None else sequences(field)
    return [
        _sample(index, ids, note, row, has_loss, spec, layers)
        for index, (ids, note, row, has_loss) in enumerate(zip(tokens, notes, rows, trained, strict=True))
    ]


def _sample(
    index: int,
    tokens: npt.NDArray[np.int64],
    note: Note | None,
    rows: npt.NDArray[Any] | None,
    has_loss: bool,
    spec: RoutingSpec,
    layers: Sequence[int] | None,
) -> Replayable | None:
    where = f"sample {index} of the micro-batch"
    if note is not None and (note.num_tokens != len(tokens) or note.digest != token_digest(tokens)):
        if not has_loss:
            return None
        raise ReplayError(
            "the tokens of this sample are not those that its rollout left",
            where=where,
            expected=f"{note.num_tokens} tokens, {note.digest}" + (f" (shard {note.shard})" if note.shard else ""),
            got=f"{len(tokens)} tokens, {token_digest(tokens)}",
            remedy="something between rollout and trainer reordered, cut or changed the batch; tokens and notes must move "
            "together",
        )
    if note is not None and note.shard:
        sample = _read(note.shard, layers)
        spec.require_same(sample.spec, f"{where}, {note.shard}")
        if not np.array_equal(sample.tokens, tokens):
            raise ReplayError(
                "this shard is of other tokens",
                where=f"{where}, {note.shard}",
                expected=token_digest(tokens),
                got=token_digest(sample.tokens),
                remedy="the shard was replaced after the rollout: use one store for one run",
            )
        return sample
    if rows is None:
        if not has_loss:
            return None
        raise ReplayError(
            "this sample has no routes",
            where=where,
            expected="routed_experts, or a note with a shard, as other samples of the batch have",
            got="neither",
            remedy="use r3's loops for every agent_name of the data (configs/verl/agent_loops.yaml)",
        )
    return _from_batch(where, tokens, rows, note, has_loss, spec)


def _read(key: str, layers: Sequence[int] | None) -> Replayable:
    try:
        if layers is None:
            return shard.load_file(key)
        with shard.open_file(key) as file:
            return PartialSample.of_file(file, layers)
    except NoShardError as error:
        error.what += ": its sample cannot be replayed"
        error.expected = "the shard that r3's agent loop wrote when the sample was generated"
        error.remedy = (
            "does this machine see the same directory? Were more steps deleted (keep_steps) than a batch may be stale?"
        )
        raise


def _from_batch(
    where: str,
    tokens: npt.NDArray[np.int64],
    rows: npt.NDArray[Any],
    note: Note | None,
    has_loss: bool,
    spec: RoutingSpec,
) -> RolloutSample | None:
    if not has_loss and not rows.any():
        return None
    if note is None:
        routes = wire.routes_from_rows(rows, spec, num_tokens=len(tokens), where=where, policy=_FILLED)
    else:
        # The rollout side has checked them, and knows what veRL's zero fill hides.
        mask = note.mask()
        routes = Routes.from_rows(rows, len(tokens), spec)
        routes = replace(routes, recorded=mask & routes.recorded)
        routes.check(spec, where)
        empty = mask & ~routes.ids.any(axis=(0, 2)) & (spec.top_k > 1)
        if empty.any():
            raise ReplayError(
                "rows that the rollout recorded are empty in the batch",
                where=f"{where}, token {int(np.flatnonzero(empty)[0])}",
                expected=f"{int(mask.sum())} rows",
                got=f"{int((mask & ~empty).sum())} rows",
                remedy="something between rollout and trainer cleared or cut `routed_experts`",
            )
    length = len(tokens)
    return RolloutSample(
        sample_id=where,
        group_id="",
        spec=spec,
        tokens=narrow_tokens(tokens),
        routes=routes,
        prompt_length=0,
        rollout_logprobs=np.full(length, np.nan, np.float32),
        loss_mask=np.zeros(length, np.bool_),
        weight_version=np.full(length, -1, np.int32),
    )


def notes_of(micro_batch: Any, count: int) -> list[Note | None]:
    """The note of each sample, None where there is none: a column (DataProto), or in `extra_fields` (TransferQueue)."""
    column = _column(micro_batch, NOTE, count)
    if column is None:
        extras = _column(micro_batch, "extra_fields", count) or [None] * count
        column = [extra.get(NOTE) if isinstance(extra, dict) else None for extra in extras]
    return [None if text is None else Note.from_json(text) for text in column]


def _column(micro_batch: Any, key: str, count: int) -> Sequence[Any] | None:
    if key not in micro_batch.keys():  # noqa: SIM118  (a TensorDict iterates over its batch)
        return None
    values = micro_batch.get(key)
    values = values.tolist() if hasattr(values, "tolist") else values
    values = [values] * count if not isinstance(values, list) else values
    return [getattr(value, "data", value) for value in values]


def sequences(tensor: torch.Tensor) -> list[npt.NDArray[Any]]:
    """The parts of a tensor [B, T_b, ...], jagged or not, on the host."""
    if not tensor.is_nested:
        return list(tensor.cpu().numpy())
    values, offsets = tensor.values().cpu().numpy(), tensor.offsets().tolist()  # type: ignore[attr-defined]
    return [values[start:stop] for start, stop in itertools.pairwise(offsets)]
