"""Diagnose a store of shards: one rollout, scored several ways by one trainer.

    live            the trainer's own routers choose
    replay          the recorded experts
    replay again    the same once more: what is left between two identical passes is the trainer's own noise
    r2              (asked for) the trainer's own record of a first pass, replayed
    float32 live, float32 replay    (asked for) the same in float32: what is rounding, and what is not

Paired: the same sampled tokens, in the same batches, with the same weights. What was replayed is proved, not assumed: the
ids that the experts received are compared with the record on every recorded (token, layer).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

import r3
from r3.diagnose.accumulate import Accumulator, ScoredSequence
from r3.diagnose.comparable import comparable
from r3.diagnose.evidence import Evidence
from r3.diagnose.floor import float_floor
from r3.diagnose.guards import find_all
from r3.diagnose.offsets import RouteOffsets
from r3.diagnose.result import AGAIN, FLOAT32_LIVE, FLOAT32_REPLAY, LIVE, R2, REPLAY, Diagnosis
from r3.diagnose.scoring import Scored, Scorer, require_replayed
from r3.diagnose.temperature import TemperatureFit, fit_temperature
from r3.diagnose.verdict import verdict
from r3.errors import MetricError
from r3.metrics import RouteMismatch
from r3.metrics.shift import RouterShift
from r3.metrics.sums import SequenceRows, token_sums
from r3.routes import Routes
from r3.sample import RolloutSample
from r3.store import ShardStore

# A sample of which the live routers differ in more (token, layer) than this is not this model's: right records of a trained
# model differ in 1 to 10 %, records of other tokens in 80 % and more.
SUSPECT_SHARE, SUSPECT_ROWS = 0.6, 16


def diagnose(
    store: ShardStore,
    scorer: Scorer,
    *,
    label: str = "",
    batch_tokens: int = 8192,
    limit: int | None = None,
    allow_other_weights: bool = False,
    r2: Scorer | bool = False,
    float32: Scorer | None = None,
    probe_temperature: bool = True,
    resamples: int = 2000,
    seed: int = 0,
    command: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Score every sample of a store live, replayed and replayed again.

    Args:
        label: Name of this rollout in the report.
        batch_tokens: Positions (padding included) of one forward.
        limit: At most so many samples, in the order of their ids.
        allow_other_weights: Compare although the trainer's weights are not those that sampled; the gap then contains
            the difference of the weights.
        r2: Also replay the routes that a trainer recorded itself: `scorer`'s (True), or those of another scorer with the
            weights of the old policy, as an update would replay them.
        float32: The same weights in float32: adds the float32 passes and the float floor.
        probe_temperature: Find out by three more forwards over 1,024 tokens whether the log-probs are at the temperature
            that the metadata say.
        resamples, seed: Of the bootstrap.
        command: What was typed, for the report.
        progress: Called with (samples done, samples in all).

    Raises:
        MetricError: nothing to compare, or what must not be compared.
        ReplayError: an expert received another id than the shard holds.
    """
    sample_ids = store.sample_ids()[:limit]
    if not sample_ids:
        steps = store.steps()
        raise MetricError(
            "no sample in this store",
            where=store.url,
            remedy=f"give one of its steps: {store.step(steps[-1]).url}"
            if steps
            else "collect some first: `r3 collect`",
        )
    rollout = comparable([(i, store.metadata(i)) for i in sample_ids], scorer, allow_other_weights)
    passes = _Passes(scorer, rollout, r2, float32, probe_temperature)
    result = Diagnosis(scorer.describe(), rollout, label)
    digest = hashlib.sha256()
    for batch in _batches(map(store.open, sample_ids), batch_tokens):
        for sample in batch:
            scorer.spec.require_same(sample.spec, f"sample {sample.sample_id!r}")
            result.rows += sample.num_tokens
            result.recorded += sample.routes.num_recorded
            result.recorded_last += int(sample.routes.recorded[-1:].sum())
            digest.update(f"{sample.sample_id}:{sample.token_digest};".encode())
        result.verified += passes.score(batch)
        result.sequences += len(batch)
        if progress is not None:
            progress(result.sequences, len(sample_ids))
    total = passes.total
    if not total.sample_ids:
        raise MetricError(
            "no sampled token to compare",
            where=store.url,
            remedy="the loss mask of every sample is empty or without log-probs: collect with log-probs, max_tokens above 0",
        )
    result.run = {
        "source": store.url,
        "token_digest": digest.hexdigest(),
        "command": list(command),
        "options": {"batch_tokens": batch_tokens, "limit": limit, "allow_other_weights": allow_other_weights},
        "versions": {"r3": r3.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "machine": f"{platform.system()} {platform.machine()}",
        "moe_layers": list(scorer.spec.moe_layers),
        "temperature_fit": None if passes.fit is None else passes.fit.to_dict(),
    }
    total.fill(result, routing=passes.routing, trainers=passes.trainers, resamples=resamples, seed=seed)
    result.floor = float_floor(passes.rounding.array(), total.rows(), resamples=resamples, seed=seed)
    result.router_shift = passes.shift.to_dict() if passes.shift.rows else None
    evidence = Evidence(
        total, passes.route_offsets, passes.fit, passes.padding_mass, scorer.spec.moe_layers, passes.suspects
    )
    result.findings = find_all(result, evidence)
    result.verdict = verdict(result)
    return result


class _Passes:
    """Every forward over every batch, and what is accumulated of them."""

    def __init__(
        self, scorer: Scorer, rollout: dict[str, Any], r2: Scorer | bool, float32: Scorer | None, probe: bool
    ) -> None:
        self.scorer, self.float32, self.probe = scorer, float32, probe
        self.recorder = scorer if r2 is True else r2 or None
        self.temperature = float(rollout["temperature"]) if rollout["logprobs_mode"] == "processed_logprobs" else 1.0
        plain = ((LIVE, "own"), (REPLAY, "rollout"), (AGAIN, "rollout"))
        self.routing = {
            **dict(plain),
            **({R2: "r2"} if self.recorder is not None else {}),
            **({FLOAT32_LIVE: "own", FLOAT32_REPLAY: "rollout"} if float32 is not None else {}),
        }
        self.trainers = {
            name: (float32 if name in (FLOAT32_LIVE, FLOAT32_REPLAY) and float32 is not None else scorer).describe()
            for name in self.routing
        }
        self.total = Accumulator(list(self.routing))
        spec = scorer.spec
        self.total.routes = {name: RouteMismatch(spec.num_moe_layers, spec.num_experts) for name in self.routing}
        self.rounding = SequenceRows()
        self.route_offsets = RouteOffsets()
        self.fit: TemperatureFit | None = None
        self.padding_mass: list[float] = []
        self.suspects: dict[str, float] = {}
        self.shift = RouterShift(spec.num_moe_layers)

    def score(self, batch: list[RolloutSample]) -> int:
        """Score one batch in every way; returns the (token, layer) pairs that were proved."""
        if self.probe and self.fit is None:
            self.fit = fit_temperature(self.scorer, batch, _used, self.temperature)
        scores = {name: self._forward(name, batch) for name in self.routing if name != R2}
        if self.recorder is not None:
            scores[R2] = self._r2(batch, scores[LIVE])
        verified = 0
        for i, sample in enumerate(batch):
            of = {name: scores[name][i] for name in self.routing}
            for name, routes in self.routing.items():
                if routes == "rollout":
                    require_replayed(sample, of[name], self.scorer.spec)
            verified += sample.routes.num_recorded * self.scorer.spec.num_moe_layers
            self._add(sample, of)
        return verified

    def _forward(self, name: str, batch: list[RolloutSample]) -> list[Scored]:
        of = self.float32 if name in (FLOAT32_LIVE, FLOAT32_REPLAY) and self.float32 is not None else self.scorer
        return of.score(batch, replay=self.routing[name] == "rollout", temperature=self.temperature)

    def _r2(self, batch: list[RolloutSample], live: list[Scored]) -> list[Scored]:
        assert self.recorder is not None
        first = (
            live
            if self.recorder is self.scorer
            else self.recorder.score(batch, replay=False, temperature=self.temperature)
        )
        for sample, new, old in zip(batch, live, first, strict=True):
            if first is not live and new.router_logprobs is not None and old.router_logprobs is not None:
                rows = sample.routes.recorded
                self.shift.add(new.router_logprobs[:, rows], old.router_logprobs[:, rows], sample.routes.ids[:, rows])
        own = [
            replace(sample, routes=Routes(scored.expert_ids.astype(sample.spec.dtype), sample.routes.recorded))
            for sample, scored in zip(batch, first, strict=True)
        ]
        scores = self.scorer.score(own, replay=True, temperature=self.temperature)
        for sample, scored in zip(own, scores, strict=True):
            require_replayed(sample, scored, self.scorer.spec)
        return scores

    def _add(self, sample: RolloutSample, of: dict[str, Scored]) -> None:
        record, recorded = sample.routes.ids, sample.routes.recorded
        rows = np.flatnonzero(recorded)
        differing = np.full(sample.num_tokens, -1, np.int64)
        for name, scored in of.items():
            per_row = self.total.routes[name].add(scored.expert_ids[:, rows], record[:, rows], rows)
            if name == LIVE and len(rows):
                differing[rows] = per_row
                share = float(per_row.mean()) / record.shape[0]
                if len(rows) >= SUSPECT_ROWS and share > SUSPECT_SHARE:
                    self.suspects[sample.sample_id] = share
        self.route_offsets.add(of[LIVE].expert_ids, record, recorded)
        used = _used(sample)
        self.total.missing += int((_asked(sample) & ~used).sum())
        positions = np.flatnonzero(used)
        train = {name: scored.logprobs[positions].astype(np.float64) for name, scored in of.items()}
        self.total.add(
            ScoredSequence(
                sample_id=sample.sample_id,
                positions=positions,
                rollout=sample.rollout_logprobs[positions].astype(np.float64),
                train=train,
                versions=sample.weight_version[positions],
                tokens=sample.tokens,
                differing=differing[positions - 1],  # row t - 1 predicts token t
            )
        )
        if FLOAT32_REPLAY in train and len(positions):
            a, b = train[REPLAY], train[FLOAT32_REPLAY]
            self.rounding.add(token_sums(a, b, a - b))
        mass = of[LIVE].padding_mass
        if mass is not None and len(positions):
            self.padding_mass.append(float(mass[positions].mean()))


def _asked(sample: RolloutSample) -> npt.NDArray[np.bool_]:
    """[T] the tokens under the loss mask; nothing predicts the first token of a sequence."""
    asked = sample.loss_mask.copy()
    asked[:1] = False
    return asked


def _used(sample: RolloutSample) -> npt.NDArray[np.bool_]:
    """[T] those that have a rollout log-prob."""
    used: npt.NDArray[np.bool_] = _asked(sample) & ~np.isnan(sample.rollout_logprobs)
    return used


def _batches(samples: Iterable[RolloutSample], batch_tokens: int) -> Iterator[list[RolloutSample]]:
    """Runs of samples whose right-padded batch has at most `batch_tokens` positions."""
    batch: list[RolloutSample] = []
    for sample in samples:
        width = max([sample.num_tokens, *(s.num_tokens for s in batch)])
        if batch and width * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch
