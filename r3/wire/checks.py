"""checks: what can be wrong with a payload, how it is said, and what is done about it.

A payload that fails a check yields a Finding: which check, which rows and layers, the probable cause, the remedy, and a
severity that a Policy chooses: `refuse` the payload, mark the rows `unrecorded` (they then route live, and are counted), or
`warn`. Nothing is ever repaired by a guess, and no policy lets an id through that a router could not have chosen.

The checks run over rows [R, L, K]: R rows in token order, L MoE layers, K ids. The common case, all in order, is decided by
`r3.wire.fastcheck` in a fraction of the time; this module then never runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from r3.errors import ConfigError, WireError
from r3.spec import RoutingSpec

Severity = Literal["refuse", "unrecorded", "warn"]
Rows = npt.NDArray[Any]

# number: (name, what is compared, where it is done). The numbers are those of docs and messages; what a payload cannot show
# is done by a later stage, named here so that nobody takes a decoded payload for a proved one.
CHECKS: dict[int, tuple[str, str, str]] = {
    1: ("rows", "rows fit the tokens and the requested start", "payload"),
    2: ("shape", "three dimensions, the layers and the top-k of the spec", "payload"),
    3: ("zeros", "no MoE layer and no row is zero throughout", "payload"),
    4: ("distinct", "the ids of one token and layer are distinct", "payload"),
    5: ("range", "ids are those of the spec's experts", "payload"),
    6: ("coverage", "ids use the range of experts that the spec names", "payload"),
    7: ("dense", "layers without a router are zero", "payload"),
    8: ("lost-rows", "where rows are zero tells who lost them", "payload"),
    9: ("compacted", "MoE layers that were moved to the front of the layer axis", "payload"),
    10: ("encoding", "the encoding is one that an engine uses", "payload"),
    11: ("npy", "the .npy header is bounded and announces what is there", "payload"),
    12: ("null", "the engine sent routes at all", "payload"),
    13: ("copy", "routes never alias an engine's memory", "payload"),
    14: ("legs", "the parts of a sample of several turns meet without gap or overlap", "stitching"),
    15: ("cut", "tokens and rows are cut together", "sample"),
    16: ("stale-weights", "the prefix cache is flushed, or the weight version recorded, at each update", "rollout"),
    17: ("agreement", "recorded experts agree with the trainer's own top-k, per layer", "replay"),
    18: ("padding", "padding is masked, never routed to expert 0", "replay"),
    19: ("size", "the bytes that a run will make are known before it starts", "rollout"),
    20: ("version", "the engine's version is not known to be wrong", "preflight"),
}
_NUMBERS = {name: number for number, (name, _, _) in CHECKS.items()}


@dataclass(frozen=True)
class Policy:
    """What is done about each kind of finding. The default is strict: a payload is right, or refused.

    Attributes:
        lost_rows: Rows that are zero in every layer.
        distinct: Rows that repeat an id in some layer.
        range: Rows with an id that is no expert's.
        start: The engine sent all rows although a later start was asked for: `warn` takes them all (nothing is lost).
        coverage: Ids that never leave the low part of the range: narrowed to 8 bits, or the spec of another model.
        compacted: vLLM 0.21's layers, compacted to the front: `warn` converts them where the spec leaves no doubt.
        max_unrecorded: A payload of which a larger share of rows would be marked is refused whatever the rest says.

    Raises:
        ConfigError: a severity that would let wrong ids through.
    """

    lost_rows: Severity = "refuse"
    distinct: Severity = "refuse"
    range: Severity = "refuse"
    start: Severity = "warn"
    coverage: Severity = "refuse"
    compacted: Severity = "warn"
    max_unrecorded: float = 0.5

    def __post_init__(self) -> None:
        for name in ("lost_rows", "distinct", "range"):
            self._require(name, ("refuse", "unrecorded"))
        for name in ("start", "coverage", "compacted"):
            self._require(name, ("refuse", "warn"))
        if not 0 <= self.max_unrecorded < 1:
            raise ConfigError("max_unrecorded is a share of rows", expected="0 <= x < 1", got=self.max_unrecorded)

    def _require(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(
                f"no such severity for {name}", where="Policy", expected=" or ".join(allowed), got=getattr(self, name)
            )


STRICT = Policy()
LENIENT = Policy(lost_rows="unrecorded", distinct="unrecorded", range="unrecorded")


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    Attributes:
        check: Its name in CHECKS.
        severity: What was done about it.
        what: One sentence.
        place: Tokens and layers for messages, "" for the payload as a whole.
        rows: Token positions, as ranges.
        layers: Global decoder-layer indices.
        expected, got: What the check compared.
        cause: The probable cause.
        remedy: What to do.
    """

    check: str
    severity: Severity
    what: str
    place: str = ""
    rows: tuple[range, ...] = ()
    layers: tuple[int, ...] = ()
    expected: Any = None
    got: Any = None
    cause: str = ""
    remedy: str = ""

    @property
    def number(self) -> int:
        """Its number in CHECKS."""
        return _NUMBERS[self.check]

    @property
    def num_rows(self) -> int:
        return sum(len(each) for each in self.rows)

    def error(self, where: str) -> PayloadError:
        error = PayloadError(
            self.what,
            where=f"{where}: {self.place}" if self.place else where,
            expected=self.expected,
            got=self.got,
            remedy="; ".join(text for text in (self.cause, self.remedy) if text) or None,
        )
        error.finding = self
        return error

    def __str__(self) -> str:
        return f"[{self.severity}] check {self.number} ({self.check}): " + str(self.error("payload"))


class PayloadError(WireError):
    """The WireError of a payload; `finding` says the same for programs (it does not survive pickling)."""

    finding: Finding | None = None


def refuse(check: str, what: str, where: str, **details: Any) -> PayloadError:
    """The error of a finding that no policy can soften."""
    return Finding(check, "refuse", what, **details).error(where)


@dataclass(frozen=True, eq=False)
class RowChecks:
    """Rows [R, L, K] that failed the fast check, looked at closely.

    Attributes:
        rows: MoE layers only, as the engine sent them (any integer dtype).
        spec: What they are checked against.
        start: The token of row 0.
        policy: Severities.
        cached_tokens: Prompt tokens that the engine took from its prefix cache, if anybody said.
    """

    rows: Rows
    spec: RoutingSpec
    start: int
    policy: Policy
    cached_tokens: int | None = None

    def findings(self) -> Iterator[Finding]:
        """In the order in which they explain most: foreign ids, then what was never captured, then what is damaged."""
        if self.rows.size == 0:
            return
        outside = (self.rows < 0) | (self.rows >= self.spec.num_experts)
        if outside.any():
            yield self._range(outside)
        if self.spec.num_experts == 1:
            return
        nonzero = np.any(self.rows, axis=2)  # [R, L]
        if not nonzero.any():
            if self.spec.top_k > 1 or nonzero.size >= 64:
                yield self._never_captured()
            return
        if self.spec.top_k == 1:  # expert 0 is an expert: a zero says nothing
            return
        row_lost, layer_lost = ~np.any(nonzero, axis=1), ~np.any(nonzero, axis=0)
        if row_lost.any():
            yield self._lost_rows(np.flatnonzero(row_lost))
        if layer_lost.any():
            yield self._lost_layers(np.flatnonzero(layer_lost))
        repeated = self._repeats() & ~row_lost[:, None] & ~layer_lost[None, :]
        if repeated.any():
            yield self._repeated(repeated)

    def _range(self, outside: npt.NDArray[np.bool_]) -> Finding:
        cells = np.any(outside, axis=2)
        row, layer, slot = (int(i) for i in np.argwhere(outside)[0])
        value = int(self.rows[row, layer, slot])
        values = np.unique(self.rows[outside])
        if np.isin(values, (-1, 255, 65535)).all():
            cause = "this is a padding value: rows of padded or foreign tokens leaked into the capture"
        elif value < 0:
            cause = "ids were narrowed to a signed type somewhere (uint8 read as int8)"
        else:
            cause = "physical ids of an expert-parallel placement, a fused shared expert, or the spec of another model"
        return Finding(
            "range",
            self.policy.range,
            "an expert id is out of range",
            place=f"token {row + self.start}, layer {self.spec.moe_layers[layer]}",
            rows=ranges(np.flatnonzero(np.any(cells, axis=1)) + self.start),
            layers=self._layers(np.any(cells, axis=0)),
            expected=f"0..{self.spec.num_experts - 1}",
            got=value,
            cause=cause,
        )

    def _never_captured(self) -> Finding:
        return Finding(
            "zeros",
            "refuse",
            "every expert id is 0",
            rows=(range(self.start, self.start + len(self.rows)),),
            layers=self.spec.moe_layers,
            cause="the engine's MoE kernel does not call the capture hook: vLLM 0.15, vLLM 0.22-0.26 with a monolithic kernel "
            "or on a CPU, SGLang with a FlashInfer-TRTLLM kernel",
            remedy="use a version or a backend that captures",
        )

    def _lost_rows(self, lost: npt.NDArray[np.intp]) -> Finding:
        num_rows = len(self.rows)
        return Finding(
            "lost-rows",
            self.policy.lost_rows,
            f"{len(lost)} of {num_rows} rows are zeros in every layer",
            place=f"tokens {spans(lost + self.start)}",
            rows=ranges(lost + self.start),
            expected="distinct expert ids",
            cause=self._who_lost(lost, num_rows),
        )

    def _who_lost(self, lost: npt.NDArray[np.intp], num_rows: int) -> str:
        if lost[0] == 0 and len(lost) == lost[-1] + 1:
            cached = self.cached_tokens
            if cached is not None and cached - self.start == len(lost):
                return (
                    f"the {cached} tokens that the engine took from its prefix cache; upgrade it, or turn the cache off"
                )
            if cached == 0:
                return "leading rows, and no token came from the prefix cache: a prefill/decode transfer or offload lost them"
            return "leading rows: a prefix-cache hit, KV transfer or offloaded block lost them; upgrade the engine or turn it off"
        if lost[-1] == num_rows - 1 and len(lost) == num_rows - lost[0]:
            return "trailing rows: padding, or a tensor- or sequence-parallel shard was captured alone"
        return "rows in the middle: a preempted or retracted request whose rows were lost"

    def _lost_layers(self, lost: npt.NDArray[np.intp]) -> Finding:
        layers = np.asarray(self.spec.moe_layers)[lost]
        return Finding(
            "zeros",
            "refuse",
            f"{len(lost)} of {self.spec.num_moe_layers} MoE layers are zeros in every row",
            place=f"layers {spans(layers)}",
            layers=tuple(layers.tolist()),
            expected="distinct expert ids",
            cause="layers that another pipeline stage or another kernel ran were not captured, or the spec's moe_layers are not "
            "those of the served model",
        )

    def _repeats(self) -> npt.NDArray[np.bool_]:
        """[R, L]: does an id occur twice? Zero experts (LongCat) are all reported as id 0, so there 0 may repeat."""
        ordered = np.sort(self.rows, axis=2)
        same = ordered[..., 1:] == ordered[..., :-1]
        if zero_may_repeat(self.spec):
            same &= ordered[..., 1:] != 0
        return np.asarray(np.any(same, axis=2))

    def _repeated(self, repeated: npt.NDArray[np.bool_]) -> Finding:
        row, layer = (int(i) for i in np.argwhere(repeated)[0])
        return Finding(
            "distinct",
            self.policy.distinct,
            "an expert is chosen twice for one token",
            place=f"token {row + self.start}, layer {self.spec.moe_layers[layer]}",
            rows=ranges(np.flatnonzero(np.any(repeated, axis=1)) + self.start),
            layers=self._layers(np.any(repeated, axis=0)),
            expected=f"{self.spec.top_k} distinct ids",
            got=self.rows[row, layer].tolist(),
            cause="a row that was captured in part, padding, narrowed ids, or mixed layers"
            + ("" if self.policy.distinct == "unrecorded" else "; the routes of this sample cannot be used"),
        )

    def _layers(self, which: npt.NDArray[np.bool_]) -> tuple[int, ...]:
        return tuple(layer for layer, yes in zip(self.spec.moe_layers, which.tolist(), strict=True) if yes)


def coverage(peak: int, num_ids: int, spec: RoutingSpec, policy: Policy) -> Finding | None:
    """Do the ids use the range of experts? `peak` is the largest of `num_ids` ids.

    Only where the answer cannot be chance: 64 ids for each expert, and at least 32 experts that none of them names.
    """
    if peak + 32 >= spec.num_experts or num_ids < 64 * spec.num_experts:
        return None
    narrowed = peak <= 255 < spec.num_experts
    if not narrowed and peak >= spec.num_experts // 2:
        return None
    return Finding(
        "coverage",
        policy.coverage,
        f"{num_ids} ids name none of the experts above {peak}",
        expected=f"ids up to {spec.num_experts - 1}",
        got=peak,
        cause="ids were narrowed to 8 bits on their way"
        if narrowed
        else "the spec has more experts than the served model, or one expert-parallel rank was captured alone",
    )


def zero_may_repeat(spec: RoutingSpec) -> bool:
    return int(getattr(spec, "zero_experts", 0)) > 0


def ranges(numbers: npt.NDArray[Any]) -> tuple[range, ...]:
    """Ascending numbers as ranges: [0, 1, 2, 7] is range(0, 3), range(7, 8)."""
    if len(numbers) == 0:
        return ()
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return tuple(range(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, cuts))


def spans(numbers: npt.NDArray[Any], limit: int = 4) -> str:
    """`0-3, 7, 9-12, ...` for messages."""
    runs = ranges(numbers)
    text = [str(r.start) if len(r) == 1 else f"{r.start}-{r.stop - 1}" for r in runs[:limit]]
    return ", ".join(text + (["..."] if len(runs) > limit else []))
