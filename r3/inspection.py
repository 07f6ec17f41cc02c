"""What `r3 inspect` and `r3 verify` say of a shard or a store, from the shards alone.

`inspect` reads the head of each shard, 4 KB: metadata and spans hold all that it counts. `verify` reads everything.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from rich.table import Table

from r3 import shard
from r3.errors import R3Error, ShardError, StoreError
from r3.shard import format1
from r3.shard.files import is_url
from r3.spec import RoutingSpec
from r3.store import ShardStore, id_in, is_store, require_named

_PROVENANCE = (
    "engine",
    "engine_version",
    "model",
    "model_fingerprint",
    "logprobs_mode",
    "temperature",
    "top_p",
    "top_k",
    "finish_reason",
)
_THREADS = 4  # reading and hashing hold no interpreter lock
_THREADS_REMOTE = 32  # waiting for answers

R = TypeVar("R")
Progress = Callable[[int, int], None]  # (done, total)


@dataclass
class Verification:
    """What `verify` found: how many shards and bytes were read, and the error of each that is bad, by key."""

    shards: int = 0
    bytes: int = 0
    bad: dict[str, R3Error] = field(default_factory=dict)


def verify(
    path: str | os.PathLike[str], *, spec: RoutingSpec | None = None, progress: Progress | None = None
) -> Verification:
    """Read a shard, or every shard of a store and its steps: format, all checksums, ids against the spec, file names.

    Args:
        spec: The routing that all must have, if it is known.
        progress: Called after each shard.

    Raises:
        StoreError: there is no shard here.
    """
    in_store = is_store(path)
    keys = _keys(ShardStore(path)) if in_store else [os.fspath(path)]
    result = Verification()
    for key, (size, error) in zip(keys, _each(lambda key: _verify(key, spec, in_store), keys), strict=True):
        result.shards += 1
        result.bytes += size
        if error is not None:
            result.bad[key] = error
        if progress is not None:
            progress(result.shards, len(keys))
    return result


def _each(work: Callable[[str], R], keys: Sequence[str]) -> Iterator[R]:
    """`work` of each key, in order, in threads."""
    with ThreadPoolExecutor(_THREADS_REMOTE if keys and is_url(keys[0]) else _THREADS) as pool:
        queue = iter(keys)
        while batch := list(islice(queue, 64)):  # not all at once: a future for each of 100,000 would cost 100 MB
            yield from pool.map(work, batch)


def _verify(key: str, spec: RoutingSpec | None, in_store: bool) -> tuple[int, R3Error | None]:
    try:
        sample, size = shard.load_with_size(key)
        if spec is not None:
            spec.require_same(sample.spec, key)
        if in_store:
            require_named(key, id_in(key), sample.sample_id)
        return size, None
    except R3Error as error:
        return 0, error


def _keys(store: ShardStore) -> list[str]:
    """Of all shards of a store and its steps."""
    keys = [each.key_of(sample_id) for each in store.stores() for sample_id in each.sample_ids()]
    if not keys:
        raise StoreError("no shard in this directory", where=store.url, expected=f"files *{shard.SUFFIX} written by r3")
    return keys


def shard_table(path: str | os.PathLike[str], *, verify: bool = False) -> Table:
    """One shard: metadata, tokens, coverage, bytes per token."""
    if verify:
        shard.load_file(path)
    with shard.open_file(path) as file:
        size = file.size
        sample, loss = file.metadata, file.loss_mask
        table = _table(str(path))
        table.add_row("sample", f"{sample['sample_id']} (group {sample['group_id'] or '-'})")
        table.add_row("routing", file.spec.brief())
        table.add_row("tokens", f"{file.num_tokens} ({sample['prompt_length']} prompt, {int(loss.sum())} in the loss)")
        table.add_row("recorded rows", f"{int(file.recorded.sum())} of {file.num_tokens}")
        table.add_row("weight versions", _versions(file))
        for name in _PROVENANCE:
            table.add_row(name.replace("_", " "), sample[name])
        for name, value in sorted(format1.provenance(sample).extra.items()):
            table.add_row(f"extra: {name}", value)
        table.add_row("token digest", sample["token_digest"])
        per_token = size / max(file.num_tokens, 1)
        table.add_row("size", f"{size:,} bytes, {per_token:.1f} a token (routes alone {file.spec.bytes_per_token})")
        table.add_row("checksums", "verified" if verify else "those of the tensors not read (--verify)")
    return table


def store_table(store: ShardStore, *, verify: bool = False, progress: Progress | None = None) -> Table:
    """A store and its steps: counts, what the shards have in common and where they differ, sizes.

    Raises:
        StoreError: no shard, or damaged ones (listed).
    """
    keys = _keys(store)
    seen: dict[str, Counter[str]] = {name: Counter() for name in (*_PROVENANCE, "spec", "weight versions")}
    groups: set[str] = set()
    damaged: list[R3Error] = []
    tokens = sampled = recorded = size = 0
    for number, file in enumerate(_each(lambda key: _head(key, verify), keys), 1):
        if isinstance(file, ShardError):
            damaged.append(file)
        else:
            groups.add(file.metadata["group_id"])
            tokens += file.num_tokens
            sampled += int(file.loss_mask.sum())
            recorded += int(file.recorded.sum())
            size += file.size
            seen["spec"][file.metadata["spec"]] += 1
            seen["weight versions"][_versions(file)] += 1
            for name in _PROVENANCE:
                seen[name][file.metadata[name]] += 1
        if progress is not None:
            progress(number, len(keys))
    if damaged:
        raise StoreError(
            f"{len(damaged)} of {len(keys)} shards cannot be read:\n" + "\n".join(map(str, damaged[:10])),
            where=store.url,
            remedy="delete those files and run the same `r3 collect` again: it asks only for what is missing",
        )
    table = _table(store.url)
    steps = store.steps()
    if steps:
        table.add_row("steps", f"{len(steps):,} ({steps[0]} to {steps[-1]})")
    table.add_row("samples", f"{len(keys):,} in {len(groups):,} groups")
    table.add_row("tokens", f"{tokens:,} ({sampled:,} in the loss)")
    table.add_row("recorded rows", f"{recorded:,} of {tokens:,} ({recorded / max(tokens, 1):.2%})")
    for text, count in seen["spec"].most_common():
        table.add_row("routing", _counted(RoutingSpec.from_json(text).brief(), count, len(keys)))
    for name in (*_PROVENANCE, "weight versions"):
        for text, count in seen[name].most_common(5):
            table.add_row(name.replace("_", " "), _counted(text, count, len(keys)))
    table.add_row("size", f"{size:,} bytes, {size / max(tokens, 1):.1f} a token")
    table.add_row("checksums", "verified" if verify else "those of the tensors not read (--verify)")
    return table


def _head(key: str, verify: bool) -> shard.ShardFile | ShardError:
    """What a shard's head says; closed."""
    try:
        if verify:
            shard.load_file(key)
        with shard.open_file(key) as file:
            return file
    except ShardError as error:
        return error


def _table(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _versions(file: shard.ShardFile) -> str:
    versions = sorted(set(file.weight_version[file.loss_mask].tolist()))
    return ", ".join("unknown" if version < 0 else str(version) for version in versions) or "none"


def _counted(text: str, count: int, total: int) -> str:
    return text if count == total else f"{text} ({count} of {total})"
