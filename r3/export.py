"""export: shards as one file for people who look with their own tools.

    FILE.npz       the arrays of each sample as they are in memory: np.load(FILE)["<sample id>/routed_experts"]; streamed,
                   read sample by sample, any mixture of models
    FILE.parquet   one row per token, for pandas, polars, duckdb: what is asked there is about tokens (which experts
                   does layer 7 choose after a newline?), and a row per sample would have to be unnested first

Columns of the parquet file: step (null outside of a step's directory), sample_id, group_id, position, token, loss_mask,
logprob (null where there is none), weight_version, recorded, and for each MoE layer `layer_<decoder layer>`: a list of
top_k expert ids, null where no row is recorded. `SELECT unnest(layer_07), count(*) FROM 'f.parquet' GROUP BY 1`.
"""

from __future__ import annotations

import importlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from r3 import shard
from r3.errors import ConfigError, StoreError
from r3.sample import RolloutSample
from r3.shard import files
from r3.shard.format1 import encode
from r3.spec import RoutingSpec
from r3.store import ShardStore, is_store

Item = tuple[int | None, RolloutSample]  # (step, sample)


def export(
    source: str | os.PathLike[str],
    out: Path,
    *,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a shard, or a store and its steps, to `out`; the ending of its name chooses the format.

    Args:
        limit: Only the first so many samples.
        progress: Called with (samples done, samples in all).

    Returns:
        The number of samples written.

    Raises:
        ConfigError: another ending, or pyarrow is not installed.
        StoreError: no sample, a file that cannot be written, or models with different layers in one table.
        ShardError: a damaged shard.
    """
    write = {".npz": _write_npz, ".parquet": _write_parquet}.get(out.suffix)
    if write is None:
        raise ConfigError("not a format of export", where=str(out), expected="a name ending in .npz or .parquet")
    keys = _keys(source)[:limit]
    if not keys:
        raise StoreError("no shard to export", where=str(source))

    def items() -> Iterator[Item]:
        for number, (step, key) in enumerate(keys, 1):
            yield step, shard.load_file(key)
            if progress is not None:
                progress(number, len(keys))

    with _appearing(out) as temporary:
        write(items(), temporary)
    return len(keys)


def _keys(source: str | os.PathLike[str]) -> list[tuple[int | None, str]]:
    if not is_store(source):
        return [(None, os.fspath(source))]
    store = ShardStore(source)
    found: list[tuple[int | None, str]] = [(None, store.key_of(sample_id)) for sample_id in store.sample_ids()]
    for number in store.steps():
        step = store.step(number)
        found += [(number, step.key_of(sample_id)) for sample_id in step.sample_ids()]
    return found


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A temporary name beside `out` that becomes it at the end of the block, or goes."""
    temporary = out.with_name(files.temporary_name())
    try:
        yield temporary
        temporary.replace(out)
    except OSError as error:
        raise StoreError(f"cannot write this file ({error.strerror or error})", where=str(out)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_npz(items: Iterator[Item], out: Path) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for step, sample in items:
            prefix = sample.sample_id if step is None else f"step-{step:06d}/{sample.sample_id}"
            arrays = {
                "tokens": sample.tokens,
                "routed_experts": sample.routes.ids,
                "recorded": sample.routes.recorded,
                "rollout_logprobs": sample.rollout_logprobs,
                "loss_mask": sample.loss_mask,
                "weight_version": sample.weight_version,
                "metadata": np.array(json.dumps(encode(sample)[1])),
            }
            for name, array in arrays.items():
                with archive.open(f"{prefix}/{name}.npy", "w", force_zip64=True) as member:
                    np.save(member, array, allow_pickle=False)


def _write_parquet(items: Iterator[Item], out: Path) -> None:
    try:
        pa: Any = importlib.import_module("pyarrow")
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            "parquet needs pyarrow, which is not installed", remedy='pip install "r3-replay[export]", or export to .npz'
        ) from None
    writer: Any = None
    spec: RoutingSpec | None = None
    try:
        for step, sample in items:
            table = _table(pa, step, sample)
            if writer is None or spec is None:
                spec = sample.spec
                writer = parquet.ParquetWriter(out, table.schema, compression="zstd")
            spec.require_same(sample.spec, f"sample {sample.sample_id!r}")
            writer.write_table(table)  # one row group a sample: a filter on sample_id reads that sample alone
    finally:
        if writer is not None:
            writer.close()


def _table(pa: Any, step: int | None, sample: RolloutSample) -> Any:
    n, spec = sample.num_tokens, sample.spec

    def same(value: str) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([value], pa.string()))

    columns = {
        "step": pa.array([step] * n, pa.int64()),
        "sample_id": same(sample.sample_id),
        "group_id": same(sample.group_id),
        "position": pa.array(np.arange(n, dtype=np.int32)),
        "token": pa.array(sample.tokens.astype(np.int64)),
        "loss_mask": pa.array(sample.loss_mask),
        "logprob": pa.array(sample.rollout_logprobs, mask=np.isnan(sample.rollout_logprobs)),
        "weight_version": pa.array(sample.weight_version),
        "recorded": pa.array(sample.routes.recorded),
    }
    missing = pa.array(~sample.routes.recorded)
    for name, ids in zip(layer_names(spec), sample.routes.ids, strict=True):
        columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(ids.reshape(-1)), spec.top_k, mask=missing)
    return pa.table(columns)


def layer_names(spec: RoutingSpec) -> list[str]:
    """`layer_03` of a model with up to 100 layers: the decoder layer's global index, in the order of `routed_experts`."""
    width = max(2, len(str(spec.num_layers - 1)))
    return [f"layer_{layer:0{width}d}" for layer in spec.moe_layers]
