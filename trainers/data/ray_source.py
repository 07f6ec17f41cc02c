"""Ray Data over stores of shards: `read_store(...)` is a `ray.data.Dataset` with a row for each sample.

    rows = read_store(ShardStore("s3://bucket/run/step-000012"), routes=True)
    shards = rows.streaming_split(8, equal=True)                      # one for each data-parallel rank
    for row in shards[rank].iter_rows():
        sample = sample_of_row(row)                                   # goes into Replay.micro_batch

Only keys are in the plan; shards are opened in Ray's read tasks, on whichever node those run, which must see the store. What is
read travels through Ray's object store, so routes (hundreds of bytes a token) are read on request alone: a job that shuffles and
filters rows needs none, and a rank can read its own from `key`.

Contract: a row is complete in itself: `sample_of_row` needs nothing else, and copies what Ray lent (`r3.detach`). The
sizes that are told to Ray before reading are those of a few shards' heads, so that its back-pressure works with megabytes a row.

Columns: sample_id, group_id, key, spec (JSON) string; num_tokens, prompt_length int64; weight_version_low,
weight_version_high int32; tokens list<int64>; rollout_logprobs list<float>, NaN where there is none; loss_mask, recorded
list<bool>; weight_version list<int32>; on request routes large_binary (ids [l, T, K], row-major, uint8 or uint16),
routes_shape list<int64>, routes_layers list<int64>.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray.data
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from r3 import shard
from r3.detach import detach
from r3.errors import ConfigError, SampleError, ShardError, StoreError
from r3.partial import PartialSample
from r3.routes import Routes
from r3.sample import narrow_tokens
from r3.spec import RoutingSpec
from r3.trainers.data.lazy import LazySample
from r3.trainers.data.snapshot import Ref, Snapshot, Source, Versions

BLOCK_BYTES = (
    32 * 2**20
)  # rows of about so many bytes become one block: small enough for Ray to hold a few of each task
_MEASURED = 16  # shards whose heads are read for an estimate of all

COLUMNS: dict[str, pa.DataType] = {
    "sample_id": pa.string(),
    "group_id": pa.string(),
    "key": pa.string(),
    "spec": pa.string(),
    "num_tokens": pa.int64(),
    "prompt_length": pa.int64(),
    "weight_version_low": pa.int32(),
    "weight_version_high": pa.int32(),
    "tokens": pa.list_(pa.int64()),
    "rollout_logprobs": pa.list_(pa.float32()),
    "loss_mask": pa.list_(pa.bool_()),
    "recorded": pa.list_(pa.bool_()),
    "weight_version": pa.list_(pa.int32()),
}
ROUTES: dict[str, pa.DataType] = {
    "routes": pa.large_binary(),
    "routes_shape": pa.list_(pa.int64()),
    "routes_layers": pa.list_(pa.int64()),
}
_BYTES_PER_TOKEN = 8 + 4 + 4 + 2 / 8  # of the columns without routes


def read_store(
    sources: Snapshot | Source | Sequence[Source],
    *,
    routes: bool | Sequence[int] = False,
    steps: Iterable[int] | None = None,
    versions: Versions | None = None,
    group_size: int | None = None,
    incomplete: str = "raise",
    bad: str = "raise",
    **options: Any,
) -> ray.data.Dataset:
    """A Ray Dataset with a row for each sample, in the order of the stores.

    Args:
        sources, steps, versions, group_size, incomplete, bad: As `Snapshot.take`; with `group_size` the samples of a group are
            adjacent, and in one block. With `bad="skip"` a shard that turns out to be damaged when it is read is left out
            as well, and named in the log of its task.
        routes: True for all layers, or global decoder-layer indices.
        options: Of `ray.data.read_datasource`: `override_num_blocks`, `concurrency`, `num_cpus`, `memory`, ...

    Raises:
        ConfigError, StoreError, ShardError: as `Snapshot.take`. A shard that cannot be read fails its task with its name.
    """
    if not isinstance(sources, Snapshot):
        sources = Snapshot.take(
            sources, steps=steps, versions=versions, group_size=group_size, incomplete=incomplete, bad=bad
        )
    elif (steps, versions, group_size, incomplete, bad) != (None, None, None, "raise", "raise"):
        raise ConfigError("which samples are used is decided where the snapshot is taken", remedy="see Snapshot.take")
    dataset: ray.data.Dataset = ray.data.read_datasource(ShardDatasource(sources, routes), **options)
    return dataset


class ShardDatasource(Datasource):
    """What `read_store` gives to Ray.

    Args:
        snapshot: The samples.
        routes: As of `read_store`.
    """

    def __init__(self, snapshot: Snapshot, routes: bool | Sequence[int] = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._units = [unit.refs for unit in snapshot.units]
        self._skip_bad = snapshot.skip_bad
        self._routes: bool | tuple[int, ...] = routes if isinstance(routes, bool) else tuple(routes)
        refs = snapshot.refs()
        measured = [refs[i] for i in np.unique(np.linspace(0, len(refs) - 1, _MEASURED).astype(int))]
        self._bytes_per_row = int(np.mean([_row_bytes(ref.key, self._routes) for ref in measured]))

    def estimate_inmemory_data_size(self) -> int:
        return self._bytes_per_row * sum(len(refs) for refs in self._units)

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: Any = None,  # noqa: ARG002
    ) -> list[ReadTask]:
        count = max(1, min(parallelism, len(self._units)))
        bounds = np.linspace(0, len(self._units), count + 1).astype(int)
        tasks = []
        for start, stop in itertools.pairwise(bounds):
            units = self._units[start:stop]
            rows = sum(len(refs) for refs in units)
            metadata = BlockMetadata(
                num_rows=None if self._skip_bad else rows,
                size_bytes=rows * self._bytes_per_row,
                input_files=tuple(ref.key for refs in units for ref in refs),
                exec_stats=None,
            )
            read = _Reader(tuple(units), self._routes, self._skip_bad)
            tasks.append(
                ReadTask(read, metadata, schema=schema_of(self._routes), per_task_row_limit=per_task_row_limit)
            )
        return tasks


class _Reader:
    """A read task: some units, as Arrow tables of about BLOCK_BYTES."""

    def __init__(self, units: tuple[tuple[Ref, ...], ...], routes: bool | tuple[int, ...], skip_bad: bool) -> None:
        self.units, self.routes, self.skip_bad = units, routes, skip_bad

    def __call__(self) -> Iterator[pa.Table]:
        rows: list[dict[str, Any]] = []
        size = 0
        for refs in self.units:
            try:
                samples = [self._sample(ref) for ref in refs]
            except (ShardError, StoreError) as error:
                if not self.skip_bad:
                    raise
                print(f"r3: left out, a shard cannot be read: {error}", flush=True)  # Ray shows it with the task's name
                continue
            rows += [_row(sample, self.routes is not False) for sample in samples]
            size += sum(sample.nbytes for sample in samples)
            if size >= BLOCK_BYTES:
                yield pa.Table.from_pylist(rows, schema=schema_of(self.routes))
                rows, size = [], 0
        if rows:
            yield pa.Table.from_pylist(rows, schema=schema_of(self.routes))

    def _sample(self, ref: Ref) -> LazySample:
        layers = None if isinstance(self.routes, bool) else self.routes
        return LazySample.of_shard(ref.key, layers=layers, routes=self.routes is not False, sample_id=ref.sample_id)


def schema_of(routes: bool | Sequence[int]) -> pa.Schema:
    """The columns of a row."""
    return pa.schema(COLUMNS if routes is False else COLUMNS | ROUTES)


def sample_of_row(row: Mapping[str, Any]) -> PartialSample:
    """A sample to replay, from a row as `iter_rows` or `take` gives it.

    A row that was read without routes gives a LazySample on its key, which must be readable here.

    Raises:
        SampleError: the row is not one of `read_store`.
        ShardError: its shard is gone, or holds other tokens or log-probs than the row.
    """
    try:
        if row.get("routes") is None:
            sample = LazySample.of_shard(row["key"])
            _require_unchanged(row, sample)
            return sample
        spec = RoutingSpec.from_json(row["spec"])
        shape = tuple(int(n) for n in row["routes_shape"])
        ids = np.frombuffer(row["routes"], spec.dtype).reshape(shape)
        recorded = np.asarray(row["recorded"], np.bool_)
        return PartialSample(
            row["sample_id"],
            spec,
            narrow_tokens(np.asarray(row["tokens"], np.int64)),
            Routes(detach(ids), detach(recorded)),
            tuple(int(layer) for layer in row["routes_layers"]),
            detach(np.asarray(row["loss_mask"], np.bool_)),
        )
    except (KeyError, ValueError) as error:
        raise SampleError(
            f"not a row of read_store ({type(error).__name__}: {error})",
            where=f"sample {row.get('sample_id')!r}",
            expected=list(COLUMNS | ROUTES),
            got=list(row),
        ) from None


def _require_unchanged(row: Mapping[str, Any], sample: LazySample) -> None:
    """Raise if the shard was replaced since the row was read; by those columns that the row still has."""
    for name in ("tokens", "rollout_logprobs"):
        if (had := row.get(name)) is not None and not np.array_equal(
            np.asarray(had, getattr(sample, name).dtype), getattr(sample, name), equal_nan=name == "rollout_logprobs"
        ):
            raise ShardError(
                "this shard was replaced since this row was read of it",
                where=sample.key,
                expected=f"the {name} of the row",
                got="others",
                remedy="read the store again; do not collect into a store that is being trained on under the same sample ids",
            )


def _row(sample: LazySample, with_routes: bool) -> dict[str, Any]:
    low, high = sample.weight_versions
    row: dict[str, Any] = {
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "key": sample.key,
        "spec": sample.spec.to_json(),
        "num_tokens": sample.num_tokens,
        "prompt_length": sample.prompt_length,
        "weight_version_low": low,
        "weight_version_high": high,
        "tokens": sample.tokens.astype(np.int64),
        "rollout_logprobs": sample.rollout_logprobs,
        "loss_mask": sample.loss_mask,
        "recorded": sample.recorded,
        "weight_version": sample.weight_version,
    }
    if with_routes:
        ids = sample.routes.ids
        row |= {"routes": ids.tobytes(), "routes_shape": list(ids.shape), "routes_layers": list(sample.layers)}
    return row


def _row_bytes(key: str, routes: bool | tuple[int, ...]) -> float:
    """Bytes of a row, from the head of its shard."""
    with shard.open_file(key) as file:
        layers = {True: file.spec.num_moe_layers, False: 0}[routes] if isinstance(routes, bool) else len(routes)
        per_token = _BYTES_PER_TOKEN + layers * file.spec.top_k * file.spec.dtype.itemsize
        return file.num_tokens * per_token + len(key) + len(file.metadata["spec"]) + 128
