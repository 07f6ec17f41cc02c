"""The command that sizes a run: budget."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from r3.cli.app import app, console
from r3.errors import ConfigError

if TYPE_CHECKING:
    from r3.budget import Budget, Outcome


@app.command()
def budget(
    model: Annotated[
        str,
        typer.Argument(
            help="qwen3-30b-a3b, qwen3-235b-a22b, glm-4.5-air, glm-4.5, gpt-oss-120b, deepseek-v3, kimi-k2, or a directory."
        ),
    ],
    samples: Annotated[int, typer.Option(min=1, help="Of one step.")] = 32768,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Mean of a sample.")] = 1024,
    response_tokens: Annotated[int, typer.Option(min=1, help="Mean of a sample.")] = 15360,
    step_seconds: Annotated[float, typer.Option(help="In which a step's samples are made, stored and read.")] = 600.0,
    keep_steps: Annotated[int, typer.Option(min=1, help="Steps that stay in the store.")] = 4,
    servers: Annotated[int, typer.Option(min=1, help="Inference engines.")] = 32,
    processes: Annotated[int, typer.Option(min=1, help="Collector processes, all hosts.")] = 8,
    hosts: Annotated[int, typer.Option(min=1, help="Machines that these run on.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight of each process.")] = 256,
    tp: Annotated[int, typer.Option(min=1, help="Trainer: tensor parallel.")] = 4,
    pp: Annotated[int, typer.Option(min=1, help="Trainer: pipeline parallel.")] = 4,
    cp: Annotated[int, typer.Option(min=1, help="Trainer: context parallel.")] = 2,
    dp: Annotated[int, typer.Option(min=1, help="Trainer: data parallel.")] = 8,
    ep: Annotated[int, typer.Option(min=1, help="Trainer: expert parallel, within data and context parallel.")] = 8,
    vpp: Annotated[int, typer.Option(min=1, help="Trainer: model chunks of a pipeline rank.")] = 1,
    sequence_parallel: Annotated[bool, typer.Option(help="Trainer: as with TP.")] = True,
    micro_batch_tokens: Annotated[int, typer.Option(min=1, help="Of one forward, before TP and CP cut it.")] = 16384,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Keys travel through Ray.")] = True,
    object_store: Annotated[bool, typer.Option("--object-store", help="Shards go to S3 or the like.")] = False,
    nic: Annotated[float, typer.Option(help="Gbit/s of a collector host, each way.")] = 100.0,
    cores: Annotated[int, typer.Option(min=1, help="Of a collector host, for collecting.")] = 16,
    host_memory: Annotated[float, typer.Option(help="GB of a collector host, for payloads in flight.")] = 64.0,
    write: Annotated[float, typer.Option(help="GB/s that the storage takes from all clients.")] = 10.0,
    read: Annotated[float, typer.Option(help="GB/s that the storage gives to all clients.")] = 20.0,
    room: Annotated[float, typer.Option(help="TB for routes on the storage.")] = 10.0,
    simulate: Annotated[bool, typer.Option("--simulate", help="Also run one step, event by event.")] = False,
    slots: Annotated[int, typer.Option(min=1, help="With --simulate: sequences at a time in each server.")] = 64,
    spread: Annotated[
        float, typer.Option(min=0, help="With --simulate: deviation of the lengths, over their mean.")
    ] = 0.5,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine for 10 s in place of the default costs.")
    ] = False,
    directory: Annotated[
        Path | None, typer.Option(help="With --measure: where shards will be.", metavar="PATH")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run's routes take: bytes, bandwidth, cores, memory, requests, and what saturates first.

    The limits' defaults are those of a common cluster: state yours. docs/sizing.md explains each line.
    """
    from r3 import budget as sizing

    if directory is not None and not measure:
        raise ConfigError("a directory, and nothing to measure there", where="--directory", remedy="add --measure")
    costs = sizing.DEFAULTS
    if measure:
        from r3.rollout.client import keep_freed_memory

        keep_freed_memory()  # as in the process that collects
        costs = sizing.measure(directory=None if directory is None else str(directory))
    result = sizing.budget(
        sizing.model_of(model),
        sizing.Workload(samples, prompt_tokens, response_tokens, step_seconds, keep_steps, micro_batch_tokens),
        sizing.Collection(servers, processes, hosts, concurrency),
        sizing.Parallel(tp, pp, cp, dp, ep, vpp, sequence_parallel),
        dataclasses.replace(
            sizing.Limits(),
            nic_gbit_s=nic,
            cores=cores,
            host_memory_gb=host_memory,
            storage_write_gb_s=write,
            storage_read_gb_s=read,
            storage_tb=room,
            objects=object_store,
        ),
        costs,
        ray=ray,
    )
    outcome = sizing.simulate(sizing.step_of(result, slots=slots, spread=spread)) if simulate else None
    if as_json:
        values = result.as_dict()
        if outcome is not None:
            values["simulation"] = {**dataclasses.asdict(outcome), "first": outcome.first, "lag_s": outcome.lag_s}
        sys.stdout.write(orjson.dumps(values, option=orjson.OPT_INDENT_2).decode() + "\n")
        return
    _print(result)
    if outcome is not None:
        _print_simulation(outcome)


def number(value: float) -> str:
    """Three significant digits or all of an integer: 1,048,576  317  0.0123."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value):,}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}" if abs(value) >= 0.001 else f"{value:.1e}"


def _print(result: Budget) -> None:
    from rich.table import Table

    model = result.model
    console.print(f"{model.name}: {model.spec.brief()}; {model.source}", markup=False)
    table = Table(box=None, pad_edge=False)
    for name in ("", "what", "value", "", "how"):
        table.add_column(name, justify="right" if name == "value" else "left", overflow="fold")
    group = ""
    for line in result.lines:
        table.add_row("" if line.group == group else line.group, line.name, number(line.value), line.unit, line.how)
        group = line.group
    console.print(table)
    loads = Table(box=None, pad_edge=False)
    for name in ("what saturates first", "used", "of", "", "", "when full"):
        loads.add_column(name, justify="right" if name in ("used", "of") else "left", overflow="fold")
    for load in result.loads:
        full = f"{load.share:.1%}" + (" FULL" if load.share > 1 else "")
        loads.add_row(load.name, number(load.used), number(load.limit), load.unit, full, load.remedy)
    console.print(loads)


def _print_simulation(outcome: Outcome) -> None:
    busy = ", ".join(f"{name} {share:.0%}" for name, share in sorted(outcome.busy.items(), key=lambda item: -item[1]))
    console.print(
        f"one step: {outcome.seconds:.1f} s, the last sequence done at {outcome.generated_s:.1f} s, the last shard "
        f"{outcome.lag_s:.2f} s later, read by all ranks {outcome.read_s - outcome.seconds:.2f} s after that; "
        f"at most {outcome.in_memory} payloads in memory of a process; busy: {busy}",
        markup=False,
        soft_wrap=True,
    )
