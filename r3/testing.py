"""testing: speak every wire format, and break payloads in every way that has been seen, to prove what a consumer notices.

    rows = random_rows(rng, spec, 9, hidden=True)          # what an engine would send for 10 tokens
    payload = encode_vllm(rows)                            # as it would send it; also encode_sglang, encode_lmdeploy, ...
    payload = encode_vllm(FAULTS["zero_layer"].inject(rows, spec, rng))

For people who write a server, a gateway or a trainer that carries routes: put a fault in at one end, and see that it comes out
as an error at the other. Each fault of FAULTS names the check of `r3.wire.checks` that finds it in the payload. Some leave a
payload that a router could have produced; no check on it can ever find those, so `later` says what does:

    agreement   recorded experts against the trainer's own top-k, layer by layer (check 17). A right record agrees almost
                everywhere; rows or layers out of place agree by chance alone, top_k / num_experts of their experts.
                `r3.agreement` makes the comparison while it replays.
    version     the table of engines' known defects (check 20), before the first sample.

The comparison of token ids that replay makes for every micro-batch finds *samples* that were exchanged or cut after they were
made. It cannot find rows that were wrong from the start: the tokens are right.

SAMPLE_FAULTS break whole samples in ways that a shard's checks let through, each with the finding of `r3 diagnose` that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.routes import Routes
from r3.sample import RolloutSample
from r3.spec import RoutingSpec
from r3.wire import encode_envelope as encode_envelope
from r3.wire import encode_lmdeploy as encode_lmdeploy
from r3.wire import encode_sglang as encode_sglang
from r3.wire import encode_vllm as encode_vllm
from r3.wire import encode_vllm_021 as encode_vllm_021

Rows = npt.NDArray[Any]
Rng = np.random.Generator


def random_rows(rng: Rng, spec: RoutingSpec, num_rows: int, *, hidden: bool = False) -> Rows:
    """[R, layers, K] of distinct ids in the spec's dtype; with `hidden` all decoder layers, dense ones zero."""
    scores = rng.random((num_rows, spec.num_moe_layers, spec.num_experts), dtype=np.float32)
    ids = scores.argsort(axis=2)[..., : spec.top_k].astype(spec.dtype)
    if not hidden:
        return ids
    rows = np.zeros((num_rows, spec.num_layers, spec.top_k), spec.dtype)
    rows[:, list(spec.moe_layers)] = ids
    return rows


def shift_rows(rows: Rows, by: int = 1) -> Rows:
    """Every row belongs to the token `by` places later, the first rows are repeated: an off-by-one in a gateway.

    Invisible in the payload; found by agreement, in every layer.
    """
    return np.concatenate([rows[:by], rows[: len(rows) - by]])


def stale_rows(rows: Rows, other: Rows) -> Rows:
    """Rows of another request that happens to be as long: a KV slot that was reused, or a mixed-up batch.

    Invisible if the lengths agree (`rows` finds it otherwise); found by agreement, in every layer.
    """
    return other[: len(rows)].copy()


def swap_layers(rows: Rows, a: int, b: int) -> Rows:
    """Two layers exchanged (positions on the payload's layer axis). Invisible; found by agreement, in those two layers."""
    swapped = rows.copy()
    swapped[:, [a, b]] = rows[:, [b, a]]
    return swapped


def shift_layers(rows: Rows, by: int = 1) -> Rows:
    """Layers rotated along the axis, as by a wrong count of dense layers. `dense` finds it where the model has dense layers."""
    return np.roll(rows, by, axis=1)


def compact_layers(rows: Rows, spec: RoutingSpec) -> Rows:
    """MoE layers moved to the front, zero layers behind: vLLM 0.21 on a dense-first model. Found by `compacted`."""
    compacted = np.zeros_like(rows)
    compacted[:, : spec.num_moe_layers] = rows[:, list(spec.moe_layers)]
    return compacted


def overwrite_layer(rows: Rows, spec: RoutingSpec, rng: Rng, layer: int) -> Rows:
    """A layer of other ids, as by an MTP draft that shares its number (vLLM up to 0.25.1).

    Invisible; found by the engine's version (`version`), or by agreement in that layer.
    """
    written = rows.copy()
    written[:, layer] = random_rows(rng, spec, len(rows))[:, 0]
    return written


def drop_tail(rows: Rows, count: int = 2) -> Rows:
    """The last rows are gone. Found by `rows` (one missing row alone is what every engine sends)."""
    return rows[:-count]


def zero_rows(rows: Rows, which: slice) -> Rows:
    """Rows of zeros: leading (prefix cache), inner (preemption), trailing (shard, padding to expert 0). Found by `lost-rows`."""
    zeroed = rows.copy()
    zeroed[which] = 0
    return zeroed


def zero_layer(rows: Rows, layer: int) -> Rows:
    """A layer of zeros: another pipeline stage's, or a kernel that does not capture. Found by `zeros`."""
    zeroed = rows.copy()
    zeroed[:, layer] = 0
    return zeroed


def partial_cell(rows: Rows, row: int, layer: int) -> Rows:
    """One token's layer of which only the first id was written. Found by `distinct` from top-3 on, and by chance with top-2."""
    partial = rows.copy()
    partial[row, layer, 1:] = 0
    return partial


def repeat_id(rows: Rows, row: int, layer: int) -> Rows:
    """An expert twice for one token. Found by `distinct`."""
    repeated = rows.copy()
    repeated[row, layer, -1] = repeated[row, layer, 0]
    return repeated


def physical_ids(rows: Rows, spec: RoutingSpec, rng: Rng, redundant: int = 0) -> Rows:
    """Ids of expert-parallel slots: a permutation, with `redundant` replicas above the last expert (EPLB).

    With replicas `range` finds it as soon as one is used; a mere permutation is invisible, and found by agreement.
    """
    slots = rng.permutation(spec.num_experts + redundant)[: spec.num_experts].astype(np.int32)
    moved = slots[rows.astype(np.int64)]
    if rows.shape[1] == spec.num_layers:  # dense layers stay zeros
        moved[:, [layer for layer in range(spec.num_layers) if layer not in spec.moe_layers]] = 0
    return np.asarray(moved)


def padding_leak(rows: Rows, value: int, row: int, layer: int) -> Rows:
    """A cell of a padding value: -1, 255 or 65535. Found by `range` (255 only where it is no expert)."""
    leaked = rows.astype(np.int32)
    leaked[row, layer] = value
    return leaked


def overflow_uint8(rows: Rows) -> Rows:
    """Ids cut to 8 bits. Found by `coverage` in a sample of some length, and by `distinct` where two ids coincide."""
    return rows.astype(np.uint8)


def read_as_int8(rows: Rows) -> Rows:
    """uint8 ids read as int8: 128 and above become negative. Found by `range`."""
    return rows.astype(np.uint8).view(np.int8).astype(np.int32)


def cut(payload: str, characters: int) -> str:
    """A payload that lost its end, as by a proxy's body limit. Found by `encoding` or `npy`."""
    return payload[: len(payload) - characters]


@dataclass(frozen=True)
class Fault:
    """A way in which rows of all hidden layers can be wrong.

    Attributes:
        inject: (rows, spec, rng) to the broken rows.
        caught_by: Checks of `r3.wire.checks` of which one refuses the payload; empty if it looks like any other.
        later: What finds it then, see the module.
    """

    inject: Callable[[Rows, RoutingSpec, Rng], Rows]
    caught_by: tuple[str, ...] = ()
    later: str = ""


def _moe(spec: RoutingSpec, position: int) -> int:
    return spec.moe_layers[position]


FAULTS: dict[str, Fault] = {
    "shift_rows": Fault(lambda rows, *_: shift_rows(rows), later="agreement"),
    "stale_rows": Fault(
        lambda rows, spec, rng: stale_rows(rows, random_rows(rng, spec, len(rows), hidden=True)), later="agreement"
    ),
    "swap_layers": Fault(lambda rows, spec, _: swap_layers(rows, _moe(spec, 0), _moe(spec, -1)), later="agreement"),
    "overwrite_layer": Fault(
        lambda rows, spec, rng: overwrite_layer(rows, spec, rng, _moe(spec, 0)), later="agreement, version"
    ),
    "physical_permutation": Fault(lambda rows, spec, rng: physical_ids(rows, spec, rng), later="agreement, version"),
    "physical_ids": Fault(lambda rows, spec, rng: physical_ids(rows, spec, rng, spec.num_experts), ("range",)),
    "shift_layers": Fault(lambda rows, *_: shift_layers(rows), ("dense",)),
    "compact_layers": Fault(lambda rows, spec, _: compact_layers(rows, spec), ("compacted",)),
    "drop_tail": Fault(lambda rows, *_: drop_tail(rows), ("rows",)),
    "surplus_row": Fault(lambda rows, *_: np.concatenate([rows, rows[-2:]]), ("rows",)),
    "cached_rows": Fault(lambda rows, *_: zero_rows(rows, slice(0, 4)), ("lost-rows",)),
    "preempted_rows": Fault(lambda rows, *_: zero_rows(rows, slice(3, 6)), ("lost-rows",)),
    "expert_0_padding": Fault(lambda rows, *_: zero_rows(rows, slice(-3, None)), ("lost-rows",)),
    "never_captured": Fault(lambda rows, *_: zero_rows(rows, slice(None)), ("zeros",)),
    "zero_layer": Fault(lambda rows, spec, _: zero_layer(rows, _moe(spec, -1)), ("zeros",)),
    "partial_cell": Fault(lambda rows, spec, _: partial_cell(rows, 2, _moe(spec, 0)), ("distinct",)),
    "repeat_id": Fault(lambda rows, spec, _: repeat_id(rows, 2, _moe(spec, -1)), ("distinct",)),
    "padding_leak": Fault(lambda rows, spec, _: padding_leak(rows, -1, 2, _moe(spec, 0)), ("range",)),
    "overflow_uint8": Fault(lambda rows, *_: overflow_uint8(rows), ("coverage", "distinct")),
    "read_as_int8": Fault(lambda rows, *_: read_as_int8(rows), ("range",)),
}


def shift_routes(sample: RolloutSample, _: Rng) -> RolloutSample:
    """Every row of the record one token late."""
    ids = sample.routes.ids.copy()
    ids[:, 1:] = sample.routes.ids[:, :-1]
    return replace(sample, routes=Routes(ids, sample.routes.recorded))


def swap_sample_layers(sample: RolloutSample, _: Rng) -> RolloutSample:
    """The first two MoE layers of the record exchanged."""
    ids = sample.routes.ids.copy()
    ids[[0, 1]] = sample.routes.ids[[1, 0]]
    return replace(sample, routes=Routes(ids, sample.routes.recorded))


def misrecord_layer(sample: RolloutSample, rng: Rng) -> RolloutSample:
    """Other ids in the last MoE layer."""
    ids = sample.routes.ids.copy()
    ids[-1] = random_rows(rng, sample.spec, sample.num_tokens)[:, -1]
    return replace(sample, routes=Routes(ids, sample.routes.recorded))


def scramble_routes(sample: RolloutSample, rng: Rng) -> RolloutSample:
    """Other ids everywhere: another sample's record, or physical ids."""
    ids = random_rows(rng, sample.spec, sample.num_tokens).transpose(1, 0, 2)
    return replace(sample, routes=Routes(np.ascontiguousarray(ids), sample.routes.recorded))


def forget_rows(sample: RolloutSample, rng: Rng) -> RolloutSample:
    """Half of the rows have no record."""
    return replace(
        sample,
        routes=Routes(sample.routes.ids, sample.routes.recorded & (rng.random(sample.num_tokens) < 0.5)),
    )


def shift_logprobs(sample: RolloutSample, _: Rng) -> RolloutSample:
    """Every log-prob of the response one token late."""
    logprobs = sample.rollout_logprobs.copy()
    logprobs[sample.prompt_length + 1 :] = sample.rollout_logprobs[sample.prompt_length : -1]
    return replace(sample, rollout_logprobs=logprobs)


def drop_logprobs(sample: RolloutSample, _: Rng) -> RolloutSample:
    """The last token under the loss mask has no log-prob (NaN): a forced token, or one that the engine did not sample."""
    logprobs = sample.rollout_logprobs.copy()
    logprobs[np.flatnonzero(sample.loss_mask)[-1:]] = np.nan
    return replace(sample, rollout_logprobs=logprobs)


def empty_mask(sample: RolloutSample, rng: Rng) -> RolloutSample:
    """A quarter of the samples has an empty loss mask."""
    return replace(sample, loss_mask=sample.loss_mask & (rng.random() > 0.25))


@dataclass(frozen=True)
class SampleFault:
    """A way in which a sample can be wrong.

    Attributes:
        inject: (sample, rng) to the broken sample.
        finding: Id of the finding of `r3.diagnose` that names it.
    """

    inject: Callable[[RolloutSample, Rng], RolloutSample]
    finding: str


SAMPLE_FAULTS: dict[str, SampleFault] = {
    "shift_routes": SampleFault(shift_routes, "route-shift"),
    "swap_sample_layers": SampleFault(swap_sample_layers, "layer-misrecorded"),
    "misrecord_layer": SampleFault(misrecord_layer, "layer-misrecorded"),
    "scramble_routes": SampleFault(scramble_routes, "routes-of-other-tokens"),
    "forget_rows": SampleFault(forget_rows, "coverage"),
    "shift_logprobs": SampleFault(shift_logprobs, "token-shift"),
    "drop_logprobs": SampleFault(drop_logprobs, "missing-logprobs"),
    "empty_mask": SampleFault(empty_mask, "empty-mask"),
}
