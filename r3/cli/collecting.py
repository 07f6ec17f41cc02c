"""The command that samples: collect."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from r3.cli.app import Model, app, console, progress_bar
from r3.settings import json_object
from r3.store import ShardStore


class OnBad(str, Enum):
    stop = "stop"
    skip = "skip"


Server = Annotated[
    list[str], typer.Option("--server", "-s", help="URL of a vLLM server; repeat for several.", metavar="URL")
]


@app.command()
def collect(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="JSONL; each line has `prompt` (text), `messages` (chat) or `prompt_token_ids`, and an `id` if you like."
        ),
    ],
    store: Annotated[Path, typer.Argument(help="Directory of the shards; made if it is not there, resumed if it is.")],
    server: Server,
    model: Model = None,
    model_name: Annotated[str | None, typer.Option(help="Name under which the server serves it.")] = None,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Samples per prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many sampled tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0)] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0 is off.")] = 0,
    seed: Annotated[
        int | None, typer.Option(help="Each sample gets a seed of its own, made from this and its id.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 64,
    weight_version: Annotated[
        int, typer.Option(help="Version of the served weights, e.g. the training step; -1 unknown.")
    ] = -1,
    on_bad_prompt: Annotated[
        OnBad, typer.Option(help="What one prompt or response that cannot be used does.")
    ] = OnBad.stop,
    extra_body: Annotated[str, typer.Option(help='More fields of the request, as JSON: {"stop": ["\\n"]}.')] = "{}",
    api_key: Annotated[
        str | None, typer.Option(envvar="R3_API_KEY", help="Bearer token, if the server wants one.")
    ] = None,
) -> None:
    """Sample prompts on vLLM and keep every sample with its routed experts as a shard.

    The server must run with --enable-return-routed-experts; this is checked before anything is asked. Running the same
    command again asks only for what is missing.
    """
    from r3.rollout import collector, preflight, protocol
    from r3.rollout.prompts import read_prompts

    asked = read_prompts(prompts)[:limit]
    target = ShardStore(store, create=True)
    sampling = protocol.Sampling(temperature, top_p, top_k, max_tokens, seed, json_object(extra_body, "--extra-body"))

    async def run(progress: Callable[[collector.CollectReport], None]) -> collector.CollectReport:
        engine = await preflight.preflight(server, model_path=model, model_name=model_name, api_key=api_key)
        for warning in engine.warnings:
            console.print(f"warning: {warning}", style="yellow", markup=False)
        console.print(
            f"{engine.engine} {engine.engine_version} serves {engine.model}: {engine.spec.brief()}; {engine.logprobs_mode}",
            markup=False,
        )
        return await collector.collect(
            asked,
            target,
            engine,
            sampling=sampling,
            n=n,
            concurrency=concurrency,
            weight_version=weight_version,
            on_bad_prompt=on_bad_prompt.value,
            progress=progress,
            api_key=api_key,
        )

    with progress_bar("samples", len(asked) * n) as advance:
        report = asyncio.run(run(lambda now: advance(now.present + now.written + len(now.failures))))
    console.print(
        f"{report.written} samples written to {target.root}, {report.present} were there; {report.tokens:,} sampled tokens, "
        f"{report.tokens_per_second:,.0f} tokens/s, {report.bytes / 1e6:.1f} MB",
        markup=False,
    )
    for failure in report.failures:
        print(f"missing {failure.sample_id}: {failure.error}", file=sys.stderr)
    if report.failures:
        raise typer.Exit(1)
