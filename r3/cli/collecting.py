"""The command that samples: collect, from servers in this process or by workers on a Ray cluster."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from r3.cli.app import Model, app, console, progress_bar
from r3.errors import ConfigError
from r3.settings import json_object
from r3.store import ShardStore

if TYPE_CHECKING:
    from r3.rollout.collector import CollectReport
    from r3.rollout.preflight import EngineInfo
    from r3.rollout.ray import Engine

ON_RAY = "On a Ray cluster (--ray)"


class OnBad(str, Enum):
    stop = "stop"
    skip = "skip"


Server = Annotated[
    list[str] | None, typer.Option("--server", "-s", help="URL of a vLLM server; repeat for several.", metavar="URL")
]


@app.command()
def collect(
    prompts: Annotated[
        Path,
        typer.Argument(
            help="JSONL; each line has `prompt` (text), `messages` (chat) or `prompt_token_ids`, and an `id` if you like."
        ),
    ],
    store: Annotated[
        str,
        typer.Argument(help="Directory or URL of the shards; made if it is not there, resumed if it is."),
    ],
    server: Server = None,
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
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight; on Ray, of each worker.")] = 64,
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
    ray: Annotated[
        str | None,
        typer.Option(
            help="Sample by workers on a Ray cluster: its address, `auto` for the one around, `local` to start one.",
            metavar="ADDRESS",
            rich_help_panel=ON_RAY,
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, rich_help_panel=ON_RAY)] = 1,
    engine: Annotated[
        str,
        typer.Option(
            help="Of each worker: `vllm` in its process (--model), `server` (--server), or a function as `module:name`.",
            rich_help_panel=ON_RAY,
        ),
    ] = "server",
    engine_args: Annotated[
        str,
        typer.Option(help="vLLM's AsyncEngineArgs, or the function's arguments, as JSON.", rich_help_panel=ON_RAY),
    ] = "{}",
    worker_options: Annotated[
        str, typer.Option(help='Ray\'s options of each worker, as JSON: {"num_gpus": 1}.', rich_help_panel=ON_RAY)
    ] = "{}",
    budget_mb: Annotated[
        float,
        typer.Option(min=1, help="Megabytes in flight at most, by prompt and --max-tokens.", rich_help_panel=ON_RAY),
    ] = 4096,
    tries: Annotated[
        int, typer.Option(min=1, help="So often a sample is asked for before it is given up.", rich_help_panel=ON_RAY)
    ] = 4,
    straggler_s: Annotated[
        float | None, typer.Option(help="Ask a second worker after so many seconds.", rich_help_panel=ON_RAY)
    ] = None,
) -> None:
    """Sample prompts on vLLM and keep every sample with its routed experts as a shard.

    The server must run with --enable-return-routed-experts; this is checked before anything is asked. Running the same
    command again asks only for what is missing. With --ray, workers on a cluster do the same, each writing where it runs;
    the store must then be a place that all of its nodes see.
    """
    from r3.rollout import client, collector, preflight, protocol
    from r3.rollout.prompts import read_prompts

    asked = read_prompts(prompts)[:limit]
    sampling = protocol.Sampling(temperature, top_p, top_k, max_tokens, seed, json_object(extra_body, "--extra-body"))
    if ray is not None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("ray is not installed", where="--ray", remedy='pip install "r3-replay[ray]"')
        from r3.rollout.ray import RolloutPool

        pool = RolloutPool(
            _engine(engine, server or [], model, model_name, api_key, json_object(engine_args, "--engine-args")),
            store,
            workers=workers,
            sampling=sampling,
            weight_version=weight_version,
            slots=concurrency,
            budget_mb=budget_mb,
            tries=tries,
            straggler_s=straggler_s,
            ray_options=json_object(worker_options, "--worker-options"),
            address=ray,
        )
        _collect_on_ray(pool, asked, n, on_bad_prompt)
        return
    if engine != "server":
        raise ConfigError("an engine in a worker needs Ray", where="--engine", got=engine, remedy="add --ray local")
    if not server:
        raise ConfigError(
            "no server to ask", where="collect", expected="--server URL, or --ray", remedy="`r3 serve MODEL` starts one"
        )
    target = ShardStore(store, create=True)
    client.keep_freed_memory()

    async def run(progress: Callable[[CollectReport], None]) -> CollectReport:
        found = await preflight.preflight(server, model_path=model, model_name=model_name, api_key=api_key)
        _say_engine(found)
        return await collector.collect(
            asked,
            target,
            found,
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
    _finish(report, target)


def _engine(
    kind: str, server: list[str], model: Path | None, name: str | None, api_key: str | None, arguments: dict[str, Any]
) -> Engine:
    from r3.rollout.ray import Engine

    if kind == "server":
        if not server:
            raise ConfigError("no server to ask", where="--engine server", expected="--server URL")
        path = None if model is None else _as_workers_see(model)
        return Engine.server(server, model_path=path, model_name=name, api_key=api_key, **arguments)
    if server:
        raise ConfigError("--server goes with --engine server", where="--engine", got=kind)
    if kind == "vllm":
        if model is None:
            raise ConfigError("no model to load", where="--engine vllm", expected="--model PATH, as the nodes see it")
        return Engine.vllm(_as_workers_see(model), **arguments)
    if ":" not in kind:
        raise ConfigError("no such engine", where="--engine", expected="vllm, server, or module:function", got=kind)
    return Engine.custom(kind, **arguments)


def _as_workers_see(model: Path) -> str:
    """A worker's directory is not this one; a name that is no directory here may be one there, or a name on a hub."""
    return str(model.absolute() if model.exists() else model)


def _collect_on_ray(pool: Any, asked: list[Any], n: int, on_bad_prompt: OnBad) -> None:
    with pool:
        with console.status("waiting for the first worker"):
            _say_engine(pool.engine())
        run = pool.run(asked, n)
        with progress_bar("samples", len(asked) * n) as advance:
            for done, _sample in enumerate(run, 1):
                advance(done + len(run.failures))
                if run.failures and on_bad_prompt is OnBad.stop:
                    break
        for lost in pool.lost:
            console.print(f"warning: {lost.worker} was given up: {lost.error}", style="yellow", markup=False)
        if run.failures and on_bad_prompt is OnBad.stop:
            raise run.failures[0].error
        if pool.restarts or run.retries:
            console.print(f"{pool.restarts} restarts of workers, {run.retries} samples asked again", markup=False)
        _finish(run.report(), pool.store)


def _say_engine(engine: EngineInfo) -> None:
    for warning in engine.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False)
    console.print(
        f"{engine.engine} {engine.engine_version} serves {engine.model}: {engine.spec.brief()}; {engine.logprobs_mode}",
        markup=False,
    )


def _finish(report: CollectReport, store: ShardStore) -> None:
    console.print(
        f"{report.written} samples written to {store.url}, {report.present} were there; {report.tokens:,} sampled tokens, "
        f"{report.tokens_per_second:,.0f} tokens/s, {report.bytes / 1e6:.1f} MB",
        markup=False,
    )
    for failure in report.failures:
        print(f"missing {failure.sample_id}: {failure.error}", file=sys.stderr)
    if report.failures:
        raise typer.Exit(1)
