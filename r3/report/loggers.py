"""A diagnosis in a training log: Weights & Biases and TensorBoard, through the run or the writer that the trainer has open.

Neither package is imported for the scalars: what is passed in is asked to log. `with_page` and `with_pictures` need the extra
`report`. Scalars are named `<prefix><pass>/<metric>` (`r3/live/k3`); docs/kl-diagnostic.md maps metrics to veRL's and slime's.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from r3.diagnose import Diagnosis
from r3.report.documents import Document, documents
from r3.report.table import markdown

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_TOKEN = ("k1", "k2", "k3", "mean_abs", "p99", "p999", "max_ratio", "chi2_token", "ess", "pearson")
_ROUTES = ("share_of_token_layers", "share_of_tokens", "mean_layers_per_token", "mean_overlap")


def scalars(diagnosis: Diagnosis | Document, prefix: str = "r3/") -> dict[str, float]:
    """All numbers of a diagnosis that make a curve; those that are not known are left out."""
    (document,) = documents([diagnosis])
    out: dict[str, float | None] = {}
    for name, forward in document["forwards"].items():
        at = f"{prefix}{name.replace(' ', '_')}/"
        out.update({at + metric: forward[metric] for metric in _TOKEN})
        out.update({f"{at}F_{tau}": share for tau, share in forward["exceed"].items()})
        if forward["routes"] is not None:
            out.update({at + metric: forward["routes"][metric] for metric in _ROUTES})
    for each in document["comparisons"]:
        at = f"{prefix}{each['other'].replace(' ', '_')}_to_{each['base'].replace(' ', '_')}/{each['metric']}"
        out[at] = each["ratio"]["value"]
    out[f"{prefix}replay_coverage"] = document["replay_coverage"]
    out[f"{prefix}noise_mean_abs"] = document["noise_mean_abs"]
    out[f"{prefix}errors"] = sum(finding["severity"] == "error" for finding in document["findings"])
    return {name: float(value) for name, value in out.items() if value is not None}


def log_wandb(
    run: Any, diagnosis: Diagnosis | Document, *, step: int | None = None, prefix: str = "r3/", with_page: bool = False
) -> None:
    """Log to a Weights & Biases run (what `wandb.init` returns).

    Args:
        step: The run's step; None is its next.
        with_page: The whole page too, as `<prefix>report`.
    """
    (document,) = documents([diagnosis])
    values: dict[str, Any] = dict(scalars(document, prefix))
    if with_page:
        import wandb

        from r3.report.saving import html

        values[f"{prefix}report"] = wandb.Html(html([document]), inject=False)
    run.log(values, step=step)


def log_tensorboard(
    writer: SummaryWriter,
    diagnosis: Diagnosis | Document,
    *,
    step: int,
    prefix: str = "r3/",
    with_pictures: bool = False,
) -> None:
    """Log to a TensorBoard `SummaryWriter`: scalars, verdict and table as text, and the plots as images if asked for."""
    (document,) = documents([diagnosis])
    for name, value in scalars(document, prefix).items():
        writer.add_scalar(name, value, step)
    writer.add_text(f"{prefix}report", markdown([document]), step)
    if with_pictures:
        import numpy as np
        from PIL import Image

        from r3.report.charts import figures
        from r3.report.rendering import png

        for figure in figures(document):
            pixels = np.asarray(Image.open(io.BytesIO(png(figure))).convert("RGB"))
            writer.add_image(f"{prefix}{figure.id}", pixels, step, dataformats="HWC")
