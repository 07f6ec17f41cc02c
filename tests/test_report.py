"""What is written of a diagnosis: files, tables, pictures, logs, and a page that stays text whatever the texts in it are."""

from __future__ import annotations

import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import tomllib
from diagnoses import STACK, synthetic
from rich.console import Console

from r3 import report
from r3.diagnose import Finding
from r3.errors import ConfigError, MetricError
from r3.report import saving
from r3.report.charts import figures
from r3.report.context import visible, worst_tokens

ROOT = Path(__file__).resolve().parent.parent
EVIL = '</script><img src=x onerror="document.title=1">|`[a](javascript:b)\u2028'


class Letters:
    """A tokenizer whose token i is the character i, after those of EVIL."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(EVIL if one == 0 else chr(one + 32) for one in token_ids)


class Parsed(HTMLParser):
    """Elements and attributes of a page, and the text outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in = tag if tag in ("script", "style") else ""
        if self._in == "script":
            self.scripts.append("")

    def handle_endtag(self, _tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif not self._in:
            self.text += data


@pytest.fixture(scope="module")
def result():
    return synthetic(versions=2)


@pytest.fixture(scope="module")
def page(result) -> Parsed:
    return Parsed(report.html([result], tokenizer=Letters()))


def test_files_hold_the_same_diagnosis_and_can_be_read_again(result, tmp_path) -> None:
    json_file, markdown_file, page_file = report.save([result], tmp_path / "out" / "diagnosis")
    assert [f.name for f in (json_file, markdown_file, page_file)] == [
        "diagnosis.json",
        "diagnosis.md",
        "diagnosis.html",
    ]
    (again,) = report.load(json_file)
    assert again == json.loads(json.dumps(result.to_dict()))
    assert report.markdown([again]) == markdown_file.read_text() == report.markdown([result])
    assert report.rows([again]) == report.rows([result])


def test_json_that_is_no_diagnosis_is_refused(tmp_path) -> None:
    for content in ("[]", "{", '{"format": "r3-diagnosis", "version": 1, "diagnoses": []}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(MetricError, match=r"x\.json"):
            report.load(tmp_path / "x.json")


def test_table_has_a_row_per_pass_and_says_the_direction(result) -> None:
    assert [row[0] for row in report.rows([result])] == ["bfloat16 live", "bfloat16 replay"]
    text = report.markdown([result])
    assert text.startswith("**Good.** Replay lowers the gap by")
    assert "KL(rollout || train)" in text
    table = [line for line in text.splitlines() if line.startswith("| bfloat16")]
    live = result.forwards["live"]
    assert f"{live.gap.k3:.2e} [{live.intervals['k3'].low:.1e}, {live.intervals['k3'].high:.1e}]" in table[0]
    assert all(line.count("|") == 11 for line in table)
    assert "1,692 of 1,692 recorded (token, layer) seen at the experts" in text


def test_findings_are_in_every_output() -> None:
    finding = Finding("token-shift", "error", f"Log-probs stand one token late {EVIL}", "Shift them back.", {"at": 1.0})
    broken = synthetic(findings=(finding,))
    text = report.markdown([broken])
    assert text.startswith("**Bad.** These numbers do not mean what they say")
    assert "- **error** `token-shift`: Log-probs stand one token late" in text
    assert "<img" not in text
    assert "](javascript" not in text
    page = Parsed(report.html([broken]))
    assert "token-shift" in page.text
    assert "Shift them back." in page.text
    assert EVIL in page.text


def test_page_asks_for_nothing_and_forbids_to(page) -> None:
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "href", "action", "poster", "data"} & set(attributes), (tag, attributes)
    policies = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    allowed = "script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:"
    assert policies == [f"default-src 'none'; {allowed}"]


def test_page_says_verdict_first_then_passes_plots_and_what_repeats_it(page, result) -> None:
    order = [
        result.verdict.text.split(". ")[0],
        "Passes",
        "Where the gap lives",
        "Worst tokens",
        "Repeat it",
        "command",
    ]
    places = [page.text.index(text) for text in order]
    assert places == sorted(places)
    assert "r3 diagnose shards" in page.text
    data = json.loads(page.scripts[0])
    drawn = {a["data-figure"] for _, a in page.elements if "data-figure" in a}
    assert drawn == set(data["figures"]) == {f"d0-{figure.id}" for figure in figures(result.to_dict())}


def test_texts_from_elsewhere_stay_texts() -> None:
    """Ids, labels and tokens come from datasets and models."""
    page = Parsed(
        report.html([synthetic(sample_id=EVIL + "{}", label=EVIL, vocabulary=3), synthetic()], tokenizer=Letters())
    )
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert not [attributes for _, attributes in page.elements if "onerror" in attributes]
    assert len(page.scripts) == 3  # data, bundle, page.js: none ended early
    assert "themes" in json.loads(page.scripts[0])
    assert page.text.count(EVIL) > 20
    markdown = report.markdown([synthetic(label=EVIL)])
    assert "<img" not in markdown
    assert all(line.count("|") == 11 for line in markdown.splitlines() if line.startswith("| "))


def test_plots_hold_the_numbers_of_the_diagnosis(result) -> None:
    document = result.to_dict()
    drawn = {figure.id: figure for figure in figures(document)}
    assert list(drawn) == [
        *("ratios", "tail", "mismatch", "layers", "position", "probability", "experts", "positions", "versions"),
    ]
    live = document["forwards"]["live"]
    assert drawn["layers"].columns["layer"] == [1, 2, 3]  # decoder layers, not places in an array
    assert drawn["layers"].columns["share"] == pytest.approx(live["routes"]["share_by_layer"], rel=1e-4)
    cells = {(row["layer"], row["expert"]): row for row in drawn["experts"].rows()}
    assert len(cells) == 3 * 8
    table = live["routes"]["by_expert"]
    assert cells[2, 5]["share"] == pytest.approx(table["lost"][1][5] / table["recorded"][1][5], rel=1e-4)
    assert cells[2, 5]["gained"] == table["gained"][1][5]
    bars = [row for row in drawn["ratios"].rows() if row["forward"] == "live"]
    assert sum(row["tokens"] for row in bars) == live["num_tokens"]
    assert sum(row["density"] * (row["high"] - row["low"]) for row in bars) == pytest.approx(1, rel=1e-3)
    assert {row["version"] for row in drawn["versions"].rows()} == {"0", "1"}


def test_diagnosis_of_dumped_logprobs_alone_is_shown_without_routes() -> None:
    document = synthetic().to_dict()
    document["forwards"] = {
        "actor": {
            **document["forwards"]["live"],
            "name": "actor",
            "trainer": {},
            "routes": None,
            "by_live_mismatch": [],
        }
    }
    document.update(
        comparisons=[], route_effect={}, trainer={}, rollout={"weights": "unknown"}, run={"source": ["a", "b"]}
    )
    document["noise_mean_abs"] = None
    assert {figure.id for figure in figures(document)} == {"ratios", "tail", "position", "probability"}
    assert "actor" in Parsed(report.html([document])).text
    assert "| actor |" in report.markdown([document])


def test_worst_tokens_stand_in_their_text(result) -> None:
    document = result.to_dict()
    (first, *_) = worst_tokens(document, Letters())
    token = document["forwards"]["live"]["top_tokens"][0]
    at = token["position"] - token["context_start"]
    assert first["token"] == visible(Letters().decode([token["context"][at]]))
    assert first["before"] + first["token"] + first["after"] == visible(Letters().decode(token["context"]))
    (plain, *_) = worst_tokens(document, None)
    assert plain["token"] == str(token["token_id"])
    assert visible("a\n\t\x00\x7f") == "a\u23ce\u2409\u2400\u2421"


def test_every_plot_becomes_a_png(result, tmp_path) -> None:
    files = report.pictures([result], tmp_path / "plots", scale=1)
    assert [file.stem for file in files] == [figure.id for figure in figures(result.to_dict())]
    for file in files:
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") > 600  # pixels wide
        assert len(data) > 5_000  # an empty plot of this size is 3 KB


def test_scalars_are_numbers_with_names(result) -> None:
    values = report.scalars(result)
    assert values["r3/live/k3"] == result.gaps["live"].k3
    assert values["r3/replay_again/F_1.5"] == result.gaps["replay again"].exceed["1.5"]
    assert values["r3/live/share_of_token_layers"] == result.mismatch["live"].share
    assert values["r3/replay_to_live/k3"] == result.comparison("k3").ratio.value
    assert all(math.isfinite(value) for value in values.values())


def test_tensorboard_keeps_scalars_text_and_pictures(result, tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        report.log_tensorboard(writer, result, step=7, with_pictures=True)
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0}).Reload()
    (k3,) = events.Scalars("r3/live/k3")
    assert (k3.step, k3.value) == (7, pytest.approx(result.gaps["live"].k3))
    assert set(events.Tags()["images"]) == {f"r3/{figure.id}" for figure in figures(result.to_dict())}
    assert b"Replay lowers the gap" in events.Tensors("r3/report/text_summary")[0].tensor_proto.string_val[0]


def test_parts_of_the_page_are_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    parts = {path.name for path in (ROOT / "r3/report").iterdir() if path.is_file() and path.suffix != ".py"}
    assert set(settings["package-data"]["r3.report"]) == parts


def test_without_its_packages_the_page_is_left_out_and_asking_for_it_is_an_error(result, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(saving, "_NEEDED", ("json", "no_such_module"))
    assert [path.suffix for path in report.save([result], tmp_path / "d")] == [".json", ".md"]
    with pytest.raises(ConfigError, match=r"no_such_module not installed\n.*r3-replay\[report\]"):
        report.save([result], tmp_path / "d", page=True)


def test_numbers_that_are_not_known_are_dashes() -> None:
    document: dict[str, Any] = synthetic().to_dict()
    for name in ("k3", "mean_abs", "max_ratio", "ess", "pearson"):
        document["forwards"]["live"][name] = None
    document["forwards"]["live"]["intervals"] = {}
    document["k3_saved_by_replay_95ci"] = [None, None]
    assert "| bfloat16 live | \u2013 | \u2013 |" in report.markdown([document])
    assert "NaN" not in Parsed(report.html([document])).text
    assert "r3/live/k3" not in report.scalars(document)
    assert STACK["torch"] in report.notes([document])[2]


@pytest.mark.engine  # starts a process of Weights & Biases
def test_wandb_run_keeps_the_scalars_and_the_page(result, tmp_path) -> None:
    import wandb

    with wandb.init(mode="offline", dir=str(tmp_path), project="r3") as run:
        report.log_wandb(run, result, step=3, with_page=True)
    wandb.teardown()  # its process writes the log until it ends
    (page,) = tmp_path.rglob("files/**/*.html")
    assert "KL diagnostic" in page.read_text()
    (log,) = tmp_path.rglob("run-*.wandb")
    assert b"r3/live/k3" in log.read_bytes()


def test_a_name_with_dots_is_kept(result, tmp_path) -> None:
    files = [
        *report.save([result], tmp_path / "vllm-0.30.0", page=False),
        *report.save([result], tmp_path / "a.json", page=False),
    ]
    assert [path.name for path in files] == ["vllm-0.30.0.json", "vllm-0.30.0.md", "a.json", "a.md"]


def test_the_table_keeps_names_and_numbers_at_80_columns() -> None:
    out = io.StringIO()
    label = "step[bold]-0012-fp8-vllm-0.30.0"
    Console(file=out, width=80).print(report.table([synthetic(label=label)]))
    assert "\u2026" not in out.getvalue()
    assert label in "".join(line.split(" ")[0] for line in out.getvalue().splitlines())
    for row in report.rows([synthetic(label=label)]):
        assert all(number in out.getvalue() for number in row[1:])


def test_each_rollout_of_a_report_says_how_it_was_sampled() -> None:
    raw, processed = synthetic(label="raw"), synthetic(label="processed")
    processed.rollout = {**processed.rollout, "temperature": 0.7, "logprobs_mode": "processed_logprobs"}
    notes = report.notes([raw, processed])
    assert "raw bfloat16: sampled at temperature 1, top_p 1, top_k 0; the engine's raw_logprobs" in notes
    assert "processed bfloat16: sampled at temperature 0.7, top_p 1, top_k 0; the engine's processed_logprobs" in notes
    assert sum(note.startswith("rollout: ") for note in notes) == 1, "said once where it is the same"


def test_route_effect_and_floor_are_in_the_summary(result) -> None:
    document = result.to_dict()
    document["route_effect"] = {
        "live": {"value": 47.4, "low": 38.4, "high": 59.5},
        "replay": {"value": 1.17, "low": 1.02, "high": 1.38},
    }
    document["floor"] = {"text": "no interval says anything"}
    summary = report.notes([document])[-1]
    assert "route effect 47.4 [38.4, 59.5] live, 1.17 [1.02, 1.38] with replay" in summary
    assert "float floor: no interval says anything" in summary
