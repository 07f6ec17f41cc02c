"""wire: decode what an engine sent into Routes, and trust none of it.

A payload comes from another process, another version, often through a gateway. Known ways in which it is wrong without
an error anywhere: all zeros because the kernel never captured, a missing layer, dense layers counted or not counted,
physical instead of logical ids, a truncated body, another sample's rows. So nothing is accepted here that a check on the
bytes could have refused, and each refusal names the probable cause.

vLLM 0.22 and later (`decode_vllm`): base64 of a `.npy`, array [rows, layers, K] in token order; layers are all hidden
layers (dense ones are zeros) or MoE layers only; rows are N-1 or N for N tokens, less the first `start` prompt rows if the
request asked for that. Contract: no pickle, header bounded to 1 KiB, nothing allocated before the byte count agrees.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64

from r3.errors import WireError
from r3.routes import Routes
from r3.spec import RoutingSpec

_NPY_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 1024  # numpy writes 118 bytes for three dimensions
_DTYPES = ("|u1", "<u2", "<i2", "<i4")  # what engines send: uint8/uint16 from vLLM 0.22 on, int16 and int32 before
_DESCR = re.compile(r"'descr'\s*:\s*'([^']{1,16})'")
_ORDER = re.compile(r"'fortran_order'\s*:\s*(True|False)")
_SHAPE = re.compile(r"'shape'\s*:\s*\(([0-9,\s]*)\)")


def encode_vllm(rows: npt.NDArray[Any]) -> str:
    """Rows [R, layers, K] as vLLM 0.22+ sends them: base64 of `np.save` bytes. The inverse of `decode_vllm`'s first half."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return pybase64.b64encode_as_string(buffer.getvalue())


def decode_vllm(
    payload: Any, spec: RoutingSpec, *, num_tokens: int, start: int = 0, where: str = "routed_experts"
) -> Routes:
    """Routes of one sequence from vLLM's `choices[i].routed_experts`.

    Args:
        payload: The JSON value: a base64 string.
        spec: The routing of the model that sampled.
        num_tokens: N, prompt and sampled tokens together.
        start: The request's `routed_experts_prompt_start`: that many prompt rows were not sent and stay unrecorded.
        where: Place for messages, e.g. the sample.

    Returns:
        Routes of `num_tokens` tokens; rows that were not sent (the last token's as a rule) are unrecorded.

    Raises:
        WireError: naming the check, the place and the probable cause.
    """
    if payload is None:
        raise WireError(
            "the engine returned no routes (null)",
            where=where,
            remedy="start vLLM with --enable-return-routed-experts, do not stream, and call it without a gateway that "
            "rewrites responses; vLLM before 0.22 has no routes over HTTP",
        )
    return routes_from_rows(
        parse_npy(decode_base64(payload, where), where), spec, num_tokens=num_tokens, start=start, where=where
    )


def decode_base64(payload: Any, where: str) -> bytes:
    if not isinstance(payload, (str, bytes)):
        raise WireError(
            "routes are not a base64 string",
            where=where,
            expected="str",
            got=type(payload).__name__,
            remedy="lists are vLLM 0.21's own format; upgrade vLLM to 0.22 or later",
        )
    try:
        return pybase64.b64decode(payload, validate=True)
    except ValueError as error:  # binascii.Error among them
        raise WireError(
            f"routes are not valid base64 ({error})",
            where=where,
            expected="a length that is a multiple of 4",
            got=f"{len(payload)} characters",
            remedy="the response was cut or rewritten on its way: look for a proxy with a body limit",
        ) from None


def parse_npy(data: bytes, where: str = "routed_experts") -> npt.NDArray[Any]:
    """A read-only view of the integer array in `.npy` bytes; no pickle, nothing allocated by the header's word."""
    if data[:6] != _NPY_MAGIC:
        raise WireError(
            "routes are not a .npy file",
            where=where,
            expected="bytes that start with \\x93NUMPY (vLLM 0.22 and later)",
            got=data[:8],
            remedy="raw bytes without a header are SGLang's format: this is not a vLLM server",
        )
    major = data[6] if len(data) > 6 else 0
    if major not in (1, 2, 3):
        raise WireError("unknown .npy version", where=where, expected="1, 2 or 3", got=major)
    size_bytes = 2 if major == 1 else 4
    begin = 8 + size_bytes
    length = int.from_bytes(data[8:begin], "little")
    if len(data) < begin or length > _MAX_HEADER or len(data) < begin + length:
        raise WireError(
            "the .npy header is not credible",
            where=where,
            expected=f"at most {_MAX_HEADER} bytes, all present",
            got=f"a length of {length} in a payload of {len(data)} bytes",
            remedy="the payload was cut or is hostile",
        )
    header = data[begin : begin + length].decode("latin-1")
    descr, order, shape_text = _DESCR.search(header), _ORDER.search(header), _SHAPE.search(header)
    if descr is None or descr[1] not in _DTYPES:
        raise WireError(
            "the .npy array has a dtype that no engine sends",
            where=where,
            expected=", ".join(_DTYPES),
            got=descr[1] if descr else header[:80],
            remedy="object arrays would need pickle, which can run code, and are never loaded",
        )
    if order is None or shape_text is None or order[1] == "True":
        raise WireError("the .npy array is not in C order with a plain shape", where=where, got=header[:120])
    shape = tuple(int(n) for n in shape_text[1].replace(" ", "").split(",") if n)
    dtype = np.dtype(descr[1])
    body = len(data) - begin - length
    if math.prod(shape) * dtype.itemsize != body:
        raise WireError(
            "the .npy body is not what its header announces",
            where=where,
            expected=f"{math.prod(shape) * dtype.itemsize} bytes for shape {shape} of {dtype}",
            got=f"{body} bytes",
            remedy="the response was cut on its way: look for a proxy or client with a body limit",
        )
    return np.frombuffer(data, dtype, offset=begin + length).reshape(shape)


def routes_from_rows(
    rows: npt.NDArray[Any], spec: RoutingSpec, *, num_tokens: int, start: int = 0, where: str = "routed_experts"
) -> Routes:
    """Checked Routes from an integer array [rows, layers, K], as in-process engines return it.

    Arguments, result and errors as in `decode_vllm`. The array is copied: engines hand out read-only or reused memory.
    """
    rows = _layers_of_spec(_check_shape(rows, spec, num_tokens, start, where), spec, where)
    _check_range(rows, spec, start, where)
    _check_content(rows, spec, start, where)
    ids = np.zeros((spec.num_moe_layers, num_tokens, spec.top_k), spec.dtype)
    ids[:, start : start + rows.shape[0]] = rows.transpose(1, 0, 2)
    position = np.arange(num_tokens)
    return Routes(ids, (position >= start) & (position < start + rows.shape[0]))


def _check_shape(
    rows: npt.NDArray[Any], spec: RoutingSpec, num_tokens: int, start: int, where: str
) -> npt.NDArray[Any]:
    if rows.ndim != 3:
        raise WireError(
            "routes are not [rows, layers, top-k]", where=where, expected="3 dimensions", got=list(rows.shape)
        )
    if rows.dtype.kind not in "iu":
        raise WireError("expert ids are not integers", where=where, expected="an integer dtype", got=rows.dtype)
    num_rows, _, top_k = rows.shape
    if top_k != spec.top_k:
        raise WireError(
            "the engine routed each token to another number of experts",
            where=where,
            expected=f"top-{spec.top_k}",
            got=f"top-{top_k}",
            remedy="the spec is of another model than the one that is served",
        )
    want = num_tokens - start
    if num_rows not in (want, want - 1):
        causes = {
            num_tokens: "the engine ignored routed_experts_prompt_start (vLLM before 0.28 on its OpenAI routes)",
            num_tokens - 1: "the engine ignored routed_experts_prompt_start (vLLM before 0.28 on its OpenAI routes)",
            want + 1: "one row too many: speculative decoding, or tokens cut without their rows",
            want - 2: "one row too few: the engine dropped the row of a stop token",
        }
        raise WireError(
            "rows do not fit the tokens",
            where=where,
            expected=f"{want - 1} or {want} rows for {num_tokens} tokens"
            + (f" less {start} not asked for" if start else ""),
            got=num_rows,
            remedy=causes.get(
                num_rows, "tokens and routes are of different sequences, or one was cut without the other"
            ),
        )
    return rows


def _layers_of_spec(rows: npt.NDArray[Any], spec: RoutingSpec, where: str) -> npt.NDArray[Any]:
    """Rows [R, L, K] of the MoE layers alone: engines return all hidden layers or only the MoE layers."""
    num_layers = rows.shape[1]
    if num_layers == spec.num_moe_layers:
        return rows
    if num_layers != spec.num_layers:
        raise WireError(
            "the layer axis fits neither all hidden layers nor the MoE layers",
            where=where,
            expected=f"{spec.num_layers} or {spec.num_moe_layers}",
            got=num_layers,
            remedy="the spec is of another model, or the engine lost layers (pipeline parallelism is not captured by vLLM)",
        )
    dense = sorted(set(range(num_layers)) - set(spec.moe_layers))
    if rows[:, dense].any():
        layer = next(i for i in dense if rows[:, i].any())
        raise WireError(
            "a layer that should be dense has expert ids",
            where=f"{where}: layer {layer}",
            expected="zeros in layers " + ", ".join(map(str, dense)),
            got=f"ids {rows[:, layer].any(axis=1).argmax()}...",
            remedy="the spec's moe_layers are not those of the served model: every MoE layer would be shifted",
        )
    return rows[:, list(spec.moe_layers)]


def _check_range(rows: npt.NDArray[Any], spec: RoutingSpec, start: int, where: str) -> None:
    if rows.size == 0 or (int(rows.min()) >= 0 and int(rows.max()) < spec.num_experts):
        return
    row, layer, slot = (int(i) for i in np.argwhere((rows < 0) | (rows >= spec.num_experts))[0])
    value = int(rows[row, layer, slot])
    if value in (-1, 255, 65535):
        cause = "this is a padding value: rows of padded or foreign tokens leaked into the capture"
    elif value < 0:
        cause = "ids were narrowed to a signed type somewhere (uint8 read as int8)"
    else:
        cause = "physical ids of an expert-parallel placement, a fused shared expert, or the spec of another model"
    raise WireError(
        "an expert id is out of range",
        where=f"{where}: token {row + start}, layer {spec.moe_layers[layer]}",
        expected=f"0..{spec.num_experts - 1}",
        got=value,
        remedy=cause,
    )


def _check_content(rows: npt.NDArray[Any], spec: RoutingSpec, start: int, where: str) -> None:
    """Zero rows, zero layers, repeated ids. The ids of one token and layer are distinct, so with K > 1 a token and layer
    of zeros alone cannot be real; with K = 1 expert 0 is legal and only a payload of nothing but zeros is suspect."""
    num_rows = rows.shape[0]
    if num_rows == 0 or spec.num_experts == 1:
        return
    planes = np.ascontiguousarray(
        np.moveaxis(rows, 2, 0)
    )  # [K, R, L]: every comparison below runs over contiguous memory
    nonzero = np.bitwise_or.reduce(planes, axis=0) != 0  # [R, L]
    if not nonzero.any() and (spec.top_k > 1 or num_rows * spec.num_moe_layers >= 64):
        raise WireError(
            "every expert id is 0",
            where=where,
            remedy="the engine's MoE kernel does not call the capture hook: vLLM 0.15, vLLM 0.22-0.26 with a monolithic "
            "kernel or on a CPU; use a version or a backend that captures",
        )
    if spec.top_k == 1:
        return
    empty_rows = np.flatnonzero(~nonzero.any(axis=1))
    if len(empty_rows):
        raise WireError(
            f"{len(empty_rows)} of {num_rows} rows are zeros in every layer",
            where=f"{where}: tokens {_ranges(empty_rows + start)}",
            expected="distinct expert ids",
            remedy=_cause_of_empty_rows(empty_rows, num_rows),
        )
    empty_layers = np.flatnonzero(~nonzero.any(axis=0))
    if len(empty_layers):
        raise WireError(
            f"{len(empty_layers)} of {spec.num_moe_layers} MoE layers are zeros in every row",
            where=f"{where}: layers {_ranges(np.asarray(spec.moe_layers)[empty_layers])}",
            expected="distinct expert ids",
            remedy="layers that another pipeline stage or another kernel ran were not captured, or the spec's moe_layers "
            "are not those of the served model",
        )
    for i in range(1, spec.top_k):
        for j in range(i):
            if (planes[i] == planes[j]).any():
                row, layer = (int(n) for n in np.argwhere(planes[i] == planes[j])[0])
                raise WireError(
                    "an expert is chosen twice for one token",
                    where=f"{where}: token {row + start}, layer {spec.moe_layers[layer]}",
                    expected=f"{spec.top_k} distinct ids",
                    got=rows[row, layer].tolist(),
                    remedy="a row that was captured in part, padding, or mixed layers; the routes of this sample cannot be used",
                )


def _cause_of_empty_rows(empty: npt.NDArray[np.intp], num_rows: int) -> str:
    if empty[0] == 0 and len(empty) == empty[-1] + 1:
        return "leading rows: a prefix-cache hit, KV transfer or offloaded block lost them; upgrade the engine or turn it off"
    if empty[-1] == num_rows - 1 and len(empty) == num_rows - empty[0]:
        return "trailing rows: padding, or a tensor- or sequence-parallel shard was captured alone"
    return "rows in the middle: a preempted or retracted request whose rows were lost"


def _ranges(numbers: npt.NDArray[Any], limit: int = 4) -> str:
    """`0-3, 7, 9-12, ...` for messages."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = [(int(run[0]), int(run[-1])) for run in np.split(numbers, cuts)]
    text = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:limit]]
    return ", ".join(text + (["..."] if len(runs) > limit else []))
