"""Files of a report. The page and the pictures need the extra `report`; JSON and Markdown do not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from r3.errors import ConfigError
from r3.report.context import Tokenizer, tokenizer_of
from r3.report.documents import Diagnoses, documents, to_json
from r3.report.table import markdown
from r3.shard.files import write_atomically

_NEEDED = ("altair", "vl_convert", "jinja2")


def save(
    diagnoses: Diagnoses, stem: Path, *, tokenizer: Tokenizer | None = None, page: bool | None = None
) -> tuple[Path, ...]:
    """Write `<stem>.json`, `<stem>.md` and `<stem>.html`; returns the paths.

    Args:
        tokenizer: Turns the ids around the worst tokens into text; default: the one in the trainer's model directory, if that
            is on this machine. Nothing is downloaded.
        page: Write the page; None: if the packages for it are installed.

    Raises:
        ConfigError: a page is asked for and its packages are not installed.
    """
    found = documents(diagnoses)
    files = [beside(stem, ".json"), beside(stem, ".md")]
    stem.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(files[0], (json.dumps(to_json(found), indent=2) + "\n").encode())
    write_atomically(files[1], markdown(found).encode())
    if page or (page is None and not missing()):
        files.append(beside(stem, ".html"))
        write_atomically(files[2], html(found, tokenizer=tokenizer).encode())
    return tuple(files)


def html(diagnoses: Diagnoses, *, tokenizer: Tokenizer | None = None) -> str:
    """The page, as text; `tokenizer` as in `save`."""
    require_packages()
    from r3.report.page import page

    found = documents(diagnoses)
    return page(found, tokenizer if tokenizer is not None else tokenizer_of(found[0]))


def pictures(diagnoses: Diagnoses, folder: Path, *, scale: float = 2.0) -> list[Path]:
    """Each plot of each diagnosis as a PNG on white: `<folder>/<plot>.png`, with several `<number>-<plot>.png`.

    Args:
        scale: Pixels per unit of a plot 640 wide.
    """
    require_packages()
    from r3.report.charts import figures
    from r3.report.rendering import png

    found = documents(diagnoses)
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for number, document in enumerate(found):
        for figure in figures(document):
            path = folder / (f"{number}-{figure.id}.png" if len(found) > 1 else f"{figure.id}.png")
            write_atomically(path, png(figure, scale=scale))
            out.append(path)
    return out


def beside(stem: Path, suffix: str) -> Path:
    """`<stem><suffix>`. Only an ending of a report's own files is replaced: `vllm-0.30.0` keeps its last number."""
    bare = stem.with_suffix("") if stem.suffix in (".json", ".md", ".html") else stem
    return bare.with_name(bare.name + suffix)


def missing() -> list[str]:
    """Packages of the extra `report` that are not installed."""
    return [name for name in _NEEDED if importlib.util.find_spec(name) is None]


def require_packages() -> None:
    """Raises ConfigError unless pages and pictures can be made."""
    if absent := missing():
        raise ConfigError(f"{', '.join(absent)} not installed", remedy='pip install "r3-replay[report]"')
