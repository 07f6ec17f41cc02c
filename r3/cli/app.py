"""What all commands share: the application, the console, the progress bar, and how a command ends.

Errors that r3 raises on purpose end as their message on stderr and exit status 1, without a traceback; wrong usage is 2,
Ctrl-C 130. `--config FILE` reads defaults of any option from YAML, one section a command, so that a run can be kept in a file
(configs/ has complete ones).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import r3
from r3.errors import ConfigError, R3Error
from r3.settings import read_defaults

app = typer.Typer(
    name="r3",
    help="Rollout Routing Replay: record the experts that a rollout engine chose, replay them in the trainer, measure the gap.",
    epilog="A first look at all of it: bash scripts/quickstart.sh",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
console = Console(highlight=False)


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
def progress_bar(label: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A progress bar; yields advance(done, total=None)."""
    columns = (
        TextColumn("{task.description}", markup=False),  # names of directories
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


def require(*modules: str) -> None:
    """Raise ConfigError unless these packages can be imported."""
    import importlib.util

    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed", remedy='pip install "r3-replay[hf]"')
