"""What `r3 inspect` and `r3 verify` say of a shard or a store, from the shards alone.

`inspect` reads the head of each shard, 4 KB: metadata and spans hold all that it counts. `verify` reads everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from rich.table import Table

from r3 import shard
from r3.errors import R3Error, ShardError, StoreError
from r3.shard import format1
from r3.spec import RoutingSpec
from r3.store import ShardStore

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

Progress = Callable[[int, int], None]  # (done, total)


@dataclass
class Verification:
    """What `verify` found: how many shards and bytes were read, and the error of each that is bad, by file."""

    shards: int = 0
    bytes: int = 0
    bad: dict[Path, R3Error] = field(default_factory=dict)


def verify(path: Path, *, spec: RoutingSpec | None = None, progress: Progress | None = None) -> Verification:
    """Read a shard, or every shard of a store and its steps: format, all checksums, ids against the spec, file names.

    Args:
        spec: The routing that all must have, if it is known.
        progress: Called after each shard.

    Raises:
        StoreError: there is no shard here.
    """
    paths = _paths(path)
    result = Verification()
    with ThreadPoolExecutor(_THREADS) as pool:
        queue = iter(paths)
        while batch := list(islice(queue, 64)):  # not all at once: a future for each of 100,000 would cost 100 MB
            for each, (size, error) in zip(
                batch, pool.map(lambda one: _verify(one, spec, path.is_dir()), batch), strict=True
            ):
                result.shards += 1
                result.bytes += size
                if error is not None:
                    result.bad[each] = error
                if progress is not None:
                    progress(result.shards, len(paths))
    return result


def _verify(path: Path, spec: RoutingSpec | None, in_store: bool) -> tuple[int, R3Error | None]:
    try:
        sample = shard.load_file(path)
        if spec is not None:
            spec.require_same(sample.spec, str(path))
        if in_store and ShardStore(path.parent).path_of(sample.sample_id) != path:
            raise ShardError(
                "a shard under another sample's name",
                where=str(path),
                expected=path.name,
                got=f"sample {sample.sample_id!r}",
                remedy="rename the file as ShardStore.path_of says, or delete it",
            )
        return path.stat().st_size, None
    except R3Error as error:
        return 0, error
    except FileNotFoundError:
        return 0, ShardError("deleted while it was being verified", where=str(path))


def _paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [each.path_of(sample_id) for each in _stores(path) for sample_id in each.sample_ids()]


def _stores(root: Path) -> list[ShardStore]:
    stores = ShardStore(root).stores()
    if not any(len(each) for each in stores):
        raise StoreError("no shard in this directory", where=str(root), expected=f"files *{shard.SUFFIX} written by r3")
    return stores


def shard_table(path: Path, *, verify: bool = False) -> Table:
    """One shard: metadata, tokens, coverage, bytes per token."""
    if verify:
        shard.load_file(path)
    with shard.open_file(path) as file:
        size = path.stat().st_size
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
    root, stores = store.root, _stores(store.root)
    paths = [each.path_of(sample_id) for each in stores for sample_id in each.sample_ids()]
    seen: dict[str, Counter[str]] = {name: Counter() for name in (*_PROVENANCE, "spec", "weight versions")}
    groups: set[str] = set()
    damaged: list[R3Error] = []
    tokens = sampled = recorded = size = 0
    for number, path in enumerate(paths, 1):
        try:
            if verify:
                shard.load_file(path)
            with shard.open_file(path) as file:
                groups.add(file.metadata["group_id"])
                tokens += file.num_tokens
                sampled += int(file.loss_mask.sum())
                recorded += int(file.recorded.sum())
                size += path.stat().st_size
                seen["spec"][file.metadata["spec"]] += 1
                seen["weight versions"][_versions(file)] += 1
                for name in _PROVENANCE:
                    seen[name][file.metadata[name]] += 1
        except ShardError as error:
            damaged.append(error)
        if progress is not None:
            progress(number, len(paths))
    if damaged:
        raise StoreError(
            f"{len(damaged)} of {len(paths)} shards cannot be read:\n" + "\n".join(map(str, damaged[:10])),
            where=str(root),
            remedy="delete those files and run the same `r3 collect` again: it asks only for what is missing",
        )
    table = _table(str(root))
    steps = store.steps()
    if steps:
        table.add_row("steps", f"{len(steps):,} ({steps[0]} to {steps[-1]})")
    table.add_row("samples", f"{len(paths):,} in {len(groups):,} groups")
    table.add_row("tokens", f"{tokens:,} ({sampled:,} in the loss)")
    table.add_row("recorded rows", f"{recorded:,} of {tokens:,} ({recorded / max(tokens, 1):.2%})")
    for text, count in seen["spec"].most_common():
        table.add_row("routing", _counted(RoutingSpec.from_json(text).brief(), count, len(paths)))
    for name in (*_PROVENANCE, "weight versions"):
        for text, count in seen[name].most_common(5):
            table.add_row(name.replace("_", " "), _counted(text, count, len(paths)))
    table.add_row("size", f"{size:,} bytes, {size / max(tokens, 1):.1f} a token")
    table.add_row("checksums", "verified" if verify else "those of the tensors not read (--verify)")
    return table


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
