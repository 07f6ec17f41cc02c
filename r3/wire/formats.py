"""formats: every way in which an engine or a gateway writes routes, read into one integer array [rows, layers, K], and written.

    npy       base64 of a `.npy` file            vLLM 0.22 and later, vllm-ascend
    int32     base64 of raw little-endian int32  SGLang, sglang-jax; or the same as bytes or a flat tensor
    lists     nested lists of integers           vLLM 0.21, LMDeploy
    array     anything array-like, torch too     engines in this process: vLLM 0.14 and later, TensorRT-LLM
    envelope  {data, shape, dtype, start}        Dynamo, prime-rl, verifiers; base64, base85 or bytes

Nothing here knows what ids are allowed; `r3.wire` and `r3.wire.checks` do. Contract: no pickle; headers are bounded; nothing is
allocated on the word of a header or a shape, only for bytes that have arrived.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64

from r3.spec import RoutingSpec
from r3.wire.checks import refuse

Rows = npt.NDArray[Any]

_NPY_MAGIC = b"\x93NUMPY"
_NPY_IN_BASE64 = "k05VTVBZ"
_MAX_HEADER = 1024  # numpy writes 118 bytes for three dimensions
_DTYPES = ("|u1", "<u2", "<i2", "<i4")  # what engines send: uint8/uint16 from vLLM 0.22 on, int16 and int32 before
_DESCR = re.compile(r"'descr'\s*:\s*'([^']{1,16})'")
_ORDER = re.compile(r"'fortran_order'\s*:\s*(True|False)")
_SHAPE = re.compile(r"'shape'\s*:\s*\(([0-9,\s]*)\)")
_NAMES = {
    "uint8": "|u1",
    "uint16": "<u2",
    "int16": "<i2",
    "int32": "<i4",
    "u1": "|u1",
    "u2": "<u2",
    "i2": "<i2",
    "i4": "<i4",
}
_BY_SIZE = {1: "|u1", 2: "<u2", 4: "<i4"}  # an envelope without a dtype: prime-rl's first ones
_KEY = 128  # characters: longer than any object-store key, shorter than any payload worth sending


def encode_npy(rows: Rows) -> str:
    """Rows [R, layers, K] as vLLM 0.22 and later send them: base64 of `np.save` bytes."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return pybase64.b64encode_as_string(buffer.getvalue())


def encode_int32(rows: Rows) -> str:
    """Rows as SGLang sends them: base64 of raw little-endian int32."""
    return pybase64.b64encode_as_string(np.ascontiguousarray(rows, "<i4").tobytes())


def encode_lists(rows: Rows) -> list[list[list[int]]]:
    """Rows as LMDeploy and vLLM 0.21 put them into JSON."""
    lists: list[list[list[int]]] = rows.tolist()
    return lists


def encode_envelope(rows: Rows, *, start: int = 0, encoding: str = "base64") -> dict[str, Any]:
    """Rows as Dynamo and prime-rl wrap them; `encoding` is base64 or base85."""
    data = np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).tobytes()
    envelope: dict[str, Any] = {"shape": list(rows.shape), "dtype": str(rows.dtype), "start": start}
    if encoding == "base85":
        return {"data": base64.b85encode(data).decode(), **envelope, "encoding": encoding}
    return {"data": pybase64.b64encode_as_string(data), **envelope}


def decode_base64(payload: Any, where: str) -> bytes:
    if not isinstance(payload, (str, bytes, bytearray, memoryview)):
        raise refuse(
            "encoding",
            "routes are not a base64 string",
            where,
            expected="str",
            got=type(payload).__name__,
            remedy="lists are vLLM 0.21's own format; upgrade vLLM to 0.22 or later",
        )
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError as error:  # binascii.Error among them; non-ASCII text too
        raise refuse(
            "encoding",
            f"routes are not valid base64 ({error})",
            where,
            expected="a length that is a multiple of 4",
            got=f"{len(payload)} characters",
            remedy="a text this short is no payload but an object-store key (LMDeploy with enable_transfer_obj_ref): fetch the "
            "object, once, with the engine's own client"
            if len(payload) <= _KEY
            else "the response was cut or rewritten on its way: look for a proxy with a body limit",
        ) from None


def parse_npy(data: bytes, where: str = "routed_experts") -> Rows:
    """A read-only view of the integer array in `.npy` bytes; no pickle, nothing allocated by the header's word.

    Raises:
        WireError: not a `.npy` file of integers that engines send, or not whole.
    """
    if data[:6] != _NPY_MAGIC:
        raise refuse(
            "encoding",
            "routes are not a .npy file",
            where,
            expected="bytes that start with \\x93NUMPY (vLLM 0.22 and later)",
            got=data[:8],
            remedy="raw bytes without a header are SGLang's format: this is not a vLLM server",
        )
    major = data[6] if len(data) > 6 else 0
    if major not in (1, 2, 3):
        raise refuse("npy", "unknown .npy version", where, expected="1, 2 or 3", got=major)
    begin = 10 if major == 1 else 12
    length = int.from_bytes(data[8:begin], "little")
    if len(data) < begin or length > _MAX_HEADER or len(data) < begin + length:
        raise refuse(
            "npy",
            "the .npy header is not credible",
            where,
            expected=f"at most {_MAX_HEADER} bytes, all present",
            got=f"a length of {length} in a payload of {len(data)} bytes",
            remedy="the payload was cut or is hostile",
        )
    header = data[begin : begin + length].decode("latin-1")
    descr, order, shape = _DESCR.search(header), _ORDER.search(header), _SHAPE.search(header)
    if descr is None or descr[1] not in _DTYPES:
        raise refuse(
            "npy",
            "the .npy array has a dtype that no engine sends",
            where,
            expected=", ".join(_DTYPES),
            got=descr[1] if descr else header[:80],
            remedy="object arrays would need pickle, which can run code, and are never loaded",
        )
    if order is None or shape is None or order[1] == "True":
        raise refuse("npy", "the .npy array is not in C order with a plain shape", where, got=header[:120])
    numbers = tuple(int(n) for n in re.findall("[0-9]+", shape[1]))
    return _view(
        data, begin + length, descr[1], numbers, "npy", "the .npy body is not what its header announces", where
    )


def is_npy(payload: str | bytes) -> bool:
    """Do these bytes, or the base64 of some, begin as a `.npy` file does?"""
    if isinstance(payload, str):
        return payload.startswith(_NPY_IN_BASE64)
    return payload.startswith((_NPY_MAGIC, _NPY_IN_BASE64.encode()))


def read_npy(payload: Any, where: str) -> Rows:
    """vLLM's base64, or the `.npy` bytes themselves."""
    if isinstance(payload, (bytes, bytearray, memoryview)) and bytes(payload[:6]) == _NPY_MAGIC:
        return parse_npy(bytes(payload), where)
    return parse_npy(decode_base64(payload, where), where)


def read_int32(data: bytes, spec: RoutingSpec, where: str) -> Rows:
    """SGLang's raw bytes. Nothing in them says a shape: they are all hidden layers, as every engine of this format sends them."""
    row = 4 * spec.num_layers * spec.top_k
    rows = np.frombuffer(data, "<i4").reshape(-1, spec.num_layers, spec.top_k) if len(data) % row == 0 else None
    is_key = len(data) <= _KEY and (rows is None or bool((rows >= 1 << 16).any()))
    if rows is None or is_key:
        raise refuse(
            "encoding",
            "raw routes are not whole rows of int32",
            where,
            expected=f"a multiple of {row} bytes: {spec.num_layers} layers x top-{spec.top_k} x 4",
            got=f"{len(data)} bytes, beginning {data[:8]!r}",
            cause="a text this short is an object-store key (LMDeploy with enable_transfer_obj_ref), or the response was cut"
            if is_key
            else "the spec is of another model, or the response was cut on its way",
        )
    return rows


def read_lists(payload: Any, where: str) -> Rows:
    """Nested lists from JSON."""
    try:
        rows = np.asarray(payload)
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise refuse("encoding", f"routes are not rectangular lists ({str(error)[:120]})", where) from None
    if rows.dtype.kind not in "iu" and rows.size:
        raise refuse("encoding", "expert ids are not integers", where, expected="lists of integers", got=rows.dtype)
    return rows.astype(np.int64, copy=False)


def read_array(payload: Any, where: str) -> Rows:
    """A numpy array, or what can become one: torch tensors (also on an accelerator), jax arrays."""
    if not isinstance(payload, np.ndarray):
        for move in ("detach", "cpu"):
            payload = getattr(payload, move)() if callable(getattr(payload, move, None)) else payload
        payload = payload.numpy() if callable(getattr(payload, "numpy", None)) else payload
    try:
        rows = np.asarray(payload)
    except (ValueError, TypeError) as error:
        raise refuse("encoding", f"routes are not an array ({error})", where, got=type(payload).__name__) from None
    return rows if rows.dtype.isnative else rows.astype(rows.dtype.newbyteorder("="))


def read_envelope(payload: Mapping[str, Any], where: str) -> tuple[Rows, int | None]:
    """Rows and the start that the envelope names, None if it names none."""
    data, shape, start = payload.get("data"), payload.get("shape"), payload.get("start")
    if not _is_count(start) and start is not None:
        raise refuse("encoding", "the envelope's start is no position", where, expected="an integer from 0", got=start)
    data = bytes(data) if isinstance(data, (bytearray, memoryview)) else data
    if not isinstance(data, (str, bytes)):
        raise refuse(
            "encoding", "an envelope without data", where, expected="data, shape, dtype", got=sorted(map(str, payload))
        )
    if is_npy(data):
        return read_npy(data, where), start
    if not isinstance(shape, (list, tuple)) or not 1 <= len(shape) <= 8 or not all(map(_is_count, shape)):
        raise refuse(
            "encoding", "the envelope's shape is no shape", where, expected="a list of integers", got=str(shape)[:80]
        )
    count = math.prod(shape)
    named = payload.get("dtype")
    descr = None if named is None else _NAMES.get(str(named).rpartition(".")[2].lstrip("<|"))
    if named is not None and descr is None:
        raise refuse("encoding", "a dtype that no engine sends", where, expected=", ".join(_NAMES), got=str(named)[:40])
    sizes = [np.dtype(descr).itemsize] if descr else sorted(_BY_SIZE)
    raw = _envelope_bytes(data, str(payload.get("encoding") or ""), [count * size for size in sizes], where)
    if raw[:6] == _NPY_MAGIC:
        return parse_npy(raw, where), start
    descr = descr or _BY_SIZE.get(len(raw) // count if count else 1, "|u1")
    return _view(
        raw, 0, descr, tuple(shape), "encoding", "the envelope's data is not what its shape announces", where
    ), start


def _envelope_bytes(data: str | bytes, encoding: str, sizes: list[int], where: str) -> bytes:
    """The bytes of an envelope: raw, base64, or base85 (older), told by the length that the shape asks for."""
    if isinstance(data, bytes) and (encoding == "raw" or len(data) in sizes):
        return data
    # prime-rl's first envelopes were base85 of int32 and did not say so. No length of 4n bytes is the same in both encodings.
    in_85 = {size // 4 * 5 for size in sizes if size % 4 == 0}
    is_85 = encoding in ("base85", "b85") if encoding else len(data) in in_85
    if not is_85:
        return decode_base64(data, where)
    try:
        return base64.b85decode(data)
    except ValueError as error:
        raise refuse(
            "encoding", f"routes are not valid base85 ({error})", where, got=f"{len(data)} characters"
        ) from None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


def _view(data: bytes, offset: int, descr: str, shape: tuple[int, ...], check: str, what: str, where: str) -> Rows:
    """The array in bytes that are all there: the shape is believed only as far as it agrees with their number."""
    dtype, body = np.dtype(descr), len(data) - offset
    if len(shape) > 8 or math.prod(shape) * dtype.itemsize != body or (body == 0 and max(shape, default=0) > 1 << 16):
        raise refuse(
            check,
            what,
            where,
            expected=f"{math.prod(shape) * dtype.itemsize} bytes for shape {shape} of {dtype}"[:200],
            got=f"{body} bytes",
            remedy="the response was cut on its way: look for a proxy or client with a body limit",
        )
    return (
        np.frombuffer(data, dtype, body // dtype.itemsize, offset).reshape(shape)
        if body
        else np.empty(shape[:3], dtype)
    )
