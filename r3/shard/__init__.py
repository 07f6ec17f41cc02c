"""Shard: one RolloutSample in one self-describing safetensors file. Specified in docs/shard-format.md.

Four verbs, as in safetensors itself: `save` and `load` for bytes, `save_file` and `load_file` for files; and `open_file`
for who needs some layers or some tokens. Contract: a shard is complete or absent (temporary name, flush, fsync, rename);
every byte of it is under a checksum; a reader of version 1 refuses another version by name; `safetensors.safe_open`
alone can read it.

A path with `://` in it is read and written through fsspec: `s3://bucket/run/a.safetensors` (docs/storage.md).
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import ShardError, SpecError
from r3.routes import Mask, Routes
from r3.sample import RolloutSample
from r3.shard import container, format1
from r3.shard.files import TEMPORARY as TEMPORARY
from r3.shard.files import Ranges, is_url, local_path, open_ranges
from r3.shard.files import write_atomically as write_atomically
from r3.spec import RoutingSpec

SUFFIX = ".safetensors"

Where = str | os.PathLike[str]


def save(sample: RolloutSample) -> bytes:
    """The bytes of a shard; the same sample always gives the same bytes."""
    return b"".join(pieces(sample))


def load(data: bytes | bytearray, *, verify: bool = True, where: str = "shard") -> RolloutSample:
    """The sample in the bytes of a shard.

    Raises:
        ShardError: not a shard, another version, or damaged.
    """
    return _decode(np.frombuffer(bytearray(data), np.uint8), verify, where)


def save_file(sample: RolloutSample, path: Where, *, fsync: bool = True) -> None:
    """Write a shard; afterwards it is there whole, or not there.

    Args:
        path: A file, or a URL; the directory or bucket must exist. An existing shard of that name is replaced in one step.
        fsync: Survive a power cut, not only the death of this process. About 1 ms a shard on a local disk; a put is durable.

    Raises:
        StoreError: the file cannot be written (no space, no permission); nothing is left behind.
    """
    if is_url(path):
        from r3.shard import objects

        objects.put(os.fspath(path), save(sample))
        return
    write_atomically(local_path(path), pieces(sample), fsync=fsync)


def load_file(path: Where, *, verify: bool = True) -> RolloutSample:
    """Read a shard.

    Args:
        path: A file, or a URL.
        verify: Compare every tensor with its checksum. The header always is.

    Raises:
        ShardError: no such file, not a shard, another version, or damaged.
    """
    return load_with_size(path, verify=verify)[0]


def load_with_size(path: Where, *, verify: bool = True) -> tuple[RolloutSample, int]:
    """`load_file`, and the size of the file in bytes."""
    with contextlib.closing(open_ranges(path)) as ranges:
        data = ranges.whole()
    return _decode(data, verify, str(path)), data.nbytes


def read_metadata(path: Where) -> dict[str, str]:
    """The metadata of a shard of a known version, without its tensors: reads 4 KB."""
    with open_file(path) as file:
        return file.metadata


def open_file(path: Where) -> ShardFile:
    """A shard of which only the head is read now, and what is asked for later. Close it, or use it as a context.

    Raises:
        ShardError: no such file, not a shard, another version, or damaged.
    """
    return ShardFile(open_ranges(path), str(path))


class ShardFile:
    """An open shard.

        with shard.open_file(path) as file:
            mine = file.routes(layers=slice(12, 24))              # a pipeline stage's
            part = file.routes(layers=slice(12, 24), tokens=slice(0, 2048))

    The head (one read of 4 KB for usual shards) is verified when it is opened. `routes` reads exactly the bytes asked for.

    Attributes:
        metadata: All of it, as strings.
        spec: The routing of the model that sampled.
        num_tokens: T.
        size: Of the file, in bytes.
        recorded, loss_mask: [T] bool.
        weight_version: [T] int32.
    """

    def __init__(self, ranges: Ranges, where: str) -> None:
        self._ranges, self._where = ranges, where
        try:
            self._open()
        except BaseException:
            ranges.close()
            raise

    def _open(self) -> None:
        head = self._ranges.head(container.HEAD)
        try:
            size = container.header_size(head)
            if size > len(head):
                head = self._ranges.head(size)
            header = container.parse(head)
        except ValueError as error:
            raise _unreadable(self._where, error) from None
        if self._ranges.size is not None and self._ranges.size != header.end:
            raise _unreadable(self._where, f"{self._ranges.size} bytes, where its header says {header.end}")
        format1.check_header(header, self._where)
        self.metadata, self._entries, self.size = header.metadata, header.entries, header.end
        try:
            self.spec = RoutingSpec.from_json(self.metadata["spec"])
        except (KeyError, SpecError) as error:
            raise ShardError(f"a shard without a routing spec ({error})", where=self._where) from None
        shape, spans = self._entries["routed_experts"].shape, self._entries["spans"]
        if (shape[0], shape[2]) != (self.spec.num_moe_layers, self.spec.top_k):
            raise ShardError(
                "routed_experts do not fit the spec", where=self._where, expected=self.spec.brief(), got=list(shape)
            )
        self.num_tokens = shape[1]
        table = spans.of(np.frombuffer(head, np.uint8)) if spans.end <= len(head) else self._read("spans")
        format1.verify_parts(self.metadata, "spans", {0: table}, self._where)
        try:
            columns = format1.unpack_spans(table, self.num_tokens)
        except ShardError as error:
            raise error.at(self._where) from None
        self.recorded: Mask = columns["recorded"] != 0
        self.loss_mask: Mask = columns["loss_mask"] != 0
        self.weight_version = columns["weight_version"]
        self._has_logprob: Mask = columns["has_logprob"] != 0

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._ranges.close()

    def tokens(self) -> npt.NDArray[Any]:
        """[T] int32 or int64, verified."""
        array = self._read("tokens")
        format1.verify_parts(self.metadata, "tokens", {0: array}, self._where)
        return format1.token_ids(array)

    def rollout_logprobs(self) -> npt.NDArray[np.float32]:
        """[T] float32, NaN where there is none; verified."""
        array = self._read("rollout_logprobs")
        format1.verify_parts(self.metadata, "rollout_logprobs", {0: array}, self._where)
        if len(array) != np.count_nonzero(self._has_logprob):
            raise ShardError(
                "the log-probs of this shard do not fit its tokens",
                where=self._where,
                expected=int(np.count_nonzero(self._has_logprob)),
                got=len(array),
            )
        logprobs = np.full(self.num_tokens, np.nan, np.float32)
        logprobs[self._has_logprob] = array
        return logprobs

    def routes(
        self,
        layers: slice | Sequence[int] = slice(None),
        tokens: slice = slice(None),
        *,
        verify: bool | None = None,
    ) -> Routes:
        """The routes of some MoE layers (by position on the layer axis, as in `Routes.layers`) and a range of tokens.

        Args:
            layers: Positions; consecutive ones are one read.
            tokens: A slice with step 1.
            verify: Checksums are of whole layers. By default they are compared where whole layers are read; True
                reads whole layers for it, False compares none.

        Raises:
            ShardError: damaged, or cut.
            IndexError: no such layer.
        """
        entry = self._entries["routed_experts"]
        num_layers, num_tokens, top_k = entry.shape
        which = list(range(num_layers)[layers]) if isinstance(layers, slice) else [range(num_layers)[i] for i in layers]
        start, stop, step = tokens.indices(num_tokens)
        if step != 1:
            raise ValueError(f"tokens are read as a range, with step 1, not {step}")
        stop = max(start, stop)
        whole = (start, stop) == (0, num_tokens)
        if verify and not whole:
            all_tokens = self.routes(layers, verify=True)
            return Routes(all_tokens.ids[:, start:stop].copy(), all_tokens.recorded[start:stop])
        ids = np.empty((len(which), stop - start, top_k), entry.dtype)
        row = top_k * entry.dtype.itemsize
        cuts = [i for i in range(len(which)) if not whole or i == 0 or which[i] != which[i - 1] + 1]
        self._ranges.fill(
            [
                (entry.begin + (which[first] * num_tokens + start) * row, container.bytes_of(ids[first:last]))
                for first, last in zip(cuts, [*cuts, len(which)][1:], strict=True)
            ]
        )
        if whole and verify is not False:
            format1.verify_parts(self.metadata, "routed_experts", dict(zip(which, ids, strict=True)), self._where)
        return Routes(ids, self.recorded[start:stop])

    def _read(self, name: str) -> npt.NDArray[Any]:
        entry = self._entries[name]
        array = np.empty(math.prod(entry.shape), entry.dtype)
        self._ranges.fill([(entry.begin, container.bytes_of(array))])
        return array.reshape(entry.shape)


def pieces(sample: RolloutSample) -> list[memoryview]:
    """The bytes of a shard, as pieces to be written one after the other; arrays are not copied."""
    return container.pack(*format1.encode(sample), format1.LAYERED)


def _decode(data: npt.NDArray[np.uint8], verify: bool, where: str) -> RolloutSample:
    head = data.data
    try:
        header = container.parse(head)
        if header.end != len(data):
            raise ValueError(f"{len(data)} bytes, where its header says {header.end}")
    except ValueError as error:
        raise _unreadable(where, error) from None
    format1.check_header(header, where)
    tensors = {name: entry.of(data) for name, entry in header.entries.items()}
    if verify:
        format1.verify(header.metadata, tensors, where)
    return format1.decode(header.metadata, tensors, where)


def _unreadable(where: str, reason: object) -> ShardError:
    return ShardError(
        f"not a readable shard ({reason})",
        where=where,
        remedy="the file was not written by r3, or was cut or damaged afterwards; delete it and collect the sample again",
    )
