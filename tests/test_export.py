"""Export, and the commands verify, gc and export as their user meets them."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as parquet
import pytest
from helpers import SPEC, r3, random_sample

from r3 import RoutingSpec, ShardStore, export
from r3.errors import ConfigError, SpecError, StoreError

RNG = np.random.default_rng(4)


@pytest.fixture
def run(tmp_path) -> ShardStore:
    """A flat sample and two steps of two; the last token of each has no row."""
    store = ShardStore(tmp_path / "run", create=True)
    store.add(random_sample(RNG, sample_id="flat/1"))
    for step in (3, 4):
        for i in range(2):
            store.step(step, create=True).add(random_sample(RNG, num_tokens=5 + i, sample_id=f"p.{i}"))
    return store


def test_npz_holds_every_array_of_every_sample(run, tmp_path) -> None:
    seen = []
    assert export.export(run.root, tmp_path / "out.npz", progress=lambda *now: seen.append(now)) == 5
    assert seen[-1] == (5, 5)
    with np.load(tmp_path / "out.npz") as file:
        assert len(file.files) == 5 * 7
        for prefix, sample in {"flat/1": run.open("flat/1"), "step-000004/p.1": run.step(4).open("p.1")}.items():
            assert np.array_equal(file[f"{prefix}/routed_experts"], sample.routes.ids)
            assert np.array_equal(file[f"{prefix}/recorded"], sample.routes.recorded)
            for name in ("tokens", "rollout_logprobs", "loss_mask", "weight_version"):
                assert np.array_equal(file[f"{prefix}/{name}"], getattr(sample, name), equal_nan=name[0] == "r")
            assert json.loads(str(file[f"{prefix}/metadata"]))["sample_id"] == sample.sample_id


def test_parquet_has_a_row_per_token(run, tmp_path) -> None:
    assert export.export(run.root, tmp_path / "out.parquet") == 5
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column_names[-3:] == ["layer_01", "layer_02", "layer_03"]  # decoder layer 0 is dense
    rows = [row for row in table.to_pylist() if (row["step"], row["sample_id"]) == (4, "p.1")]
    sample = run.step(4).open("p.1")
    assert [row["token"] for row in rows] == sample.tokens.tolist()
    assert [row["position"] for row in rows] == list(range(6))
    assert [row["logprob"] for row in rows] == [None] * 4 + sample.rollout_logprobs[4:].tolist()
    assert [row["layer_02"] for row in rows] == [*sample.routes.ids[1, :5].tolist(), None]
    assert [row["recorded"] for row in rows] == [True] * 5 + [False]
    assert {row["step"] for row in table.to_pylist()} == {None, 3, 4}
    one = parquet.read_table(tmp_path / "out.parquet", filters=[("sample_id", "==", "flat/1")])
    assert one.num_rows == 12


def test_parquet_of_many_experts(tmp_path) -> None:
    store = ShardStore(tmp_path / "run", create=True)
    sample = random_sample(RNG, RoutingSpec(120, (3, 110), 512, 4), 6)
    store.add(sample)
    export.export(store.path_of("s0"), tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column("layer_110").to_pylist()[:5] == sample.routes.ids[1, :5].tolist()
    assert str(table.schema.field("layer_003").type) == "fixed_size_list<element: uint16>[4]"


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(run, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"expected a name ending in \.npz or \.parquet"):
        export.export(run.root, tmp_path / "out.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="no shard to export"):
        export.export(tmp_path / "empty", tmp_path / "out.npz")
    with pytest.raises(StoreError, match="cannot write this file"):
        export.export(run.root, tmp_path / "absent" / "out.npz")
    run.add(random_sample(RNG, RoutingSpec(4, (1, 2), 8, 2), sample_id="other"))
    with pytest.raises(SpecError, match=r"sample 'other'"):
        export.export(run.root, tmp_path / "out.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "run"]


def test_the_command_verify(run, monkeypatch, capsys) -> None:
    code, text = r3(monkeypatch, capsys, "verify", run.root)
    assert (code, "5 of 5 shards are good" in text) == (0, True)
    bad = run.step(3).path_of("p.1")
    data = bytearray(bad.read_bytes())
    data[200] ^= 1  # in the metadata
    bad.write_bytes(data)
    code, text = r3(monkeypatch, capsys, "verify", run.root)
    assert code == 1
    assert "4 of 5 shards are good" in text
    assert f"bad: {bad}: " in text
    code, text = r3(monkeypatch, capsys, "verify", run.path_of("flat/1"))
    assert (code, "1 of 1 shards are good" in text) == (0, True)


def test_the_command_gc(run, monkeypatch, capsys) -> None:
    code, text = r3(monkeypatch, capsys, "gc", run.root, "--keep-steps", 1, "--dry-run")
    assert (code, "1 of 2 steps (3 to 3) would be deleted" in text) == (0, True)
    assert run.steps() == [3, 4]
    code, text = r3(monkeypatch, capsys, "gc", run.root, "--keep-steps", 1)
    assert (code, "1 of 2 steps (3 to 3) deleted" in text) == (0, True)
    assert run.steps() == [4]
    code, text = r3(monkeypatch, capsys, "gc", run.root / "step-000004", "--keep-steps", 1)
    assert (code, "0 of 0 steps deleted" in text) == (0, True)
    assert r3(monkeypatch, capsys, "gc", run.root)[0] == 2


def test_the_command_export(run, tmp_path, monkeypatch, capsys) -> None:
    code, text = r3(monkeypatch, capsys, "export", run.root, tmp_path / "out.npz", "--limit", 2)
    assert (code, "2 samples written to" in text) == (0, True)
    with np.load(tmp_path / "out.npz") as file:
        assert len(file.files) == 2 * 7
    code, text = r3(monkeypatch, capsys, "export", run.root, tmp_path / "out.txt")
    assert (code, "a name ending in .npz or .parquet" in text) == (1, True)


def test_inspect_reads_heads_and_counts_steps(run, monkeypatch, capsys) -> None:
    text = r3(monkeypatch, capsys, "inspect", run.root)[1]
    assert "steps │ 2 (3 to 4)" in text
    assert "samples │ 5 in 1 groups" in text
    assert "tokens │ 34 (14 in the loss)" in text
    assert "recorded rows │ 29 of 34" in text
    assert SPEC.brief() in r3(monkeypatch, capsys, "inspect", run.step(3).path_of("p.0"))[1]
