"""The command line `r3`: collect, serve, inspect, verify, export, gc, diagnose, doctor.

Thin: each command parses, calls one function of the library and prints. Errors that r3 raises on purpose end as their
message on stderr and exit status 1, without a traceback; wrong usage is 2, Ctrl-C 130. `--config FILE` reads defaults of
any option from YAML, one section a command, so that a run can be kept in a file (configs/ has complete ones).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import r3
from r3.errors import ConfigError, R3Error
from r3.settings import json_object, read_defaults
from r3.store import ShardStore

if TYPE_CHECKING:
    from r3.rollout.server import VllmServer

app = typer.Typer(
    name="r3",
    help="Rollout Routing Replay: record the experts that a rollout engine chose, replay them in the trainer, measure the gap.",
    epilog="A first look at all of it: bash scripts/quickstart.sh",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console(highlight=False)


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class OnBad(str, Enum):
    stop = "stop"
    skip = "skip"


Server = Annotated[
    list[str], typer.Option("--server", "-s", help="URL of a vLLM server; repeat for several.", metavar="URL")
]
Model = Annotated[
    Path | None,
    typer.Option("--model", "-m", help="Directory of the model's weights and config.", metavar="PATH"),
]


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"r3 {r3.__version__}")
        raise typer.Exit


@app.callback()
def settings(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="YAML with defaults: a section per command.", metavar="FILE")
    ] = None,
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if config is not None:
        context.default_map = read_defaults(config, options_by_command())


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

    with _bar("samples", len(asked) * n) as advance:
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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model directory.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8000,
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.")] = "auto",
    log: Annotated[Path | None, typer.Option(help="Log file; a temporary one if not given.")] = None,
) -> None:
    """Run a vLLM server that returns routed experts, until Ctrl-C. Options that r3 does not know go to vLLM."""
    with starting_server(model, port=port, dtype=dtype, log=log, extra_args=context.args) as running:
        running.wait()


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A shard or a directory of shards.")],
    verify: Annotated[bool, typer.Option(help="Also read every tensor and compare checksums.")] = False,
) -> None:
    """Say what a shard or a store holds: counts, routing spec, engine and versions, sizes."""
    from r3 import inspection

    if path.is_dir():
        with _bar("shards") as advance:
            table = inspection.store_table(ShardStore(path), verify=verify, progress=advance)
        console.print(table)
    else:
        console.print(inspection.shard_table(path, verify=verify))


@app.command("verify")
def verify_shards(
    path: Annotated[Path, typer.Argument(help="A shard, or a directory of shards; the steps below it count.")],
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="All shards must have the routing of this model.", metavar="PATH"),
    ] = None,
) -> None:
    """Read every byte of every shard: format, checksums, expert ids, names. Bad ones are named; exit status 1."""
    from r3 import inspection
    from r3.spec import RoutingSpec

    spec = None if model is None else RoutingSpec.from_config(model)
    with _bar("shards") as advance:
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
    path: Annotated[Path, typer.Argument(help="A shard, or a directory of shards; the steps below it count.")],
    out: Annotated[Path, typer.Argument(help="FILE.npz (arrays, sample by sample) or FILE.parquet (a row per token).")],
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many samples.")] = None,
) -> None:
    """Write shards as a file for other tools: numpy, or pandas, polars, duckdb."""
    from r3 import export as exporting

    with _bar("samples") as advance:
        count = exporting.export(path, out, limit=limit, progress=advance)
    console.print(f"{count:,} samples written to {out}, {out.stat().st_size:,} bytes", markup=False, soft_wrap=True)


@app.command()
def gc(
    store: Annotated[Path, typer.Argument(help="Directory with steps: step-000001, step-000002, ...")],
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
    _require("torch", "transformers")
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
            with _bar(f"{store.root.name}, {each.value}: live, replay, replay again") as advance:
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


@contextmanager
def starting_server(
    model: str, *, port: int | None = None, dtype: str = "auto", log: Path | None = None, extra_args: Sequence[str] = ()
) -> Iterator[VllmServer]:
    """A vLLM server for the length of the block, with what it is doing shown while it starts."""
    from r3.rollout.server import VllmServer

    with console.status("starting vLLM") as status:

        def show(seconds: float, line: str) -> None:
            status.update(f"starting vLLM, {seconds:.0f} s: {escape(line[:100])}")

        with VllmServer(model, port=port, dtype=dtype, log_path=log, extra_args=extra_args, progress=show) as running:
            status.stop()
            console.print(
                f"vLLM serves {model} at {running.url}; log: {running.log_path}", markup=False, soft_wrap=True
            )
            yield running


def options_by_command() -> dict[str, set[str]]:
    """What a configuration file may set."""
    commands = typer.main.get_group(app).commands
    return {name: {parameter.name or "" for parameter in command.params} for name, command in commands.items()}


def main() -> None:
    """Entry point of the `r3` script."""
    run_reporting_errors(app)


def run_reporting_errors(command: Callable[[], object]) -> None:
    """Run a command line; an R3Error ends it as its message, SIGTERM and Ctrl-C end it with all `with` blocks left."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job inherits it ignored
    try:
        command()
    except R3Error as error:
        print(f"r3: {error}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        print("r3: interrupted; what is written is complete", file=sys.stderr)
        sys.exit(130)


@contextmanager
def _bar(label: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A progress bar; yields advance(done, total=None)."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=total)

        def advance(done: int, total: int | None = None) -> None:
            progress.update(task, completed=done, total=total)

        yield advance


def _require(*modules: str) -> None:
    import importlib.util

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed", remedy='pip install "r3-replay[hf]"')
