"""Shard format 1: one RolloutSample in one self-describing safetensors file. Specified in docs/shard-format.md.

Four verbs, as in safetensors itself: `save` and `load` for bytes, `save_file` and `load_file` for files. Contract: a
shard is complete or absent (temporary name, flush, fsync, rename); every tensor carries a checksum; a reader of version
1 refuses another version by name; `safetensors.safe_open` alone can read it.

Routes dominate: 48 layers, top-8 of 128 experts are 384 bytes a token, everything else 14.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import xxhash

from r3.errors import R3Error, ShardError, StoreError
from r3.routes import Routes
from r3.sample import Provenance, RolloutSample, token_digest
from r3.spec import RoutingSpec

FORMAT, VERSION = "r3", "1"
SUFFIX = ".safetensors"
TEMPORARY = ".r3-tmp."  # prefix of files that are being written; nothing ever reads them

_TENSORS = ("routed_experts", "recorded", "tokens", "rollout_logprobs", "loss_mask", "weight_version")


def save(sample: RolloutSample) -> bytes:
    """The bytes of a shard."""
    tensors = {
        "routed_experts": sample.routes.ids,
        "recorded": sample.routes.recorded,
        "tokens": sample.tokens,
        "rollout_logprobs": sample.rollout_logprobs,
        "loss_mask": sample.loss_mask,
        "weight_version": sample.weight_version,
    }
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return safetensors.numpy.save(tensors, _metadata(sample, tensors))


def load(data: bytes, *, verify: bool = True, where: str = "shard") -> RolloutSample:
    """The sample in the bytes of a shard.

    Raises:
        ShardError: not a shard, another version, or damaged.
    """
    try:
        metadata = _header(data).get("__metadata__", {})
        tensors = safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(where, error) from None
    return _assemble(metadata, tensors, verify, where)


def save_file(sample: RolloutSample, path: str | os.PathLike[str], *, fsync: bool = True) -> None:
    """Write a shard; afterwards it is there whole, or not there.

    Args:
        path: Its name; the directory must exist. An existing shard of that name is replaced in one step.
        fsync: Survive a power cut, not only the death of this process. About 1 ms a shard on a local disk.

    Raises:
        StoreError: the file cannot be written (no space, no permission); nothing is left behind.
    """
    write_atomically(Path(path), save(sample), fsync=fsync)


def load_file(path: str | os.PathLike[str], *, verify: bool = True) -> RolloutSample:
    """Read a shard.

    Args:
        verify: Compare every tensor with its checksum.

    Raises:
        ShardError: no such file, not a shard, another version, or damaged.
    """
    where = str(path)
    try:
        with safetensors.safe_open(where, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _unreadable(where, error) from None
    return _assemble(metadata, tensors, verify, where)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a shard of a known version, without its tensors."""
    where = str(path)
    try:
        with safetensors.safe_open(where, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _unreadable(where, error) from None
    _check_version(metadata, where)
    return metadata


def write_atomically(path: Path, data: bytes, *, fsync: bool = True) -> None:
    """Write `data` under a temporary name in the same directory, then rename. See `save_file`."""
    temporary = path.with_name(f"{TEMPORARY}{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if fsync:
            _fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"cannot write a shard ({error.strerror or error})",
            where=str(path),
            expected=f"room and permission for {len(data)} bytes",
            remedy="free or enlarge the disk, or choose another directory; shards already written are complete",
        ) from error
    except BaseException:  # Ctrl-C between write and rename
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _metadata(sample: RolloutSample, tensors: dict[str, npt.NDArray[Any]]) -> dict[str, str]:
    provenance = asdict(sample.provenance)
    provenance["extra"] = json.dumps(provenance["extra"], sort_keys=True)
    return {
        "format": FORMAT,
        "version": VERSION,
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "spec": sample.spec.to_json(),
        "prompt_length": str(sample.prompt_length),
        "token_digest": sample.token_digest,
        **{name: value if isinstance(value, str) else repr(value) for name, value in provenance.items()},
        **{f"checksum.{name}": _checksum(array) for name, array in tensors.items()},
    }


def _checksum(array: npt.NDArray[Any]) -> str:
    return "xxh3_64:" + xxhash.xxh3_64_hexdigest(array.data.cast("B") if array.size else b"")


def _header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    return header


def _unreadable(where: str, error: Exception) -> ShardError:
    if isinstance(error, FileNotFoundError):
        return ShardError("no such shard", where=where)
    return ShardError(
        f"not a readable shard ({str(error).strip()})",
        where=where,
        remedy="the file was not written by r3, or was cut or damaged afterwards; delete it and collect the sample again",
    )


def _check_version(metadata: dict[str, str], where: str) -> None:
    if metadata.get("format") != FORMAT:
        raise ShardError(
            "a safetensors file, but not a shard of routed experts",
            where=where,
            expected="metadata format=r3",
            got=f"format={metadata.get('format')!r}",
        )
    if metadata.get("version") != VERSION:
        raise ShardError(
            "this shard is of another format version",
            where=where,
            expected=f"version {VERSION}",
            got=f"version {metadata.get('version')}",
            remedy="read it with the r3 that wrote it, or a later one",
        )


def _assemble(
    metadata: dict[str, str], tensors: dict[str, npt.NDArray[Any]], verify: bool, where: str
) -> RolloutSample:
    _check_version(metadata, where)
    missing = [name for name in _TENSORS if name not in tensors]
    if missing:
        raise ShardError(
            "a shard without all of its tensors", where=where, expected=list(_TENSORS), got=sorted(tensors)
        )
    try:
        if verify:
            _verify(metadata, tensors, where)
        values = {name: metadata[name] for name in asdict(Provenance())}
        return RolloutSample(
            sample_id=metadata["sample_id"],
            group_id=metadata["group_id"],
            spec=RoutingSpec.from_json(metadata["spec"]),
            tokens=tensors["tokens"],
            routes=Routes(tensors["routed_experts"], tensors["recorded"]),
            prompt_length=int(metadata["prompt_length"]),
            rollout_logprobs=tensors["rollout_logprobs"],
            loss_mask=tensors["loss_mask"],
            weight_version=tensors["weight_version"],
            provenance=Provenance(
                **{
                    **values,
                    "temperature": float(values["temperature"]),
                    "top_p": float(values["top_p"]),
                    "top_k": int(values["top_k"]),
                    "extra": json.loads(values["extra"]),
                }
            ),
        )
    except KeyError as error:
        raise ShardError("the metadata of this shard is not complete", where=where, expected=error.args[0]) from None
    except ShardError:
        raise
    except (R3Error, ValueError, TypeError) as error:
        raise ShardError(f"the parts of this shard do not fit each other: {error}", where=where) from None


def _verify(metadata: dict[str, str], tensors: dict[str, npt.NDArray[Any]], where: str) -> None:
    for name in _TENSORS:
        expected, got = metadata[f"checksum.{name}"], _checksum(tensors[name])
        if expected != got:
            raise ShardError(
                "damaged: a tensor does not match its checksum",
                where=f"{where}: {name}",
                expected=expected,
                got=got,
                remedy="delete the file and collect the sample again; check the disk",
            )
    if metadata["token_digest"] != token_digest(tensors["tokens"]):
        raise ShardError(
            "the tokens are not those that the routes were recorded for",
            where=where,
            expected=metadata["token_digest"],
            got=token_digest(tensors["tokens"]),
        )
