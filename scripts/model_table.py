"""The README's table of three models that route differently: is the effect of replay one model's, or the method's?

    python scripts/model_table.py                # minutes of CPU: three a training, five for all the rest; no accelerator

For each family of `tiny_families.py`: the model is trained if it is not there, served by a real vLLM, sampled at temperature 1,
and its rollouts are scored by transformers on the same weights, live and replayed, in bfloat16 and in float32. Prints Markdown,
and leaves shards and a page for each model under --out.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from tiny_families import RECIPES, Family
from tiny_moe import build

from r3 import ShardStore, report
from r3.cli import run_reporting_errors
from r3.diagnose import LIVE, REPLAY, Diagnosis, diagnose
from r3.metrics import Estimate
from r3.rollout.collector import collect_sync
from r3.rollout.preflight import preflight
from r3.rollout.prompts import read_prompts
from r3.rollout.protocol import Sampling
from r3.rollout.server import VllmServer

ROUTERS = {
    "qwen3_moe": "softmax over all experts, then top-k",
    "glm4_moe": "as DeepSeek-V3: sigmoid, groups, correction bias, dense first layer, shared expert",
    "mixtral": "softmax over the chosen experts",
}
COLUMNS = (
    *("model", "router", "k3 live", "k3 replay", "ratio (95 % interval)", "F(1.1) live", "F(1.1) replay"),
    *("other expert set", "tokens with one", "k3 left / float floor"),
)


def sampled(family: str, model: Path, out: Path, limit: int, max_tokens: int) -> ShardStore:
    """Shards of the model's own prompts, collected if they are not there."""
    prompts = read_prompts(model / "prompts.jsonl")[:limit]
    store = ShardStore(out / family / "shards", create=True)
    if {f"{prompt.prompt_id}.0" for prompt in prompts} <= set(store.sample_ids()):
        return store
    with VllmServer(model, dtype="bfloat16", log_path=out / family / "vllm.log") as server:
        engine = asyncio.run(preflight(server.url, model_path=model))
        sampling = Sampling(temperature=1.0, max_tokens=max_tokens, seed=0)
        collect_sync(prompts, store, engine, sampling=sampling, concurrency=32, weight_version=0)
    return store


def measured(family: str, model: Path, store: ShardStore) -> Diagnosis:
    from r3.trainers.score import TransformersScorer

    scorers = {dtype: TransformersScorer(model, dtype=dtype, device="cpu") for dtype in ("bfloat16", "float32")}
    command = ["python", *sys.argv]
    return diagnose(store, scorers["bfloat16"], float32=scorers["float32"], label=family, command=command)


def row(family: str, result: Diagnosis) -> str:
    live, replay = result.gaps[LIVE], result.gaps[REPLAY]
    compared = result.comparison("k3")
    assert compared is not None
    cells: list[Any] = [
        f"`{family}`, {result.mismatch[LIVE].num_layers} MoE layers",
        ROUTERS[family],
        f"{live.k3:.2e}",
        f"{replay.k3:.2e}",
        bounds(compared.ratio),
        f"{live.exceed['1.1']:.4f}",
        f"{replay.exceed['1.1']:.4f}",
        f"{result.mismatch[LIVE].share:.2%}",
        f"{result.mismatch[LIVE].share_of_tokens:.1%}",
        bounds(result.floor.ratio) if result.floor is not None else "",
    ]
    return "| " + " | ".join(cells) + " |"


def bounds(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def main(
    families: Annotated[list[Family] | None, typer.Option("--family", help="Only these; repeat.")] = None,
    out: Annotated[Path, typer.Option(help="Where models, shards and pages go.")] = Path(".r3/models"),
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each model.")] = 160,
    max_tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens a prompt.")] = 128,
) -> None:
    """Train, serve, sample, score, and print the table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    notes = []
    for family in [each.value for each in families or Family]:
        model = build(out / family / "model", recipe=RECIPES[family]())
        result = measured(family, model, sampled(family, model, out, limit, max_tokens))
        report.save([result], out / family / "diagnosis")
        lines.append(row(family, result))
        notes.append(report.notes([result])[-1])
    print("\n".join([*lines, "", *(f"- {note}" for note in notes)]))


if __name__ == "__main__":
    run_reporting_errors(lambda: typer.run(main))
