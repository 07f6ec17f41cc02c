"""decoding: rows that arrived become Routes, or a finding that says why not.

Three questions, in this order: which tokens do the rows belong to (`_place_rows`), which layers are MoE layers (`_layers`), and
can a router have chosen these ids (`_checked`)? The first two are answered by counting and by what must be zero, never by what
would look plausible: rows or layers that do not fit are refused, not shifted.

The ids are checked in the memory that is returned, after they were narrowed and reordered: what was checked is what is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.routes import Routes
from r3.spec import RoutingSpec
from r3.wire.checks import Finding, Policy, RowChecks, coverage, refuse, spans, zero_may_repeat
from r3.wire.engines import Context, null_reasons, parse_version
from r3.wire.fastcheck import peak_if_distinct, reorder
from r3.wire.reading import read

Rows = npt.NDArray[Any]


@dataclass
class Decoding:
    """One payload on its way to Routes. `routes` is called once; what it found is then in the other attributes.

    Attributes:
        findings: What was found and did not refuse the payload.
        format: As in `r3.wire.reading`, "" until it is known.
        start, num_rows: Where the payload's rows begin, and how many there are.
    """

    spec: RoutingSpec
    num_tokens: int
    start: int
    where: str
    policy: Policy
    context: Context

    def __post_init__(self) -> None:
        self.findings: list[Finding] = []
        self.format = ""
        self.num_rows = 0
        self.start_is_said = False  # by the payload itself: nothing is then inferred

    def routes(self, payload: Any, format: str | None) -> Routes:
        """Routes of the payload.

        Raises:
            PayloadError: the finding with which no policy, or not this one, can go on.
        """
        found = read(payload, self.spec, self.where, self.context, format)
        self.context, self.format = found.context, found.format
        if found.rows is None:
            return self._null()
        if found.start is not None:
            self.start, self.start_is_said = found.start, True
        self.num_rows = len(found.rows)
        self._place_rows()
        return self._checked(found.rows, self._layers(found.rows))

    def _null(self) -> Routes:
        if self.num_tokens - self.start <= 1 or self.context.prompt_tokens == self.num_tokens:
            return Routes.empty(self.num_tokens, self.spec)  # nothing was sampled (an abort): nothing is missing
        raise refuse(
            "null",
            "the engine returned no routes (null)",
            self.where,
            remedy="\n    or ".join(null_reasons(self.context)),
        )

    def _place_rows(self) -> None:
        """Which token row 0 belongs to. Rows are placed by count or not at all."""
        want, rows, num_tokens = self.num_tokens - self.start, self.num_rows, self.num_tokens
        all_rows = rows in (num_tokens, num_tokens - 1) and self.start > 0 and not self.start_is_said
        if rows in (want, want - 1) and not all_rows:
            return
        if all_rows and rows not in (want, want - 1):
            ignored = Finding(
                "rows",
                self.policy.start,
                "the engine ignored routed_experts_prompt_start: it sent all rows",
                expected=f"{want - 1} or {want} rows",
                got=rows,
                cause="vLLM before 0.28 on its OpenAI routes, SGLang before 0.5.12",
            )
            self._note(ignored)
            self.start = 0
            return
        if self.context.engine == "lmdeploy" and rows == want - 2 and rows >= 0:
            self._note(Finding("rows", "unrecorded", "the engine dropped the last row, of a token before a stop token"))
            return
        causes = {
            want + 1: "one row too many: speculative decoding, or tokens cut without their rows",
            want - 2: "one row too few: the engine dropped the row of a stop token",
            num_tokens
            - 1: "whether the engine ignored the start or sent the last token's row cannot be told with a start of 1",
        }
        raise refuse(
            "rows",
            "rows do not fit the tokens",
            self.where,
            expected=f"{want - 1}{'' if all_rows else f' or {want}'} rows for {num_tokens} tokens"
            + (f" less {self.start} not asked for" if self.start else ""),
            got=rows,
            cause=causes.get(rows, "tokens and routes are of different sequences, or one was cut without the other"),
        )

    def _note(self, finding: Finding) -> None:
        if finding.severity == "refuse":
            raise finding.error(self.where)
        self.findings.append(finding)

    def _layers(self, rows: Rows) -> tuple[int, ...]:
        """Positions of the MoE layers on the payload's layer axis: engines return all hidden layers or only the MoE layers."""
        spec, num_layers = self.spec, rows.shape[1]
        if num_layers == spec.num_moe_layers:
            return tuple(range(num_layers))
        if num_layers != spec.num_layers:
            raise refuse(
                "shape",
                "the layer axis fits neither all hidden layers nor the MoE layers",
                self.where,
                expected=f"{spec.num_layers} or {spec.num_moe_layers}",
                got=num_layers,
                cause="the spec is of another model, or the engine lost layers (pipeline parallelism is not captured by vLLM)",
            )
        dense = sorted(set(range(num_layers)) - set(spec.moe_layers) - set(getattr(spec, "hash_layers", ())))
        routed = [layer for layer in dense if rows[:, layer].any()]
        if not routed:
            return spec.moe_layers
        if self._is_compacted(rows):
            return tuple(range(spec.num_moe_layers))
        raise refuse(
            "dense",
            "a layer that should be dense has expert ids",
            self.where,
            place=f"layer {routed[0]}",
            layers=tuple(routed),
            expected=f"zeros in layers {spans(np.asarray(dense))}",
            got=f"ids {rows[:, routed[0]].any(axis=1).argmax()}...",
            cause="the spec's moe_layers are not those of the served model: every MoE layer would be shifted",
        )

    def _is_compacted(self, rows: Rows) -> bool:
        """vLLM 0.21 on a dense-first model: MoE layers from the front of the axis, then as many zero layers as are dense."""
        spec = self.spec
        dense_first = spec.moe_layers == tuple(range(spec.num_layers - spec.num_moe_layers, spec.num_layers))
        captured = rows.any(axis=(0, 2)).tolist()
        moved = [True] * spec.num_moe_layers + [False] * (spec.num_layers - spec.num_moe_layers)
        if not dense_first or captured != moved:
            return False
        version = parse_version(self.context.version)
        is_021 = self.format == "split" or (
            self.context.engine == "vllm" and version is not None and version[:2] == (0, 21)
        )
        finding = Finding(
            "compacted",
            self.policy.compacted if is_021 else "refuse",
            "MoE layers were moved to the front of the layer axis, and trailing layers are zero",
            layers=tuple(range(spec.num_moe_layers)),
            expected=f"zeros in the first {spec.num_layers - spec.num_moe_layers} layers",
            got=f"zeros in the last {spec.num_layers - spec.num_moe_layers}",
            cause="vLLM 0.21 miscounts the layers of models with first_k_dense_replace"
            if is_021
            else "either vLLM 0.21, which miscounts layers (say so with context.version), or a spec of another model",
        )
        self._note(finding)
        return True

    def _checked(self, rows: Rows, layers: tuple[int, ...]) -> Routes:
        """Routes of rows that pass, some of them marked unrecorded if the policy says so."""
        routes, peak = self._if_in_order(rows, layers, np.ones(len(rows), np.bool_))
        if routes is None:
            rows = rows[:, list(layers)]
            layers = tuple(range(len(layers)))
            checks = RowChecks(rows, self.spec, self.start, self.policy, self.context.cached_tokens)
            keep = np.ones(len(rows), np.bool_)
            for finding in checks.findings():
                self._note(finding)
                for each in finding.rows:
                    keep[each.start - self.start : each.stop - self.start] = False
            lost = 1 - np.count_nonzero(keep) / max(len(keep), 1)
            if lost > self.policy.max_unrecorded:
                raise refuse(
                    self.findings[-1].check,
                    f"{lost:.0%} of the rows would be marked unrecorded",
                    self.where,
                    expected=f"at most {self.policy.max_unrecorded:.0%}",
                    cause=self.findings[-1].cause,
                )
            filler = np.arange(self.spec.top_k, dtype=rows.dtype)
            routes, peak = self._if_in_order(np.where(keep[:, None, None], rows, filler), layers, keep)
            if routes is None:  # top-1, and nothing but expert 0 is left
                raise refuse("zeros", "every expert id that is left is 0", self.where, cause="see the other findings")
        narrow = coverage(peak, routes.num_recorded * len(layers) * self.spec.top_k, self.spec, self.policy)
        if narrow is not None:
            self._note(narrow)
        return routes

    def _if_in_order(
        self, rows: Rows, layers: tuple[int, ...], keep: npt.NDArray[np.bool_]
    ) -> tuple[Routes | None, int]:
        """Routes and the largest id, or None if any check on the content of any row fails. A good sample costs this."""
        spec, start, stop = self.spec, self.start, self.start + len(rows)
        rows = np.ascontiguousarray(rows)
        if rows.dtype.kind == "i" and rows.itemsize <= spec.dtype.itemsize and int(rows.min(initial=0)) < 0:
            return None, 0
        unsigned = rows.view(f"u{rows.itemsize}")  # a negative id of a wider type becomes a larger one than there are
        if unsigned.dtype != spec.dtype:
            if int(unsigned.max(initial=0)) >= spec.num_experts:
                return None, 0
            unsigned = unsigned.astype(spec.dtype)
        ids = np.empty((spec.num_moe_layers, self.num_tokens, spec.top_k), spec.dtype)
        filler = np.arange(spec.top_k, dtype=spec.dtype)  # distinct, for the check alone
        ids[:, :start], ids[:, stop:] = filler, filler
        reorder(unsigned, layers, ids[:, start:stop])
        may_repeat = zero_may_repeat(spec)
        peak = peak_if_distinct(ids, zero_may_repeat=may_repeat)
        if peak is None or peak >= spec.num_experts:
            return None, 0
        if peak == 0 and spec.num_experts > 1 and len(rows) * len(layers) >= 64:  # top-1: see RowChecks
            return None, 0
        if may_repeat and spec.top_k > 1 and len(rows):
            nonzero = np.any(ids[:, start:stop], axis=2)
            if not (np.any(nonzero, axis=0).all() and np.any(nonzero, axis=1).all()):
                return None, 0
        recorded = np.zeros(self.num_tokens, np.bool_)
        recorded[start:stop] = keep
        ids[:, ~recorded] = 0
        return Routes(ids, recorded), peak
