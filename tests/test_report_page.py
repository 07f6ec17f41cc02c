"""The page in a real browser: every plot drawn, no request, no console message, no sideways scroll on a phone.

Without a Chromium on the machine the plots run in vl-convert's JavaScript engine instead: their specifications are compiled and
drawn by the same Vega, while the page's own script and layout are not tried; the parametrised name says which was done.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from browser import Browser, Page, find
from diagnoses import synthetic
from test_report import EVIL, Letters

from r3 import report
from r3.diagnose import Diagnosis, Finding
from r3.report.charts import figures
from r3.report.figure import Figure
from r3.report.rendering import VEGA_LITE
from r3.report.themes import THEMES

READY = "document.documentElement?.dataset.ready === 'true'"
PLOTS = """[...document.querySelectorAll("article:not([hidden]) .plot")].map((plot) => {
  const canvas = plot.querySelector("canvas");
  const marks = plot.querySelectorAll("svg path, svg rect").length;
  const ink = canvas ? canvas.toDataURL().length / 500 : 0;  // an empty one is 2 KB of text, a plot 20 KB and more
  return {id: plot.id, drawn: plot.dataset.drawn, marks: marks || ink, width: plot.getBoundingClientRect().width};
})"""
BROWSER = "in a browser" if find() else "in vl-convert, there is no browser here"


@pytest.fixture(scope="module")
def diagnoses() -> list[Diagnosis]:
    finding = Finding("weight-versions", "warning", f"Two versions {EVIL}", "Expect staleness.")
    return [
        synthetic(versions=3, sample_id=EVIL + "{}", vocabulary=3, findings=(finding,), label=EVIL),
        synthetic(layers=48, experts=64, top_k=8, seed=1),
    ]


@pytest.mark.engine
@pytest.mark.parametrize("where", [BROWSER])
def test_page_is_drawn_in_light_and_dark_and_at_phone_width(where, diagnoses, tmp_path) -> None:
    file = tmp_path / "page.html"
    file.write_text(report.html(diagnoses, tokenizer=Letters()))
    if not find():
        assert where.startswith("in vl-convert")
        for diagnosis in diagnoses:
            for figure in figures(diagnosis.to_dict()):
                for theme in THEMES.values():
                    assert marks_of(figure, theme) > 2
        return
    asyncio.run(look(file, diagnoses))


def marks_of(figure: Figure, theme: dict[str, Any]) -> int:
    """Shapes of a plot that Vega drew outside of a browser."""
    spec = {**figure.spec, "data": {"values": figure.rows()}, "width": 400, "height": figure.height}
    svg: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, config=theme)
    return len(re.findall(r'<path aria-label="', svg))


async def look(file: Path, diagnoses: list[Diagnosis]) -> None:
    async with Browser() as browser:
        for width, dark in ((1200, False), (1200, True), (390, False), (390, True)):
            page = await browser.open(file, width=width, dark=dark)
            await page.until(READY)
            await require_drawn(page, diagnoses[0], "dark" if dark else "light", width)
            if width == 390:
                await page.run("document.querySelectorAll('.tab')[1].click()")
                await page.until(f"{PLOTS}.every((plot) => plot.drawn)")
                await require_drawn(page, diagnoses[1], "dark" if dark else "light", width)
            before = await page.run("getComputedStyle(document.body).backgroundColor")
            await page.run("document.getElementById('theme').click()")
            other = "light" if dark else "dark"
            await page.until(f"{PLOTS}.every((plot) => plot.drawn === '{other}')")
            assert await page.run("getComputedStyle(document.body).backgroundColor") != before
            assert page.console == []
            assert page.requests == [file.resolve().as_uri()]
            assert (await page.run("document.title")).endswith("KL diagnostic, r3 0.1.0")


async def require_drawn(page: Page, diagnosis: Diagnosis, theme: str, width: int) -> None:
    plots = await page.run(PLOTS)
    names = [plot["id"].partition("-")[2] for plot in plots]
    assert names == [figure.id for figure in figures(diagnosis.to_dict())]
    for plot in plots:
        assert plot["drawn"] == theme, plot
        assert plot["marks"] > 10, plot
        assert 250 < plot["width"] <= width, plot
    assert await page.run("document.documentElement.scrollWidth") == width
    assert await page.run("document.querySelector('article:not([hidden]) h1').textContent.length") > 20
    background = await page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (theme == "dark")


@pytest.mark.engine
def test_page_of_100_000_tokens_and_48_layers_is_under_5_megabytes(tmp_path) -> None:
    """At the size of Qwen3-30B-A3B: 128 experts, top-8. Routes and log-probs go through the accumulators of a diagnosis."""
    large = synthetic(sequences=100, tokens=1000, layers=48, experts=128, top_k=8, vocabulary=90)
    assert large.gaps["live"].num_tokens == 100_000
    *_, file = report.save([large], tmp_path / "large", tokenizer=Letters())
    assert file.stat().st_size < 5_000_000
    assert len(figures(large.to_dict())) == 8
