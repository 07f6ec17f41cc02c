"""The main job end to end, everything in it real: train a tiny MoE, serve it with vLLM (or, where that is not installed, with
transformers' continuous batching: `--engine transformers`), collect its rollouts with their routes, replay them in the trainer,
and print how far the KL falls.

Each step is the command that it prints, run in this process. What is there already (the model, the shards) is reused; a
server is started only if something is to be sampled, and ended however this script ends.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tiny_moe
import typer

from r3 import ShardStore, cli
from r3.cli.serving import EngineName
from r3.errors import ConfigError
from r3.fingerprint import model_fingerprint
from r3.rollout.prompts import read_prompts
from r3.settings import read_defaults

ROOT = Path(__file__).resolve().parent.parent


def quickstart(
    model: Annotated[
        Path | None,
        typer.Option(help="Your own model's directory; default: a tiny Qwen3-MoE trained here (3 minutes)."),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Your own server's URL (it must serve --model); default: one started here.")
    ] = None,
    engine: Annotated[EngineName, typer.Option(help="What samples, in a server started here.")] = EngineName.vllm,
    prompts: Annotated[Path | None, typer.Option(help="Your own prompts (JSONL); default: snippets of Python.")] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="Sampling seeds; repeat. [0 1 2]")] = None,
    config: Annotated[Path, typer.Option(help="Defaults of collect and diagnose.")] = ROOT / "configs/quickstart.yaml",
    out: Annotated[Path, typer.Option(help="Where model, shards and report go.")] = Path(".r3"),
) -> None:
    if server is not None and model is None:
        raise ConfigError(
            "with --server, say which weights it serves",
            remedy="--model PATH: the trainer's forward needs the same weights",
        )
    if model is None or prompts is None:
        say(f"python scripts/tiny_moe.py {out / 'tiny-moe'}")
        tiny = tiny_moe.build(out / "tiny-moe")
        model, prompts = model or tiny, prompts or tiny / "prompts.jsonl"
    # By weights: shards of another model are never mixed in, and never taken for this one's.
    run = out / "quickstart" / (model_fingerprint(model)[:12] or model.name)
    run = run if engine is EngineName.vllm else run.with_name(f"{run.name}-{engine.value}")
    stores = [run / f"seed-{seed}" for seed in (seeds or [0, 1, 2])]
    missing = [store for store in stores if not is_complete(store, prompts, config)]
    if missing:
        with serving(model, server, engine, run) as url:
            for store in missing:
                seed = store.name.removeprefix("seed-")
                r3(config, "collect", prompts, store, "--server", url, "--model", model, "--seed", seed)
    else:
        print(f"all samples are there: {run}")
    r3(config, "diagnose", *stores, "--model", model, "--report", run / "diagnosis")


def is_complete(store: Path, prompts: Path, config: Path) -> bool:
    """Whether collect would find nothing to ask for."""
    limit = read_defaults(config, cli.options_by_command()).get("collect", {}).get("limit")
    wanted = {f"{prompt.prompt_id}.0" for prompt in read_prompts(prompts)[:limit]}
    return store.is_dir() and wanted <= set(ShardStore(store).sample_ids())


@contextlib.contextmanager
def serving(model: Path, server: str | None, engine: EngineName, run: Path) -> Iterator[str]:
    """The URL of a server that serves the model, the user's or one that lives as long as the block."""
    if server is not None:
        yield server
        return
    run.mkdir(parents=True, exist_ok=True)
    say(f"r3 serve {model} --engine {engine.value} --dtype bfloat16")
    log = run / f"{engine.value}.log"
    with cli.starting_server(str(model), engine=engine.value, dtype="bfloat16", log=log) as running:
        yield running.url
        print("stopping the server")


def r3(config: Path, *arguments: object) -> None:
    """Run one r3 command in this process, printed as the user would type it."""
    words = ["--config", str(config), *map(str, arguments)]
    say(shlex.join(["r3", *words]))
    if code := cli.app(words, standalone_mode=False):
        raise typer.Exit(code)


def say(command: str) -> None:
    print(f"\n$ {command}", flush=True)


if __name__ == "__main__":
    cli.run_reporting_errors(lambda: typer.run(quickstart))
