"""The command that serves: serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from r3.cli.app import app, console

if TYPE_CHECKING:
    from r3.rollout.server import Server


class EngineName(str, Enum):
    vllm = "vllm"
    transformers = "transformers"


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model directory.")],
    engine: Annotated[
        EngineName, typer.Option(help="vLLM, or transformers' continuous batching where vLLM is not installed.")
    ] = EngineName.vllm,
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8000,
    dtype: Annotated[str, typer.Option(help="Of the weights; auto is the checkpoint's own.")] = "auto",
    log: Annotated[Path | None, typer.Option(help="Log file; a temporary one if not given.")] = None,
) -> None:
    """Run a server that returns routed experts, until Ctrl-C. Options that r3 does not know go to the server."""
    with starting_server(
        model, engine=engine.value, port=port, dtype=dtype, log=log, extra_args=context.args
    ) as running:
        running.wait()


@contextmanager
def starting_server(
    model: str,
    *,
    engine: str = "vllm",
    port: int | None = None,
    dtype: str = "auto",
    log: Path | None = None,
    extra_args: Sequence[str] = (),
) -> Iterator[Server]:
    """A server for the length of the block, with what it is doing shown while it starts."""
    from r3.rollout.server import TransformersServer, VllmServer

    kind: type[Server] = VllmServer if engine == "vllm" else TransformersServer
    with console.status(f"starting {kind.engine}") as status:

        def show(seconds: float, line: str) -> None:
            status.update(f"starting {kind.engine}, {seconds:.0f} s: {escape(line[:100])}")

        with kind(model, port=port, dtype=dtype, log_path=log, extra_args=extra_args, progress=show) as running:
            status.stop()
            console.print(
                f"{kind.engine} serves {model} at {running.url}; log: {running.log_path}", markup=False, soft_wrap=True
            )
            yield running
