"""Format 1: a RolloutSample as named tensors and metadata, and back. Specified in docs/shard-format.md.

    routed_experts    [L, T, K] u8 (up to 256 experts) or u16    layer-major: a pipeline stage's layers are one range
    tokens            [B, T] u8         the lowest byte of each token id, the next, ...: B as few as the largest id needs
    rollout_logprobs  [M] f32           of the tokens that have one, in order
    spans             [S, 5] i32        runs of tokens that are alike: COLUMNS

L MoE layers, T tokens, K top-k. 48 layers, top-8 of 128 experts are 384 bytes a token; two percent of that, 7.68 bytes,
is all there is for everything else. A token id of 3 bytes and a log-prob of 4 fit; int32 ids (4) or one byte for each
mask would not. The masks and the weight version change a few times in a sample, so they are spans: three rows of 20
bytes for a single-turn sample, whatever its length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from r3.errors import R3Error, ShardError
from r3.routes import Routes
from r3.sample import Provenance, RolloutSample, narrow_tokens, token_digest
from r3.shard.container import ALGORITHM, Header, bytes_of, checksum
from r3.spec import RoutingSpec

FORMAT, VERSION = "r3", "1"
# Dtypes and dimensions, in the file's order: the widest dtype first, so that each tensor is aligned.
TENSORS = {"spans": ("i4", 2), "rollout_logprobs": ("f4", 1), "routed_experts": ("u1 u2", 3), "tokens": ("u1", 2)}
LAYERED = ("routed_experts",)  # has a checksum for each layer, so that a slice can be verified
COLUMNS = ("length", "recorded", "loss_mask", "has_logprob", "weight_version")

_PROVENANCE = tuple(each.name for each in fields(Provenance))

_spec_json = lru_cache(maxsize=16)(RoutingSpec.to_json)  # 50 us for a model of 48 layers, the same for every sample

Array = npt.NDArray[Any]


def encode(sample: RolloutSample) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors and the metadata of a sample, but for the checksums (`r3.shard.container.pack` adds them)."""
    has_logprob = sample.rollout_logprobs == sample.rollout_logprobs  # not NaN
    tensors = {
        "spans": _spans(sample.routes.recorded, sample.loss_mask, has_logprob, sample.weight_version),
        "rollout_logprobs": sample.rollout_logprobs[has_logprob],
        "routed_experts": np.ascontiguousarray(sample.routes.ids),
        "tokens": _token_planes(sample.tokens),
    }
    provenance = {name: getattr(sample.provenance, name) for name in _PROVENANCE}
    provenance["extra"] = orjson.dumps(provenance["extra"], option=orjson.OPT_SORT_KEYS).decode()
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "sample_id": sample.sample_id,
        "group_id": sample.group_id,
        "spec": _spec_json(sample.spec),
        "prompt_length": str(sample.prompt_length),
        "token_digest": sample.token_digest,
        **{name: value if isinstance(value, str) else repr(value) for name, value in provenance.items()},
    }
    return tensors, metadata


def decode(metadata: Mapping[str, str], tensors: Mapping[str, Array], where: str) -> RolloutSample:
    """The sample; ShardError if the parts do not fit each other."""
    try:
        ids, logprobs = tensors["routed_experts"], tensors["rollout_logprobs"]
        columns = unpack_spans(tensors["spans"], ids.shape[1])
        has_logprob = columns["has_logprob"] != 0
        rollout_logprobs = np.full(len(has_logprob), np.nan, np.float32)
        rollout_logprobs[has_logprob] = logprobs
        return RolloutSample(
            sample_id=metadata["sample_id"],
            group_id=metadata["group_id"],
            spec=RoutingSpec.from_json(metadata["spec"]),
            tokens=token_ids(tensors["tokens"]),
            routes=Routes(ids, columns["recorded"] != 0),
            prompt_length=int(metadata["prompt_length"]),
            rollout_logprobs=rollout_logprobs,
            loss_mask=columns["loss_mask"] != 0,
            weight_version=columns["weight_version"],
            provenance=provenance(metadata),
        )
    except KeyError as error:
        raise ShardError("the metadata of this shard is not complete", where=where, expected=error.args[0]) from None
    except (R3Error, ValueError, TypeError, IndexError) as error:
        raise ShardError(f"the parts of this shard do not fit each other: {error}", where=where) from None


def provenance(metadata: Mapping[str, str]) -> Provenance:
    """The provenance in a shard's metadata; KeyError or ValueError if it is not there."""
    values: dict[str, Any] = {name: metadata[name] for name in _PROVENANCE}
    values |= {"temperature": float(values["temperature"]), "top_p": float(values["top_p"])}
    values |= {"top_k": int(values["top_k"]), "extra": orjson.loads(values["extra"])}
    return Provenance(**values)


def check_header(header: Header, where: str) -> None:
    """Raise unless this is an undamaged header of a shard of version 1."""
    if header.metadata.get("format") != FORMAT:
        raise ShardError(
            "a safetensors file, but not a shard of routed experts",
            where=where,
            expected=f"metadata format={FORMAT}",
            got=f"format={header.metadata.get('format')!r}",
        )
    if header.metadata.get("version") != VERSION:
        raise ShardError(
            "this shard is of another format version",
            where=where,
            expected=f"version {VERSION}",
            got=f"version {header.metadata.get('version')}",
            remedy="read it with the r3 that wrote it, or a later one",
        )
    if not header.sealed:
        raise ShardError(
            "damaged: the header does not match its checksum",
            where=where,
            remedy="delete the file and collect the sample again; a shard cannot be edited or saved again by other tools",
        )
    for name, (dtypes, dimensions) in TENSORS.items():
        entry = header.entries.get(name)
        if entry is None:
            raise ShardError(
                "a shard without all of its tensors", where=where, expected=list(TENSORS), got=list(header.entries)
            )
        if entry.dtype.str[1:] not in dtypes.split() or len(entry.shape) != dimensions:
            raise ShardError(
                "a tensor is not what format 1 says",
                where=f"{where}: {name}",
                expected=f"{dimensions} dimensions of {dtypes}",
                got=f"{list(entry.shape)} of {entry.dtype}",
            )


def verify(metadata: Mapping[str, str], tensors: Mapping[str, Array], where: str) -> None:
    """Raise unless every tensor, also one that this version does not know, matches its checksum."""
    for name, array in tensors.items():
        verify_parts(metadata, name, dict(enumerate(array if name in LAYERED else [array])), where)
    digest = token_digest(token_ids(tensors["tokens"]))
    if metadata.get("token_digest") != digest:
        raise ShardError(
            "the tokens are not those that the routes were recorded for",
            where=where,
            expected=metadata.get("token_digest"),
            got=digest,
        )


def verify_parts(metadata: Mapping[str, str], name: str, some: Mapping[int, Array], where: str) -> None:
    """Raise unless these parts of a tensor, by index, match their checksums."""
    digests = metadata.get(f"checksum.{name}", "").removeprefix(ALGORITHM).split(",")
    for index, array in some.items():
        expected, got = (
            digests[index] if index < len(digests) else "",
            checksum(bytes_of(array)).removeprefix(ALGORITHM),
        )
        if expected != got:
            raise ShardError(
                "damaged: a tensor does not match its checksum",
                where=f"{where}: {name}" + (f"[{index}]" if name in LAYERED else ""),
                expected=expected or "a checksum in the metadata",
                got=got,
                remedy="delete the file and collect the sample again; check the disk",
            )


def token_ids(planes: Array) -> Array:
    """[T] int32 or int64 from [B, T] u8."""
    if not 1 <= len(planes) <= 8:
        raise ShardError("tokens are not planes of bytes", expected="[1..8, T] uint8", got=list(planes.shape))
    ids = np.zeros(planes.shape[1], np.int64)
    for number, plane in enumerate(planes):
        ids |= plane.astype(np.int64) << (8 * number)
    return narrow_tokens(ids)


def _token_planes(tokens: Array) -> Array:
    width = max(1, -(-int(tokens.max(initial=0)).bit_length() // 8))
    planes = np.empty((width, len(tokens)), np.uint8)
    for number in range(width):
        planes[number] = tokens >> (8 * number)
    return planes


def _spans(*columns: Array) -> npt.NDArray[np.int32]:
    """COLUMNS, given all but the length [T]: a row for each run of tokens that are alike in all of them, [S, 5]."""
    num_tokens = len(columns[0])
    if not num_tokens:
        return np.zeros((0, len(COLUMNS)), np.int32)
    changes = columns[0][1:] != columns[0][:-1]
    for column in columns[1:]:
        changes |= column[1:] != column[:-1]
    last = np.append(changes.nonzero()[0], num_tokens - 1)
    spans = np.empty((len(last), len(COLUMNS)), np.int32)
    spans[:, 0] = last + 1
    spans[1:, 0] -= spans[:-1, 0].copy()
    for number, column in enumerate(columns, 1):
        spans[:, number] = column[last]
    return spans


def unpack_spans(spans: Array, num_tokens: int) -> dict[str, npt.NDArray[np.int32]]:
    """Each of COLUMNS but the length, per token; ShardError unless the spans are of `num_tokens` tokens."""
    if spans.shape[1] != len(COLUMNS):
        raise ShardError("spans are not a table of five columns", expected=COLUMNS, got=list(spans.shape))
    lengths, flags = spans[:, 0].astype(np.int64), spans[:, 1:4]
    if (lengths < 1).any() or int(lengths.sum()) != num_tokens or (flags >> 1).any():
        raise ShardError("spans do not cover the tokens", expected=num_tokens, got=int(lengths.sum()))
    table = np.repeat(spans, lengths, axis=0)
    return {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(COLUMNS) if i}
