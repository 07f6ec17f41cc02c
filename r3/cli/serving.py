"""The command that serves: serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from r3.cli.app import app, console

if TYPE_CHECKING:
    from r3.rollout.server import VllmServer


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
