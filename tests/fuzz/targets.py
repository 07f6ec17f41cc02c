"""What the fuzzers run: one input of bytes, and everything that must hold whatever the bytes are.

A target returns True if the input was accepted. It raises `Garbage` if something was accepted that is not true of a record of
routes, and lets every exception through that is not one of r3's own: both are crashes to the fuzzer.
"""

from __future__ import annotations

import base64
import contextlib
import json
import warnings
from typing import Any

import numpy as np

from r3 import RoutingSpec, shard, wire
from r3.errors import R3Error, ShardError, WireError
from r3.sample import token_digest
from r3.shard import container, format1
from r3.wire.checks import LENIENT, STRICT
from r3.wire.engines import Context

SPECS = (
    RoutingSpec(4, (1, 2, 3), 8, 2),  # dense first
    RoutingSpec(2, (0, 1), 300, 8),  # uint16, a word of 16 bytes
    RoutingSpec(3, (0, 1, 2), 128, 8),  # a machine word for each token and layer
    RoutingSpec(3, (0, 2), 16, 1),  # top-1: zero is an expert
    RoutingSpec(2, (0, 1), 6, 3, zero_experts=2),  # id 0 may repeat
)
FORMATS = (None, "npy", "int32", "lists", "array", "envelope", "split")
WRAPS = ("base64", "text", "bytes", "json", "npy of rows", "int32 of rows", "envelope of rows", "lists of rows")
MOST_TOKENS = 12


class Garbage(AssertionError):
    """Something wrong was accepted."""


def decode_one(data: bytes) -> bool:
    """Six bytes choose spec, format, wrapping, tokens, start and policy; the rest is the payload."""
    if len(data) < 6:
        return False
    spec = SPECS[data[0] % len(SPECS)]
    format = FORMATS[data[1] % len(FORMATS)]
    wrap = WRAPS[data[2] % len(WRAPS)]
    num_tokens = data[3] % MOST_TOKENS
    start = min(data[4] % 4, num_tokens)
    policy = (STRICT, LENIENT)[data[5] & 1]
    context = Context(*(("", ""), ("vllm", "0.21.0"), ("lmdeploy", ""), ("sglang", "0.5.9"))[data[5] >> 1 & 3])
    payload, rows = wrapped(data[6:], wrap, spec)
    if format == "split":
        payload = tuple(payload) if isinstance(payload, list) and len(payload) == 2 else (payload, payload)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = wire.examine(
            payload, spec, num_tokens=num_tokens, start=start, format=format, policy=policy, context=context
        )
        try:
            routes = done.unwrap()
        except WireError as error:
            str(error)
            return False
    check_routes(routes.ids, routes.recorded, spec, num_tokens)
    if rows is not None and format != "split":
        check_places(routes.ids, routes.recorded, rows, spec, done)
    if policy is STRICT and done.num_marked:
        raise Garbage("a strict policy lost rows")
    return True


def wrapped(body: bytes, wrap: str, spec: RoutingSpec) -> tuple[Any, np.ndarray | None]:
    """The payload, and the rows that it holds if that is known."""
    if wrap == "base64":
        return base64.b64encode(body).decode(), None
    if wrap == "text":
        return body.decode("latin-1"), None
    if wrap == "bytes":
        return body, None
    if wrap == "json":
        try:
            return json.loads(body), None
        except (ValueError, RecursionError):
            return None, None
    # The body as ids of rows that are well formed: the fuzzer then looks for holes in the checks on content.
    hidden = body[:1] < b"\x80" or wrap == "int32 of rows"  # which has no shape: engines send all hidden layers
    layers = spec.num_layers if hidden else spec.num_moe_layers
    width = layers * spec.top_k
    count = min(len(body[1:]) // width, MOST_TOKENS)
    if count == 0:
        return None, None
    rows = np.frombuffer(body, np.uint8, count * width, 1).reshape(count, layers, spec.top_k)
    encode = {
        "npy of rows": wire.encode_vllm,
        "int32 of rows": wire.encode_sglang,
        "envelope of rows": wire.encode_envelope,
        "lists of rows": wire.encode_lmdeploy,
    }[wrap]
    return encode(rows), rows


def check_places(
    ids: np.ndarray, recorded: np.ndarray, rows: np.ndarray, spec: RoutingSpec, done: wire.Decoded
) -> None:
    """Every recorded row stands where the engine's count puts it, and its layers are the spec's."""
    moved = any(finding.check == "compacted" for finding in done.findings)
    layers = list(spec.moe_layers) if rows.shape[1] == spec.num_layers and not moved else range(spec.num_moe_layers)
    for token in np.flatnonzero(recorded).tolist():
        if not np.array_equal(ids[:, token], rows[token - done.start, layers]):
            raise Garbage(f"token {token} has the ids of another row or layer")


def check_routes(ids: np.ndarray, recorded: np.ndarray, spec: RoutingSpec, num_tokens: int) -> None:
    """The invariants of Routes, one token and layer at a time: slow and obviously right."""
    if ids.shape != (spec.num_moe_layers, num_tokens, spec.top_k) or ids.dtype != spec.dtype:
        raise Garbage(f"ids are {ids.dtype} {ids.shape}")
    if recorded.shape != (num_tokens,) or recorded.dtype != np.bool_:
        raise Garbage("the mask does not fit")
    for token in np.flatnonzero(recorded).tolist():
        every_layer = ids[:, token].tolist()
        for chosen in every_layer:
            repeatable = [e for e in chosen if e or not spec.zero_experts]
            if len(set(repeatable)) != len(repeatable) or max(chosen) >= spec.num_experts:
                raise Garbage(f"token {token} chose {chosen}")
        if spec.top_k > 1 and not any(map(any, every_layer)):
            raise Garbage(f"token {token} is zero in every layer")


def load_one(data: bytes) -> bool:
    """The bytes as a shard; and again with every checksum made right, without which no change would come past the first check."""
    accepted = _load(data)
    sealed = resealed(data)
    return (sealed is not None and sealed != data and _load(sealed)) or accepted


def resealed(data: bytes) -> bytes | None:
    """The same header and tensors with checksums that fit them; None if the header cannot be read at all."""
    try:
        header = container.parse(data)
        whole = np.frombuffer(data, np.uint8)
        tensors = {name: entry.of(whole) for name, entry in header.entries.items()}
    except ValueError:
        return None
    metadata = {name: value for name, value in header.metadata.items() if not name.startswith("checksum.")}
    if "tokens" in tensors:
        with contextlib.suppress(R3Error, ValueError, IndexError, TypeError):
            metadata["token_digest"] = token_digest(format1.token_ids(tensors["tokens"]))
    layered = [name for name in format1.LAYERED if name in tensors and tensors[name].ndim > 0]
    try:
        return b"".join(container.pack(tensors, metadata, layered))
    except ShardError:
        return None


def _load(data: bytes) -> bool:
    try:
        sample = shard.load(data)
    except ShardError as error:
        str(error)
        return False
    if not sample.num_tokens == sample.routes.num_tokens == len(sample.loss_mask) == len(sample.weight_version):
        raise Garbage("the parts of the sample differ in length")
    if (
        sample.routes.num_recorded
        and int(sample.routes.ids[:, sample.routes.recorded].max()) >= sample.spec.num_experts
    ):
        raise Garbage("an id out of range")
    try:
        again = shard.load(shard.save(sample))
    except R3Error as error:
        raise Garbage(f"a loaded sample cannot be saved: {error}") from error
    if again.token_digest != sample.token_digest or not again.routes.equal(sample.routes):
        raise Garbage("what was loaded is not what is saved")
    return True
