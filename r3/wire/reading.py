"""reading: find the routes in what an engine answered, tell their format, and read them into rows.

    response object --unpack--> payload --sniff--> format --r3.wire.formats--> rows [R, layers, K]

A payload may be the JSON value itself or the object around it: a choice, SGLang's `meta_info` or `sglext`, a whole response with
one choice. Formats are told by what they are, never by what the caller hopes: an engine behind a gateway may not be the one that
was asked. Contract: rows come out as they were sent; nothing of their content is looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from r3.errors import ConfigError
from r3.spec import RoutingSpec
from r3.wire import formats
from r3.wire.checks import refuse
from r3.wire.engines import Context, null_reasons

Rows = npt.NDArray[Any]

FORMATS = ("npy", "int32", "lists", "array", "envelope", "split")


@dataclass(frozen=True, eq=False)
class Payload:
    """What was found in a response.

    Attributes:
        rows: [R, layers, K], None if there are no routes.
        format: One of FORMATS, "" without routes.
        start: Where the payload itself says that its rows begin; None if it does not say.
        context: The caller's, completed by what the response told.
    """

    rows: Rows | None
    format: str
    start: int | None
    context: Context


def read(payload: Any, spec: RoutingSpec, where: str, context: Context, format: str | None) -> Payload:
    """Rows of a payload; `format` None finds out.

    Raises:
        WireError: not routes in this format.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError("no such format of routes", where=where, expected=", ".join(FORMATS), got=format)
    payload, context, found = _unpack(payload, context)
    format = format or found
    if is_null(payload):
        return Payload(None, "", None, context)
    format = format or _sniff(payload)
    start: int | None = None
    if format == "npy":
        rows = formats.read_npy(payload, where)
    elif format == "int32":
        rows = _int32(payload, spec, where)
    elif format == "lists":
        rows = formats.read_lists(payload, where)
    elif format == "envelope":
        if not isinstance(payload, Mapping):
            raise refuse("encoding", "not an envelope", where, expected="{data, shape}", got=type(payload).__name__)
        rows, start = formats.read_envelope(payload, where)
    elif format == "split":
        if not isinstance(payload, tuple) or len(payload) != 2:
            raise refuse("encoding", "not the two halves of vLLM 0.21", where, expected="(prompt, response)")
        rows, start = _split(payload[0], payload[1], where, context)
    else:
        rows = formats.read_array(payload, where)
        rows = _flat(rows, spec, where) if rows.ndim == 1 else rows
    return Payload(check_dimensions(rows, spec, where), format, start, context)


def is_null(payload: Any) -> bool:
    """No routes: JSON null, or the empty list of SGLang 0.5.7."""
    return payload is None or (isinstance(payload, (list, tuple)) and len(payload) == 0)


def check_dimensions(rows: Rows, spec: RoutingSpec, where: str) -> Rows:
    """The rows, if they are integers [R, layers, K] with the K of the spec."""
    if rows.ndim != 3:
        raise refuse(
            "shape", "routes are not [rows, layers, top-k]", where, expected="3 dimensions", got=list(rows.shape)
        )
    if rows.dtype.kind not in "iu":
        raise refuse("encoding", "expert ids are not integers", where, expected="an integer dtype", got=rows.dtype)
    if rows.shape[2] != spec.top_k:
        raise refuse(
            "shape",
            "the engine routed each token to another number of experts",
            where,
            expected=f"top-{spec.top_k}",
            got=f"top-{rows.shape[2]}",
            cause="the spec is of another model than the one that is served",
        )
    return rows


def _unpack(payload: Any, context: Context) -> tuple[Any, Context, str | None]:
    """The payload within the object that holds it; SGLang's `meta_info` also tells how many tokens were cached."""
    for _ in range(3):
        if not isinstance(payload, Mapping) or "data" in payload:
            break
        cached = payload.get("cached_tokens")
        if isinstance(cached, int) and context.cached_tokens is None:
            context = replace(context, cached_tokens=cached)
        prompt = payload.get("prompt_routed_experts")
        if prompt is not None:
            return (prompt, _inner({**payload, "prompt_routed_experts": None})), context, "split"
        payload = _inner(payload)
    return payload, context, None


def _inner(payload: Mapping[str, Any]) -> Any:
    for name in ("routed_experts", "meta_info", "sglext"):
        if payload.get(name) is not None:
            return payload[name]
    choices = payload.get("choices")
    if isinstance(choices, (list, tuple)) and len(choices) == 1 and isinstance(choices[0], Mapping):
        return choices[0].get("routed_experts")
    return None


def _sniff(payload: Any) -> str:
    if isinstance(payload, Mapping):
        return "envelope"
    if isinstance(payload, (list, tuple)):
        return "lists"
    if isinstance(payload, str):
        return "npy" if formats.is_npy(payload) else "int32"
    if isinstance(payload, (bytes, bytearray, memoryview)):
        return "npy" if formats.is_npy(bytes(payload[:8])) else "int32"
    return "array"


def _int32(payload: Any, spec: RoutingSpec, where: str) -> Rows:
    if isinstance(payload, (bytearray, memoryview)):
        payload = bytes(payload)
    if not isinstance(payload, (str, bytes)):
        return _flat(formats.read_array(payload, where), spec, where)
    raw = isinstance(payload, bytes) and b"\0" in payload[:4]  # an id below 2^24 has a zero byte, base64 has none
    data = payload if raw and isinstance(payload, bytes) else formats.decode_base64(payload, where)
    return formats.read_int32(data, spec, where)


def _flat(rows: Rows, spec: RoutingSpec, where: str) -> Rows:
    """SGLang's offline tensor: int32, flat or shaped."""
    if rows.ndim == 3 or rows.dtype.kind not in "iu":
        return rows
    if rows.size and (int(rows.max()) >= 1 << 31 or int(rows.min()) < -(1 << 31)):
        raise refuse("range", "an expert id is out of range", where, expected="int32", got=int(rows.max()))
    return formats.read_int32(rows.astype("<i4").tobytes(), spec, where)


def _split(prompt: Any, response: Any, where: str, context: Context) -> tuple[Rows, int | None]:
    """vLLM 0.21's two halves, joined. Without the first the rows begin after the prompt."""
    halves = [None if is_null(part) else _half(part, where) for part in (prompt, response)]
    parts = [part for part in halves if part is not None]
    if not parts:
        raise refuse("null", "neither prompt nor response has routes", where, remedy=null_reasons(context)[0])
    if any(part.ndim != 3 or part.shape[1:] != parts[0].shape[1:] for part in parts):
        raise refuse("shape", "prompt and response have other layers", where, got=[list(part.shape) for part in parts])
    known = context.prompt_tokens
    if halves[0] is None:
        if known is None:
            raise refuse(
                "rows",
                "the prompt's rows are not there, and where the response begins is not known",
                where,
                remedy="give context.prompt_tokens; vLLM 0.21 sends them for the first prompt of a batch alone",
            )
        return parts[0], known
    if known is not None and len(halves[0]) != known:
        raise refuse("rows", "the prompt's rows do not fit its tokens", where, expected=known, got=len(halves[0]))
    return np.concatenate(parts), 0


def _half(part: Any, where: str) -> Rows:
    return formats.read_lists(part, where) if isinstance(part, (list, tuple)) else formats.read_array(part, where)
