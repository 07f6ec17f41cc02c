"""Diagnose log-probs that a trainer dumped, without any model.

    diagnose_dumps({"live": [Path("r3off.pt")], "replay": [Path("r3on.pt")]})    # the same samples twice: paired
    diagnose_dumps({"train": [Path("step-12.npz")]})                             # one forward: its gap, no verdict on replay

Formats: `r3.diagnose.dumps`. Sequences are held until all forwards are read, since pairs may come in any order: 8 bytes per
token and forward.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import r3
from r3.diagnose.accumulate import Accumulator, ScoredSequence
from r3.diagnose.dumps import DEFAULT_NAME, DumpedSequence, read_dump
from r3.diagnose.evidence import Evidence
from r3.diagnose.guards import find_all
from r3.diagnose.result import Diagnosis
from r3.diagnose.verdict import verdict
from r3.errors import MetricError
from r3.metrics import Float

UNKNOWN_ROLLOUT: dict[str, Any] = {
    **dict.fromkeys(("engine", "engine_version", "model", "model_fingerprint", "logprobs_mode"), ""),
    "temperature": math.nan,
    "top_p": math.nan,
    "top_k": -1,
    "weights": "unknown",
}


def diagnose_dumps(
    files: Mapping[str, Sequence[Path]],
    *,
    label: str = "",
    resamples: int = 2000,
    seed: int = 0,
    command: Sequence[str] = (),
) -> Diagnosis:
    """Diagnose dumps of one or several forwards over the same samples.

    Args:
        files: By name of the forward; `live` and `replay` are compared as such. A file that holds several forwards by name
            gives all of them, prefixed by the name unless it is the only one.

    Raises:
        MetricError: nothing to compare, or dumps of other samples under one diagnosis.
    """
    sequences = _joined(files)
    names = list(next(iter(sequences.values())).train) if sequences else []
    total = Accumulator(names)
    result = Diagnosis(_stack(files), dict(UNKNOWN_ROLLOUT), label)
    digest = hashlib.sha256()
    for sequence in sequences.values():
        used = sequence.mask & ~np.isnan(sequence.rollout)
        total.missing += int((sequence.mask & ~used).sum())
        positions = np.flatnonzero(used)
        digest.update(
            f"{sequence.sample_id}:".encode() + (sequence.tokens if sequence.tokens is not None else used).tobytes()
        )
        total.add(
            ScoredSequence(
                sample_id=sequence.sample_id,
                positions=positions,
                rollout=sequence.rollout[positions],
                train={name: values[positions] for name, values in sequence.train.items()},
                versions=sequence.versions[positions],
                tokens=sequence.tokens,
            )
        )
    result.sequences = len(sequences)
    if not total.sample_ids:
        raise MetricError(
            "no sampled token to compare",
            where=", ".join(str(path) for paths in files.values() for path in paths),
            remedy="the loss mask of every sequence is empty, or the dump has no log-probs",
        )
    result.run = {
        "source": [str(path) for paths in files.values() for path in paths],
        "token_digest": digest.hexdigest(),
        "command": list(command),
        "options": {},
        "versions": {"r3": r3.__version__, "python": platform.python_version(), "numpy": np.__version__},
        "machine": f"{platform.system()} {platform.machine()}",
        "temperature_fit": None,
    }
    total.fill(
        result,
        routing=dict.fromkeys(names, "unknown"),
        trainers=dict.fromkeys(names, result.trainer),
        resamples=resamples,
        seed=seed,
    )
    result.findings = find_all(result, Evidence(total))
    result.verdict = verdict(result)
    return result


def _stack(files: Mapping[str, Sequence[Path]]) -> dict[str, str]:
    names = ", ".join(path.name for paths in files.values() for path in paths)
    return {"framework": "dump", "model": names, "dtype": "dump", "device": ""}


def _joined(files: Mapping[str, Sequence[Path]]) -> dict[str, DumpedSequence]:
    """Sequences by id, each with the log-probs of every forward.

    Raises:
        MetricError: a sample that one forward has and another has not, or has with other tokens or forwards.
    """
    out: dict[str, DumpedSequence] = {}
    names: dict[str, list[str]] = {}
    for number, (name, paths) in enumerate(files.items()):
        seen: set[str] = set()
        for part, path in enumerate(paths):
            for sequence in read_dump(path):
                where = f"{path}: sample {sequence.sample_id!r}"
                # Numbers in a file, unlike names, start again in the next one, and pair by the order of the files.
                key = sequence.sample_id if sequence.named or len(paths) == 1 else f"{part}:{sequence.sample_id}"
                if key in seen:
                    raise MetricError("a sample twice in one forward", where=where)
                seen.add(key)
                train = _renamed(sequence.train, name, alone=len(files) == 1)
                names.setdefault(name, list(train))
                if list(train) != names[name]:
                    raise MetricError(
                        "a sequence has other forwards than the first one",
                        where=where,
                        expected=names[name],
                        got=list(train),
                    )
                if number == 0:
                    out[key] = DumpedSequence.make(
                        str(path), key, sequence.rollout, train, mask=sequence.mask, versions=sequence.versions,
                        tokens=sequence.tokens,
                    )  # fmt: skip
                    continue
                if key not in out:
                    raise MetricError(f"the dump {name!r} has a sample that the first has not", where=where)
                _require_same(out[key], sequence, where)
                out[key].train.update(train)
        if missing := [key for key in out if key not in seen]:
            raise MetricError(
                f"{len(missing)} samples of the first dump are not in {name!r}: nothing could be paired",
                where=f"sample {missing[0]!r}",
                remedy="dump the same rollouts under both settings (slime: --load-debug-rollout-data), learning rate 0",
            )
    return out


def _renamed(train: dict[str, Float], name: str, *, alone: bool) -> dict[str, Float]:
    if list(train) == [DEFAULT_NAME]:
        return {name: train[DEFAULT_NAME]}
    return dict(train) if alone else {f"{name} {each}": values for each, values in train.items()}


def _require_same(a: DumpedSequence, b: DumpedSequence, where: str) -> None:
    same = len(a.rollout) == len(b.rollout) and np.array_equal(a.rollout, b.rollout, equal_nan=True)
    if same and a.tokens is not None and b.tokens is not None:
        same = np.array_equal(a.tokens, b.tokens)
    if not same or not np.array_equal(a.mask, b.mask):
        raise MetricError(
            "the two dumps hold other tokens, masks or rollout log-probs under this id: they are not the same rollout",
            where=where,
            remedy="dump the same rollouts under both settings (slime: --load-debug-rollout-data), learning rate 0",
        )
