"""What veRL and slime dump, read without unpickling: `torch.load(weights_only=True)` and safetensors.

slime, `--save-debug-train-data PATH` (slime/observability/train_data_utils.py): a dict with `samples`, one dict each with
`tokens` [prompt + response], `loss_masks`, `rollout_log_probs`, `log_probs` [response] and `sample_index`; before its
format_version 2 a dict with `rollout_data`, a list of each of these over the samples. `log_probs` are the trainer's before the
update. Its rollout dump (`--save-debug-rollout-data`) has no log-probs of the trainer and is refused by name.

veRL (verl/trainer/ppo): its own `rollout_data_dir` holds texts only, and `DataProto.save_to_disk` is a pickle, which is never
read here. Write the batch's tensors instead, [batch, response] right-padded, as veRL names them: `rollout_log_probs`,
`old_log_probs`, `response_mask`, optional `responses`, from `torch.save({name: batch.batch[name] for name in ...}, "step.pt")` or
`safetensors.torch.save_file` of the same.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.diagnose.dumps import DEFAULT_NAME, DumpedSequence
from r3.errors import ConfigError, MetricError, first_line

_VERL = ("rollout_log_probs", "old_log_probs", "response_mask")


def read_pt(path: Path) -> Iterator[DumpedSequence]:
    """slime's dumps and dicts of veRL's tensors.

    Raises:
        ConfigError: torch is not installed.
        MetricError: objects other than tensors and plain values, or neither of the two formats.
    """
    try:
        import torch
    except ImportError:
        raise ConfigError("a .pt file needs torch, which is not installed", where=str(path)) from None
    try:
        data: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise MetricError(
            f"torch cannot read this file without executing code ({first_line(error)})",
            where=str(path),
            expected="tensors, lists, dicts, numbers and strings",
            remedy="save plain tensors; a DataProto or TensorDict is a pickle: save dict(batch.batch) of plain tensors",
        ) from None
    if isinstance(data, Mapping) and "samples" in data:
        return _slime(path, data["samples"])
    if isinstance(data, Mapping) and "rollout_data" in data:
        return _slime(path, _transposed(path, data["rollout_data"]))
    if isinstance(data, Mapping) and set(_VERL) <= set(data):
        return _verl(
            path, {str(name): _array(value) for name, value in data.items() if isinstance(value, torch.Tensor)}
        )
    raise MetricError(
        "neither a dump of slime nor tensors of veRL",
        where=str(path),
        expected=f"`samples`, `rollout_data`, or {', '.join(_VERL)}",
        got=sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__,
    )


def read_safetensors(path: Path) -> Iterator[DumpedSequence]:
    """veRL's tensors.

    Raises:
        MetricError: others.
    """
    import safetensors
    import safetensors.numpy

    try:
        tensors = safetensors.numpy.load_file(path)
    except safetensors.SafetensorError as error:
        raise MetricError(f"not a safetensors file ({error})", where=str(path)) from None
    except TypeError as error:  # numpy has no bfloat16
        raise MetricError(
            f"tensors of a dtype that numpy has not ({error})",
            where=str(path),
            expected="float32 or wider",
            remedy="save the log-probs with .float(): bfloat16 rounds them by more than the gap",
        ) from None
    if missing := set(_VERL) - set(tensors):
        raise MetricError("tensors are missing", where=str(path), expected=sorted(missing), got=sorted(tensors))
    return _verl(path, tensors)


def _verl(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> Iterator[DumpedSequence]:
    rollout, train, mask = (tensors[name] for name in _VERL)
    if not rollout.shape == train.shape == mask.shape or rollout.ndim != 2:
        raise MetricError(
            "tensors of unequal shape",
            where=str(path),
            expected="[batch, response] for all",
            got={name: list(tensors[name].shape) for name in _VERL},
        )
    tokens = tensors.get("responses")
    versions = tensors.get("weight_version")
    for i in range(len(rollout)):
        yield DumpedSequence.make(
            str(path),
            str(i),
            rollout[i],
            {DEFAULT_NAME: train[i]},
            mask=mask[i],
            versions=None if versions is None else versions[i],
            tokens=None if tokens is None else tokens[i],
            named=False,
        )


def _array(value: Any) -> npt.NDArray[Any]:
    """Of a tensor of any float dtype (numpy has no bfloat16), or of a list."""
    if hasattr(value, "is_floating_point") and value.is_floating_point():
        value = value.double()
    return np.asarray(value)


def _response(tokens: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """The last `count` tokens: none for an aborted sample."""
    return tokens[max(len(tokens) - count, 0) :]


def _transposed(path: Path, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    count = len(columns.get("response_lengths", ()))
    per_sample = {
        name: values for name, values in columns.items() if isinstance(values, list | tuple) and len(values) == count
    }
    if not count:
        raise MetricError("a slime dump without response_lengths", where=str(path), got=sorted(columns))
    return [{name: values[i] for name, values in per_sample.items()} for i in range(count)]


def _slime(path: Path, samples: Any) -> Iterator[DumpedSequence]:
    for i, sample in enumerate(samples):
        index = next(
            (sample[n] for n in ("sample_index", "sample_indices", "rollout_position") if sample.get(n) is not None),
            None,
        )
        named, index = index is not None, i if index is None else index
        where = f"{path}: sample {index}"
        if "log_probs" not in sample:
            raise MetricError(
                "no log_probs of the trainer",
                where=where,
                got=sorted(map(str, sample)),
                remedy="give the file of --save-debug-train-data; that of --save-debug-rollout-data has the rollout's side only",
            )
        if sample.get("rollout_log_probs") is None:
            raise MetricError(
                "no rollout_log_probs",
                where=where,
                remedy="let the engine return them (slime: --use-rollout-logprobs or --use-tis, --get-mismatch-metrics)",
            )
        rollout = _array(sample["rollout_log_probs"]).ravel()
        tokens, mask = sample.get("tokens"), sample.get("loss_masks")
        yield DumpedSequence.make(
            str(path),
            str(index),
            rollout,
            {DEFAULT_NAME: _array(sample["log_probs"])},
            mask=None if mask is None else _array(mask),
            tokens=None if tokens is None else _response(_array(tokens), len(rollout)),
            named=named,
        )
