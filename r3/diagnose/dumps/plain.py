"""Log-probs in plain files: JSONL, .npz, parquet (`r3.diagnose.dumps` has their columns)."""

from __future__ import annotations

import importlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.diagnose.dumps import DEFAULT_NAME, DumpedSequence
from r3.errors import ConfigError, MetricError


def read_jsonl(path: Path) -> Iterator[DumpedSequence]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise MetricError(f"not JSON ({error})", where=where) from None
            if isinstance(entry, dict) and {"input", "output", "score"} <= set(entry):
                raise MetricError(
                    "veRL's rollout_data_dir holds texts and scores, not log-probs",
                    where=where,
                    remedy="dump rollout_log_probs, old_log_probs and response_mask of the batch (docs/kl-diagnostic.md has the "
                    "lines)",
                )
            if not isinstance(entry, dict) or "rollout_logprobs" not in entry:
                raise MetricError("not a line of log-probs", where=where, expected="an object with rollout_logprobs")
            train = entry.get("train_logprobs")
            yield DumpedSequence.make(
                where,
                str(entry.get("sample_id", number - 1)),
                entry["rollout_logprobs"],
                train if isinstance(train, dict) else {} if train is None else {DEFAULT_NAME: train},
                mask=entry.get("loss_mask"),
                versions=entry.get("weight_version"),
                tokens=entry.get("tokens"),
                named="sample_id" in entry,
            )


def read_npz(path: Path) -> Iterator[DumpedSequence]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise MetricError(f"not an .npz of plain arrays ({error})", where=str(path)) from None
    if missing := {"lengths", "rollout_logprobs"} - set(arrays):
        raise MetricError("arrays are missing", where=str(path), expected=sorted(missing), got=sorted(arrays))
    ends = np.cumsum(arrays["lengths"])
    flat = {name: values for name, values in arrays.items() if name not in ("lengths", "sample_ids")}
    for name, values in flat.items():
        if values.shape != (int(ends[-1]) if len(ends) else 0,):
            raise MetricError(
                f"{name} does not have one value per token",
                where=str(path),
                expected=[int(ends[-1]) if len(ends) else 0],
                got=list(values.shape),
            )
    named = "sample_ids" in arrays
    ids = arrays["sample_ids"].tolist() if named else range(len(ends))
    if len(ids) != len(ends):
        raise MetricError(
            "sample_ids does not have one id per sequence", where=str(path), expected=len(ends), got=len(ids)
        )
    for i, (sample_id, end) in enumerate(zip(ids, ends.tolist(), strict=True)):
        part = {name: values[end - int(arrays["lengths"][i]) : end] for name, values in flat.items()}
        yield _from_columns(path, str(sample_id), part, "rollout_logprobs", "train_logprobs", "tokens", named)


def read_parquet(path: Path) -> Iterator[DumpedSequence]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
        invalid: Any = importlib.import_module("pyarrow").ArrowInvalid
    except ImportError:
        raise ConfigError(
            "parquet needs pyarrow, which is not installed",
            where=str(path),
            remedy='pip install "r3-replay[export]", or dump to .npz',
        ) from None
    wanted = ("sample_id", "position", "logprob", "loss_mask", "token", "weight_version")
    try:
        names = parquet.read_schema(path).names
        table = parquet.read_table(path, columns=[n for n in names if n in wanted or n.startswith("train_logprob")])
    except invalid as error:
        raise MetricError(f"not a parquet file ({error})", where=str(path)) from None
    if missing := {"sample_id", "position", "logprob"} - set(names):
        raise MetricError("columns are missing", where=str(path), expected=sorted(missing), got=names)
    ids = np.asarray(table["sample_id"].to_pylist(), dtype=object)
    columns = {
        name: np.asarray(table[name].to_numpy(zero_copy_only=False))
        for name in table.column_names
        if name != "sample_id"
    }
    for sample_id in dict.fromkeys(ids.tolist()):
        rows = np.flatnonzero(ids == sample_id)
        rows = rows[np.argsort(columns["position"][rows], kind="stable")]
        part = {name: values[rows] for name, values in columns.items() if name != "position"}
        part["logprob"] = part["logprob"].astype(np.float64)  # null is NaN
        yield _from_columns(path, str(sample_id), part, "logprob", "train_logprob", "token")


def _from_columns(
    path: Path,
    sample_id: str,
    columns: Mapping[str, npt.NDArray[Any]],
    rollout: str,
    train: str,
    tokens: str,
    named: bool = True,
) -> DumpedSequence:
    forwards = {
        DEFAULT_NAME if name == train else name.removeprefix(train + "."): values.astype(np.float64)
        for name, values in columns.items()
        if name == train or name.startswith(train + ".")
    }
    return DumpedSequence.make(
        str(path),
        sample_id,
        columns[rollout],
        forwards,
        mask=columns.get("loss_mask"),
        versions=columns.get("weight_version"),
        tokens=columns.get(tokens),
        named=named,
    )
