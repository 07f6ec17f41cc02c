"""The safetensors container of a shard: named arrays and string metadata, as bytes. Byte layout: docs/shard-format.md.

Tests hold this against the safetensors package in both directions. It is not used here because its writer puts metadata
in random order, so that equal samples differ in their bytes and a checksum of the header has nothing to stand on; and
because its reader wants a local file or all bytes, where a pipeline stage wants a few byte ranges of an object.

Contract: equal input gives equal bytes. What `parse` accepts is consistent: every tensor lies inside the file, in order,
without a gap, with as many bytes as its shape and dtype need. Nothing is allocated from a size that a header claims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from r3.errors import ShardError

HEAD = 4096  # bytes: the first read of a file; the header and the spans of a usual shard are in it
MAX_HEADER = 16 << 20
ALGORITHM = "xxh3_64:"

_DTYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_DTYPES |= {"F32": "<f4", "F64": "<f8", "BOOL": "?"}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}

# The digits of the header's own checksum come first in the file, so that they are found without a parser; they count as
# zeros while it is computed.
_PREFIX = b'{"__metadata__":{"checksum.header":"' + ALGORITHM.encode()
_DIGITS = slice(8 + len(_PREFIX), 8 + len(_PREFIX) + 16)


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: its dtype, shape, and the bytes begin..end-1 of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, data: npt.NDArray[np.uint8], start: int = 0) -> npt.NDArray[Any]:
        """The tensor as a view of `data`, which holds the file's bytes from `start` on."""
        return data[self.begin - start : self.end - start].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Header:
    """What a file says of itself. `end` is the size that the file must have."""

    metadata: dict[str, str]
    entries: dict[str, Entry]
    end: int
    sealed: bool  # its checksum is there and right


def pack(
    tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str], layered: Sequence[str] = ()
) -> list[memoryview]:
    """The bytes of a file, as pieces to be written one after the other. Tensors that are contiguous are not copied.

    Args:
        tensors: In the file's order.
        metadata: Strings; the checksums are added to them.
        layered: Names of the tensors that have a checksum for each index of their first axis.

    Raises:
        ShardError: metadata that is not text.
    """
    header: dict[str, Any] = {"__metadata__": {"checksum.header": ALGORITHM + "0" * 16, **metadata}}
    pieces, offset = [], 0
    for name, tensor in tensors.items():
        array = np.ascontiguousarray(tensor)
        piece = bytes_of(array)
        header["__metadata__"][f"checksum.{name}"] = checksum(piece, len(array) if name in layered else 1)
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + piece.nbytes],
        }
        pieces.append(piece)
        offset += piece.nbytes
    try:
        text = orjson.dumps(header)
    except TypeError as error:  # half of a surrogate pair
        raise ShardError(f"the metadata is not text that a file can hold ({error})") from None
    text += b" " * (-len(text) % 8)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    head[_DIGITS] = xxhash.xxh3_64_hexdigest(head).encode()
    return [memoryview(head), *pieces]


def header_size(head: bytes | memoryview) -> int:
    """Bytes before the first tensor, told from the first 8 bytes of the file; ValueError if there is no header."""
    if len(head) < 8:
        raise ValueError("shorter than 8 bytes")
    size = int.from_bytes(head[:8], "little")
    if size > MAX_HEADER:
        raise ValueError(f"a header of {size} bytes; at most {MAX_HEADER}")
    return 8 + size


def parse(head: bytes | memoryview) -> Header:
    """Read a header, of which all bytes must be there (there may be more); ValueError says what is wrong with it."""
    start = header_size(head)
    if len(head) < start:
        raise ValueError(f"ends within its header of {start} bytes")
    values = orjson.loads(head[8:start])  # raises a ValueError
    if not isinstance(values, dict):
        raise ValueError("the header is not a JSON object")
    metadata = values.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("the metadata is not a map of strings")
    entries = {name: _entry(name, value, start) for name, value in values.items()}
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise ValueError(f"tensor {name!r} does not begin where the one before it ends")
        end = entry.end
    return Header(metadata, entries, end, _sealed(bytearray(head[:start])))


def _entry(name: str, value: Any, start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = np.dtype(_DTYPES[value["dtype"]]), value["shape"], value["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tensor {name!r} is not described by a known dtype, a shape and two offsets") from None
    numbers = [*shape, begin, end] if isinstance(shape, list) else [None]
    if len(numbers) > 10 or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError(f"tensor {name!r} has sizes that are none")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} has other bytes than its shape needs")
    return Entry(dtype, tuple(shape), start + begin, start + end)


def _sealed(head: bytearray) -> bool:
    digits = bytes(head[_DIGITS])
    head[_DIGITS] = b"0" * len(digits)
    return xxhash.xxh3_64_hexdigest(head).encode() == digits


def bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """A contiguous array's bytes, not copied."""
    return array.reshape(-1).view(np.uint8).data


def checksum(data: memoryview, parts: int = 1) -> str:
    """The XXH3 (64 bit, seed 0) of each of `parts` equal parts, as hexadecimal digits."""
    size = data.nbytes // max(parts, 1)
    return ALGORITHM + ",".join(xxhash.xxh3_64_hexdigest(data[i * size : (i + 1) * size]) for i in range(parts))
