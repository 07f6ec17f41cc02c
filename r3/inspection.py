"""What `r3 inspect` shows of a shard or a store, from the shards alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich.table import Table

from r3 import shard
from r3.errors import ShardError, StoreError
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


def shard_table(path: Path, *, verify: bool = False) -> Table:
    """One shard: metadata, tokens, coverage, bytes per token."""
    sample = shard.load_file(path, verify=verify)
    size = path.stat().st_size
    table = _table(str(path))
    table.add_row("sample", f"{sample.sample_id} (group {sample.group_id or '-'})")
    table.add_row("routing", sample.spec.brief())
    table.add_row(
        "tokens", f"{sample.num_tokens} ({sample.prompt_length} prompt, {int(sample.loss_mask.sum())} in the loss)"
    )
    table.add_row("recorded rows", f"{sample.routes.num_recorded} of {sample.num_tokens}")
    table.add_row("weight versions", _versions(sample.weight_version[sample.loss_mask].tolist()))
    for name in _PROVENANCE:
        table.add_row(name.replace("_", " "), str(getattr(sample.provenance, name)))
    for name, value in sorted(sample.provenance.extra.items()):
        table.add_row(f"extra: {name}", value)
    table.add_row("token digest", sample.token_digest)
    table.add_row(
        "size",
        f"{size:,} bytes, {size / max(sample.num_tokens, 1):.1f} a token (routes alone {sample.spec.bytes_per_token})",
    )
    table.add_row("checksums", "verified" if verify else "not read (--verify)")
    return table


def store_table(store: ShardStore, *, verify: bool = False) -> Table:
    """A store: counts, what its shards have in common and where they differ, sizes; damaged shards by name.

    Raises:
        StoreError: no shard, or damaged ones (listed).
    """
    sample_ids = store.sample_ids()
    if not sample_ids:
        raise StoreError(
            "no shard in this directory", where=str(store.root), expected=f"files *{shard.SUFFIX} written by r3"
        )
    seen: dict[str, Counter[str]] = {name: Counter() for name in (*_PROVENANCE, "spec", "weight versions")}
    groups, damaged = set(), []
    tokens = sampled = recorded = size = 0
    for sample_id in sample_ids:
        try:
            sample = store.open(sample_id, verify=verify)
        except ShardError as error:
            damaged.append(error)
            continue
        groups.add(sample.group_id)
        tokens += sample.num_tokens
        sampled += int(sample.loss_mask.sum())
        recorded += sample.routes.num_recorded
        size += store.path_of(sample_id).stat().st_size
        seen["spec"][sample.spec.to_json()] += 1
        seen["weight versions"][_versions(sample.weight_version[sample.loss_mask].tolist())] += 1
        for name in _PROVENANCE:
            seen[name][str(getattr(sample.provenance, name))] += 1
    if damaged:
        raise StoreError(
            f"{len(damaged)} of {len(sample_ids)} shards cannot be read:\n" + "\n".join(map(str, damaged[:10])),
            where=str(store.root),
            remedy="delete those files and run the same `r3 collect` again: it asks only for what is missing",
        )
    table = _table(str(store.root))
    table.add_row("samples", f"{len(sample_ids):,} in {len(groups):,} groups")
    table.add_row("tokens", f"{tokens:,} ({sampled:,} in the loss)")
    table.add_row("recorded rows", f"{recorded:,} of {tokens:,} ({recorded / max(tokens, 1):.2%})")
    for text, count in seen["spec"].most_common():
        table.add_row("routing", _counted(RoutingSpec.from_json(text).brief(), count, len(sample_ids)))
    for name in (*_PROVENANCE, "weight versions"):
        for text, count in seen[name].most_common(5):
            table.add_row(name.replace("_", " "), _counted(text, count, len(sample_ids)))
    table.add_row("size", f"{size:,} bytes, {size / max(tokens, 1):.1f} a token")
    table.add_row("checksums", "verified" if verify else "not read (--verify)")
    return table


def _table(title: str) -> Table:
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _versions(values: list[int]) -> str:
    return ", ".join("unknown" if v < 0 else str(v) for v in sorted(set(values))) or "none"


def _counted(text: str, count: int, total: int) -> str:
    return text if count == total else f"{text} ({count} of {total})"
