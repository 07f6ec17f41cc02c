"""Commands on shards and stores: inspect, verify, export, gc."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from r3.cli.app import app, console, progress_bar
from r3.store import ShardStore, is_store


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A shard or a directory of shards; a path or a URL.", metavar="PATH")],
    verify: Annotated[bool, typer.Option(help="Also read every tensor and compare checksums.")] = False,
) -> None:
    """Say what a shard or a store holds: counts, routing spec, engine and versions, sizes."""
    from r3 import inspection

    if is_store(path):
        with progress_bar("shards") as advance:
            table = inspection.store_table(ShardStore(path), verify=verify, progress=advance)
        console.print(table)
    else:
        console.print(inspection.shard_table(path, verify=verify))


@app.command("verify")
def verify_shards(
    path: Annotated[
        str,
        typer.Argument(
            help="A shard, or a directory of shards (path or URL); the steps below it count.", metavar="PATH"
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="All shards must have the routing of this model.", metavar="PATH"),
    ] = None,
) -> None:
    """Read every byte of every shard: format, checksums, expert ids, names. Bad ones are named; exit status 1."""
    from r3 import inspection
    from r3.spec import RoutingSpec

    spec = None if model is None else RoutingSpec.from_config(model)
    with progress_bar("shards") as advance:
        result = inspection.verify(path, spec=spec, progress=advance)
    for error in result.bad.values():
        print(f"bad: {error}", file=sys.stderr)
    console.print(
        f"{result.shards - len(result.bad):,} of {result.shards:,} shards are good, {result.bytes:,} bytes read"
    )
    if result.bad:
        raise typer.Exit(1)


@app.command()
def export(
    path: Annotated[
        str,
        typer.Argument(
            help="A shard, or a directory of shards (path or URL); the steps below it count.", metavar="PATH"
        ),
    ],
    out: Annotated[Path, typer.Argument(help="FILE.npz (arrays, sample by sample) or FILE.parquet (a row per token).")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many samples.")] = None,
) -> None:
    """Write shards as a file for other tools: numpy, or pandas, polars, duckdb."""
    from r3 import export as exporting

    with progress_bar("samples") as advance:
        count = exporting.export(path, out, limit=limit, progress=advance)
    console.print(f"{count:,} samples written to {out}, {out.stat().st_size:,} bytes", markup=False, soft_wrap=True)


@app.command()
def gc(
    store: Annotated[
        str, typer.Argument(help="Directory (path or URL) with steps: step-000001, step-000002, ...", metavar="STORE")
    ],
    keep_steps: Annotated[int, typer.Option(min=1, help="How many of the newest steps stay.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")] = False,
) -> None:
    """Delete the shards of old steps. What a reader has open stays readable to it."""
    opened = ShardStore(store)
    before = len(opened.steps())
    deleted = opened.keep_steps(keep_steps, dry_run=dry_run)
    names = f" ({deleted[0]} to {deleted[-1]})" if deleted else ""
    does = "would be deleted" if dry_run else "deleted"
    console.print(f"{len(deleted)} of {before} steps{names} {does}", markup=False)
