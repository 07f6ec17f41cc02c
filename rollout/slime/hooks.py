"""hooks: what slime calls on the rollout side.

    --rollout-sample-hook-path r3.rollout.slime.write_shard            every generated sample, checked and written as a shard
    --custom-generate-function-path r3.rollout.slime.generate          for conversations: the same, turn by turn

`write_shard` runs after a sample's generation and before its reward. It checks the routes as on any wire (`r3.wire`), writes
the shard, puts its key into `sample.metadata["r3"]`, and leaves in `rollout_routed_experts` what the trainer is to get: a key
that fits slime's field (`r3.rollout.slime.ticket`), or all rows.

    <r3_store>/step-000012/<index>-<digest>.safetensors     a sample that ended (completed, truncated, failed) in rollout 12
    <r3_store>/partial/<id>.safetensors                     one that was aborted and will go on; deleted when it has ended

Contract: idempotent. A sample that has its key is left alone; the same tokens sampled again in a resumed run replace their shard
in one step. An aborted sample is written only if slime will go on with it (`--partial-rollout`); else slime throws it away.
What cannot be trusted raises, which ends the rollout; nothing is skipped in silence.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import ConfigError
from r3.rollout.slime import samples, ticket
from r3.rollout.slime.settings import Settings, require_routes_are_asked_for, spec_of
from r3.sample import RolloutSample
from r3.spec import RoutingSpec
from r3.store import ShardStore

_SLIME_GENERATE = "slime.rollout.sglang_rollout.generate"
_METADATA = "r3"


@dataclass
class Legs:
    """What is known of a sample from its requests so far.

    Attributes:
        sample: Tokens and rows of the legs; None before the first.
        versions: How many of `weight_versions` it has used up.
    """

    sample: RolloutSample | None = None
    versions: int = 0


async def write_shard_async(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> Any:
    """`write_shard` in a thread: the event loop, which serves all requests in flight, does not wait for the disk."""
    return await asyncio.to_thread(write_shard, args, sample, rollout_id=rollout_id, evaluation=evaluation)


def write_shard(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> Any:
    """slime's rollout sample hook: check the routes of a sample and write its shard.

    Args:
        args: slime's arguments with the `r3_*` settings.
        sample: slime's Sample; changed in place.
        rollout_id: The rollout, for the directory of its step.
        evaluation: An evaluation sample: left alone unless `r3_evaluation` is set.

    Returns:
        The same sample.

    Raises:
        ConfigError: a setting or the flag of the framework is missing.
        WireError: no routes, or routes that cannot be trusted.
        SampleError: the sample's fields do not fit each other.
        StoreError: the shard cannot be written.
    """
    settings = Settings.from_args(args)
    if evaluation and not settings.evaluation:
        return sample
    require_routes_are_asked_for(args, "r3.rollout.slime.write_shard")
    return Writer(args, settings, "slime").keep(sample, rollout_id)


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """slime's generate function: call another one, take the rows of every turn as it ends, and write the shard.

    For generate functions of several requests. slime keeps the rows of the last request alone, and those of earlier turns in them
    are of another forward where the prefix cache was flushed or the weights were updated between the turns.

    Args:
        args, sample, sampling_params, evaluation: As slime passes them. `r3_generate` names the function that is called.

    Returns:
        What that function returns: a Sample or a list of them, with their shards written.
    """
    settings = Settings.from_args(args)
    path = settings.generate or _SLIME_GENERATE
    call = load(path)
    keywords = {"evaluation": evaluation} if "evaluation" in inspect.signature(call).parameters else {}
    if evaluation and not settings.evaluation:
        return await call(args, sample, sampling_params, **keywords)
    require_routes_are_asked_for(args, "r3.rollout.slime.generate")
    writer = Writer(args, settings, "slime")
    turns = _Turns(type(sample), writer)
    turns.follow(sample)
    try:
        result = await call(args, sample, sampling_params, **keywords)
    finally:
        turns.release(sample)
    rollout_id = _current_rollout()
    for each in result if isinstance(result, list) else [result]:
        await asyncio.to_thread(writer.keep, turns.release(each), rollout_id, turns.legs.get(id(each)))
    return result


def _current_rollout() -> int | None:
    """The rollout that slime tells its sample hooks; None before it had them."""
    try:
        module = importlib.import_module("slime.rollout.sample_hooks")
    except ImportError:
        return None
    current: int | None = getattr(module, "_current_rollout_id", None)
    return current


class Writer:
    """Writes the samples of one framework's run."""

    def __init__(self, args: Any, settings: Settings, framework: str) -> None:
        self.args, self.settings, self.framework = args, settings, framework
        self.spec: RoutingSpec = spec_of(args)
        self.root = ShardStore(settings.store, create=True)

    def keep(self, sample: Any, rollout_id: int | None, legs: Legs | None = None) -> Any:
        """Write one sample as its status asks for, and put what the trainer gets in the place of its routes."""
        known = _known(sample)
        if self._is_written(sample, known):
            return sample
        aborted = sample.status.value == "aborted"
        if aborted and not (sample.response_length and getattr(self.args, "partial_rollout", False)):
            return sample  # slime throws it away, or draws it anew
        legs = self.resume(sample) if legs is None else legs
        if aborted:
            self._keep_partial(sample, legs, known)
            return sample
        record = self.read(sample, legs)
        step = self._step(_newest_version(sample) if rollout_id is None and self.framework == "miles" else rollout_id)
        step.replace(record, fsync=self.settings.fsync)
        key = record.sample_id if step is self.root else f"{step.name}/{record.sample_id}"
        _note(
            sample,
            key=key,
            tokens=record.num_tokens,
            rows=record.routes.num_recorded,
            weight_versions=sorted(set(record.weight_version[record.loss_mask].tolist())),
        )
        self._hand_on(sample, record, key, changed=legs.sample is not None)
        if "partial" in known:
            self._partials().discard(known["partial"])
        return sample

    def read(self, sample: Any, legs: Legs, *, has_rows: bool = True) -> RolloutSample:
        """The RolloutSample of what the sample holds now."""
        return samples.read_sample(
            sample,
            self.args,
            self.spec,
            policy=self.settings.wire_policy,
            previous=legs.sample,
            versions_before=legs.versions,
            has_rows=has_rows,
            framework=self.framework,
        )

    def _hand_on(self, sample: Any, record: RolloutSample, key: str, *, changed: bool) -> None:
        """What the trainer gets: a key, or the framework's own rows."""
        if self.settings.routes == "key":
            sample.rollout_routed_experts = self._key_rows(record, key)
        elif changed or not record.routes.recorded[:-1].all():
            sample.rollout_routed_experts = samples.framework_rows(
                record, missing=-1 if self.framework == "miles" else None
            )

    def _key_rows(self, record: RolloutSample, key: str) -> npt.NDArray[np.int32]:
        # miles counts the rows and looks at nothing else; its trainer finds the shard by the tokens.
        if self.framework == "miles":
            return np.empty((max(record.num_tokens - 1, 0), 0, 0), np.int32)
        return ticket.encode(key, self.spec.num_layers, self.spec.top_k)

    def _keep_partial(self, sample: Any, legs: Legs, known: dict[str, Any]) -> None:
        name = known.get("partial") or uuid.uuid4().hex
        record = self.read(sample, legs, has_rows=samples.has_new_rows(sample, legs.sample))
        self._partials().replace(record, name, fsync=self.settings.fsync)
        _note(sample, partial=name, versions=len(sample.weight_versions))

    def resume(self, sample: Any) -> Legs:
        """What an aborted sample that goes on was before."""
        known = _known(sample)
        if "partial" not in known:
            return Legs()
        before = self._partials().open(known["partial"])
        versions = int(known["versions"])
        same = np.array_equal(before.tokens, np.asarray(sample.tokens[: before.num_tokens]))
        if not same and len(sample.weight_versions) <= versions:
            return Legs()  # not gone on with, but drawn anew: its fields were reset and its metadata kept
        return Legs(before, versions)

    def _is_written(self, sample: Any, known: dict[str, Any]) -> bool:
        # By the tokens: metadata is copied to siblings, and kept when a sample is drawn again. And by what stands in the place of
        # its routes: drawn again it may have the same tokens, of other weights.
        key = str(known.get("key", ""))
        if key.rpartition("/")[2] != samples.sample_id_of(sample.index, sample.tokens):
            return False
        rows = sample.rollout_routed_experts
        if self.settings.routes == "full" or rows is None:
            return self.settings.routes == "full"
        return np.size(rows) == 0 if self.framework == "miles" else ticket.decode(rows) == key

    def _partials(self) -> ShardStore:
        return self.root.below("partial", create=True)

    def _step(self, rollout_id: int | None) -> ShardStore:
        if rollout_id is None or rollout_id < 0:
            return self.root
        is_new = bool(self.settings.keep_steps) and not self.root.has_step(rollout_id)
        step = self.root.step(rollout_id, create=True)
        if is_new:
            self.root.keep_steps(self.settings.keep_steps, newest=rollout_id)
        return step


def _newest_version(sample: Any) -> int | None:
    """miles tells its hooks no rollout; the newest weights that sampled are as good a step."""
    return max((int(version) for version in sample.weight_versions if str(version).isdigit()), default=None)


def _known(sample: Any) -> dict[str, Any]:
    known: dict[str, Any] = (sample.metadata or {}).get(_METADATA, {})
    return known


def _note(sample: Any, **values: Any) -> None:
    sample.metadata = {**(sample.metadata or {}), _METADATA: values}  # a new dict: siblings may share the old one


class _Turns:
    """Reads samples after every request of a generate function, by the call with which slime's contract ends each of them."""

    def __init__(self, original: type, writer: Writer) -> None:
        if not callable(getattr(original, "append_response_tokens", None)):
            raise ConfigError(
                "this Sample cannot be followed from turn to turn",
                where="r3.rollout.slime.generate",
                expected="slime's Sample with append_response_tokens (see the versions in docs/slime.md)",
                got=f"{original.__module__}.{original.__qualname__}",
                remedy="use --rollout-sample-hook-path r3.rollout.slime.write_shard instead",
            )
        self.legs: dict[int, Legs] = {}
        self._original = original

        def append_response_tokens(sample: Any, *arguments: Any, **keywords: Any) -> Any:
            result = original.append_response_tokens(sample, *arguments, **keywords)  # type: ignore[attr-defined]
            if (keywords.get("meta_info") or {}).get("routed_experts") is not None:
                legs = self.legs.setdefault(id(sample), writer.resume(sample))
                legs.sample, legs.versions = writer.read(sample, legs), len(sample.weight_versions)
            return result

        # A class and not an attribute of the sample: a copy of the sample then follows itself.
        self._followed = type(original.__name__, (original,), {"append_response_tokens": append_response_tokens})

    def follow(self, sample: Any) -> None:
        sample.__class__ = self._followed

    def release(self, sample: Any) -> Any:
        """The sample as one of slime's own class again: it will be pickled."""
        if type(sample) is self._followed:
            sample.__class__ = self._original
        return sample


def load(path: str) -> Callable[..., Any]:
    """The function at a dotted path.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot load the generate function ({error})",
            where="r3_generate",
            expected="the dotted path of an async function (args, sample, sampling_params)",
            got=path,
        ) from None
    return found
