"""Commands that measure and check: diagnose, compare, doctor."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from r3.cli.app import Model, app, console, progress_bar, require
from r3.errors import ConfigError
from r3.shard.files import is_url
from r3.store import ShardStore, is_store

if TYPE_CHECKING:
    from r3.diagnose import Diagnosis


class Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


class Backend(str, Enum):
    transformers = "transformers"
    megatron = "megatron"


@app.command()
def diagnose(
    stores: Annotated[
        list[str] | None,
        typer.Argument(help="Directories of shards, paths or URLs; several are scored one by one.", metavar="STORE..."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="The trainer's model: the weights that sampled.", metavar="PATH"),
    ] = None,
    backend: Annotated[Backend, typer.Option(help="The trainer.")] = Backend.transformers,
    dtype: Annotated[
        list[Dtype] | None, typer.Option(help="Of the trainer's forward; repeat for several. [bfloat16]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="torch device; a GPU if there is one.")] = None,
    float32: Annotated[
        bool, typer.Option("--float32", help="Also in float32, live and replayed: what is rounding and what is not.")
    ] = False,
    r2: Annotated[
        bool, typer.Option("--r2", help="Also replay the trainer's own routes: what R2 can and cannot fix.")
    ] = False,
    r2_model: Annotated[
        Path | None,
        typer.Option(help="With --r2: weights that record, as of the old policy. [--model]", metavar="PATH"),
    ] = None,
    logprobs: Annotated[
        list[str] | None,
        typer.Option(
            help="In place of stores: log-probs that a trainer dumped, NAME=FILE; live=A and replay=B are compared.",
            metavar="NAME=FILE",
        ),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward, padding included.")] = 8192,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many samples of each store.")] = None,
    resamples: Annotated[int, typer.Option(min=100, help="Of the bootstrap.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
    report: Annotated[
        Path | None,
        typer.Option(help="Write REPORT.json, .md and .html; default: `diagnosis` beside the first store or file."),
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write each plot as a PNG into this directory too.")] = None,
    page: Annotated[
        bool | None, typer.Option("--page/--no-page", help="Write the page; default: if its packages are installed.")
    ] = None,
    allow_other_weights: Annotated[
        bool, typer.Option("--allow-other-weights", help="The gap then contains the difference of the weights too.")
    ] = False,
) -> None:
    """Measure the gap between rollout and training: live, replayed, and replayed again as the noise floor.

    Every forward scores the same sampled tokens. What was replayed is compared with the shards at the experts themselves.
    """
    from r3 import report as reporting

    if page or plots is not None:
        reporting.require_packages()  # before the forwards, not after them
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    if logprobs:
        if stores or model is not None:
            raise ConfigError("--logprobs takes neither stores nor a model: the dump has both sides")
        from r3.diagnose.dumped import diagnose_dumps

        files = _named_files(logprobs)
        first = next(iter(files.values()))[0]
        results = [diagnose_dumps(files, resamples=resamples, seed=seed, command=command)]
        sources = {"log-probs": [path for paths in files.values() for path in paths]}
        _conclude(results, report or first.parent / "diagnosis", sources, plots, page)
        return
    if not stores or model is None:
        raise ConfigError(
            "nothing to diagnose",
            expected="STORE... --model PATH, or --logprobs NAME=FILE",
            remedy="`r3 collect` makes a store; `r3 diagnose --help`",
        )
    if r2_model is not None and not r2:
        raise ConfigError("--r2-model does nothing without --r2")
    if report is None and is_url(stores[0]):
        raise ConfigError(
            "where the report goes is not said", where=stores[0], expected="--report PATH: a URL has nothing beside it"
        )
    stem = report or Path(stores[0]).parent / "diagnosis"
    opened = [ShardStore(store) for store in stores]
    results = []
    for each in dtype or [Dtype.bfloat16]:
        scorers = _Scorers(backend, model, each, device, float32=float32, r2_model=r2_model)
        for label, store in zip(labels(stores), opened, strict=True):
            with progress_bar(f"{label or store.name}, {each.value}") as advance:
                results.append(
                    scorers.diagnose(
                        store,
                        label=label,
                        batch_tokens=batch_tokens,
                        limit=limit,
                        allow_other_weights=allow_other_weights,
                        r2=r2,
                        resamples=resamples,
                        seed=seed,
                        command=command,
                        progress=advance,
                    )
                )
    _conclude(results, stem, {"shards": stores}, plots, page)


def labels(stores: Sequence[str | Path]) -> list[str]:
    """What tells stores apart in a report: nothing for one, names for several, paths where names are equal."""
    if len(stores) == 1:
        return [""]
    names = [
        str(store).rstrip("/").rpartition("/")[2] if is_url(store) else Path(store).resolve().name for store in stores
    ]
    return names if len(set(names)) == len(names) else list(map(str, stores))


class _Scorers:
    """The models of one dtype: loaded once, used for every store."""

    def __init__(
        self,
        backend: Backend,
        model: Path,
        dtype: Dtype,
        device: str | None,
        *,
        float32: bool = False,
        r2_model: Path | None = None,
    ) -> None:
        require("torch", "transformers")
        from transformers.utils.logging import disable_progress_bar

        from r3.trainers.score import load_scorer

        disable_progress_bar()  # transformers' own: it would tear ours
        scores = r2_model is not None  # of both policies, for the router-shift
        self.scorer = load_scorer(backend.value, model, dtype=dtype.value, device=device, router_scores=scores)
        self.float32 = (
            load_scorer(backend.value, model, dtype="float32", device=device)
            if float32 and dtype is not Dtype.float32
            else None
        )
        self.recorder = (
            None
            if r2_model is None
            else load_scorer(backend.value, r2_model, dtype=dtype.value, device=device, router_scores=True)
        )

    def diagnose(self, store: ShardStore, *, r2: bool = False, **options: Any) -> Diagnosis:
        from r3 import diagnose as diagnosis

        recorder = self.recorder if r2 and self.recorder is not None else r2
        return diagnosis.diagnose(store, self.scorer, r2=recorder, float32=self.float32, **options)


def _named_files(logprobs: list[str]) -> dict[str, list[Path]]:
    """NAME=FILE, a name for several files; a file without a name is the forward `train`."""
    files: dict[str, list[Path]] = {}
    for text in logprobs:
        name, separator, path = text.partition("=")
        files.setdefault(name if separator else "train", []).append(Path(path if separator else text))
    return files


def _conclude(
    results: list[Diagnosis],
    stem: Path,
    sources: Mapping[str, Sequence[str | Path]],
    plots: Path | None,
    page: bool | None,
) -> None:
    """Print verdicts, findings and the table, and write the report."""
    from r3 import report as reporting
    from r3.diagnose.compare import ROWS_SUFFIX, save_rows

    for result in results:
        about = " ".join(filter(None, (result.label, result.trainer.get("dtype", "")))) if len(results) > 1 else ""
        console.print(f"{about + ': ' if about else ''}{result.verdict.text}", markup=False, soft_wrap=True)
        for finding in result.findings:
            console.print(f"  {finding.severity} {finding.id}: {finding.text}", markup=False, soft_wrap=True)
            if finding.remedy:
                console.print(f"    remedy: {finding.remedy}", markup=False, soft_wrap=True)
    console.print(reporting.table(results))
    for note in reporting.notes(results):
        console.print(f"- {note}", markup=False, soft_wrap=True)
    written = reporting.save(results, stem, page=page)
    rows = reporting.beside(stem, ROWS_SUFFIX)
    save_rows(results, rows)
    if plots is not None:
        sources = {**sources, "plots": reporting.pictures(results, plots)}
    for name, paths in {**sources, "report": [*written, rows]}.items():
        console.print(f"{name}: {', '.join(map(str, paths))}", markup=False, soft_wrap=True)
    if page is None and (absent := reporting.missing()):
        remedy = 'pip install "r3-replay[report]"'
        console.print(f"no page: {', '.join(absent)} not installed ({remedy})", markup=False, soft_wrap=True)


@app.command()
def compare(
    a: Annotated[
        str,
        typer.Argument(help="REPORT.json of `r3 diagnose`, or shards: a directory or URL, with --model.", metavar="A"),
    ],
    b: Annotated[str, typer.Argument(help="The other.", metavar="B")],
    model: Model = None,
    backend: Annotated[Backend, typer.Option(help="The trainer, for shards.")] = Backend.transformers,
    dtype: Annotated[Dtype, typer.Option(help="Of the trainer's forward, for shards.")] = Dtype.bfloat16,
    device: Annotated[str | None, typer.Option(help="torch device, for shards.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many samples of each store.")] = None,
    which: Annotated[
        int | None, typer.Option(min=0, help="Of reports that hold several: only this one, from 0. [each with each]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Two runs side by side, before and after a change: each metric, its difference and ratio with 95 % intervals.

    Paired over the samples that both scored, where there are some.
    """
    from r3.diagnose import compare as comparing

    of_shards = _of_shards(a)
    if of_shards != _of_shards(b):
        raise ConfigError(
            "a report and a store cannot be compared", expected="two reports or two directories of shards"
        )
    if of_shards:
        if model is None:
            raise ConfigError("directories of shards need the trainer's model", remedy="--model PATH")
        scorers = _Scorers(backend, model, dtype, device)
        sides = []
        for path in (a, b):
            store = ShardStore(path)
            with progress_bar(store.name) as advance:
                done = scorers.diagnose(store, label=store.name, limit=limit, progress=advance)
            sides.append([comparing.run_of(done, path)])
    else:
        sides = [comparing.load_runs(Path(path), which) for path in (a, b)]
        if len(sides[0]) != len(sides[1]):
            raise ConfigError(
                "the reports hold different numbers of diagnoses",
                got=f"{len(sides[0])} and {len(sides[1])}",
                remedy="--which N",
            )
    found = [comparing.compare(one, other) for one, other in zip(*sides, strict=True)]
    if as_json:
        console.print_json(data={"comparisons": [each.to_dict() for each in found]})
        return
    for each in found:
        console.print(f"A {each.a['name']}\nB {each.b['name']}", markup=False, soft_wrap=True)
        console.print(comparing.table(each))
        console.print(each.text, markup=False, soft_wrap=True)


def _of_shards(path: str) -> bool:
    return is_store(path) and not (is_url(path) and path.endswith(".json"))


@app.command()
def doctor(
    server: Annotated[
        list[str] | None, typer.Option("--server", "-s", help="Running engines: routes are asked for.", metavar="URL")
    ] = None,
    model: Model = None,
    store: Annotated[
        str | None,
        typer.Option(help="Directory of shards, or URL: what they are, and what its disk takes.", metavar="STORE"),
    ] = None,
    trainer: Annotated[
        Path | None,
        typer.Option(
            help="Configuration of veRL, slime, miles or Megatron: YAML, JSON or start script.", metavar="FILE"
        ),
    ] = None,
    engine: Annotated[
        Path | None, typer.Option(help="Configuration of vLLM or SGLang: YAML, JSON or start script.", metavar="FILE")
    ] = None,
    engine_version: Annotated[str, typer.Option(help="Of that engine; default: the vLLM that is installed.")] = "",
    tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Tokens of one training step, for the budget of bytes.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for CI.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on yellow too.")] = False,
) -> None:
    """Is everything here to run? Looks at what it is pointed at; exit status 1 if a check is red."""
    from r3 import doctor as checks

    found = checks.examine(
        servers=server or [],
        model_path=model,
        store_path=store,
        trainer_config=trainer,
        engine_config=engine,
        engine_version=engine_version,
        tokens_per_step=tokens_per_step,
    )
    if as_json:
        console.print_json(data=checks.to_json(found))
    else:
        checks.show(console, found)
    raise typer.Exit(checks.exit_code(found, strict=strict))
