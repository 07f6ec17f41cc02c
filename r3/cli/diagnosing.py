"""Commands that measure and check: diagnose, doctor."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from r3.cli.app import Model, app, console, progress_bar, require
from r3.store import ShardStore


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@app.command()
def diagnose(
    stores: Annotated[list[Path], typer.Argument(help="Directories of shards; several are scored one by one.")],
    model: Annotated[
        Path, typer.Option("--model", "-m", help="The trainer's model: the weights that sampled.", metavar="PATH")
    ],
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="Of the trainer's forward; repeat for several. [bfloat16]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="torch device; a GPU if there is one.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward, padding included.")] = 8192,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many samples of each store.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write REPORT.json and REPORT.md; default: `diagnosis` beside the first store.")
    ] = None,
    allow_other_weights: Annotated[
        bool, typer.Option("--allow-other-weights", help="The gap then contains the difference of the weights too.")
    ] = False,
) -> None:
    """Measure the gap between rollout and training: live, replayed, and replayed again as the noise floor.

    Every forward scores the same sampled tokens. What was replayed is compared with the shards at the experts themselves.
    """
    require("torch", "transformers")
    from transformers.utils.logging import disable_progress_bar

    from r3 import diagnose as diagnosis
    from r3 import report as reporting
    from r3.trainers.score import TransformersScorer

    disable_progress_bar()  # transformers' own: it would tear ours
    opened = [ShardStore(store) for store in stores]
    results = []
    for each in dtype or [Dtype.bfloat16]:
        scorer = TransformersScorer(model, dtype=each.value, device=device)
        for store in opened:
            with progress_bar(f"{store.root.name}, {each.value}: live, replay, replay again") as advance:
                results.append(
                    diagnosis.diagnose(
                        store,
                        scorer,
                        label=store.root.name if len(opened) > 1 else "",
                        batch_tokens=batch_tokens,
                        limit=limit,
                        allow_other_weights=allow_other_weights,
                        progress=advance,
                    )
                )
    console.print(reporting.table(results))
    for note in reporting.notes(results):
        console.print(f"- {note}", markup=False, soft_wrap=True)
    files = reporting.save(results, report or stores[0].parent / "diagnosis")
    for name, paths in (("shards", stores), ("report", files)):
        console.print(f"{name}: {', '.join(map(str, paths))}", markup=False, soft_wrap=True)


@app.command()
def doctor(
    server: Annotated[
        list[str] | None, typer.Option("--server", "-s", help="Ask these vLLM servers too.", metavar="URL")
    ] = None,
    model: Model = None,
) -> None:
    """Is everything here to run? Packages and versions, the model's routing, and whether a server really returns routes."""
    from r3 import doctor as checks

    if not checks.run(console, servers=server or [], model=model):
        raise typer.Exit(1)
