"""Dumps of log-probs: every format says the same, and what cannot be trusted or paired is refused with the place named."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from policies import Engine, Trainer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from r3 import cli, export
from r3.diagnose import LIVE, REPLAY, diagnose
from r3.diagnose.dumped import diagnose_dumps
from r3.diagnose.dumps import read_dump
from r3.errors import ConfigError, MetricError, R3Error

RNG = np.random.default_rng(0)
LENGTHS = [*range(5, 17)]
SEQUENCES = [
    (-0.5 - RNG.exponential(1, n), RNG.normal(0, 0.05, n), RNG.random(n) < 0.9, RNG.integers(0, 99, n)) for n in LENGTHS
]
IDS = [f"q{i}" for i in range(len(SEQUENCES))]


def jsonl(path: Path, scale: float = 1.0, *, named: bool = False) -> Path:
    with path.open("w") as file:
        for name, (rollout, d, mask, tokens) in zip(IDS, SEQUENCES, strict=True):
            train = (rollout + scale * d).tolist()
            entry = {
                "sample_id": name,
                "rollout_logprobs": rollout.tolist(),
                "train_logprobs": {"live": train, "replay": rollout.tolist()} if named else train,
                "loss_mask": mask.astype(int).tolist(),
                "tokens": tokens.tolist(),
                "weight_version": 7,
            }
            file.write(json.dumps(entry) + "\n")
    return path


def npz(path: Path) -> Path:
    rollout, d, mask, tokens = (np.concatenate(of) for of in zip(*SEQUENCES, strict=True))
    np.savez(
        path,
        lengths=np.array(LENGTHS),
        rollout_logprobs=rollout,
        train_logprobs=rollout + d,
        loss_mask=mask,
        tokens=tokens,
        weight_version=np.full(len(d), 7),
        sample_ids=np.array(IDS),
    )
    return path


def parquet(path: Path) -> Path:
    import pyarrow as pa
    import pyarrow.parquet

    rollout, d, mask, tokens = (np.concatenate(of) for of in zip(*SEQUENCES, strict=True))
    table = pa.table(
        {
            "sample_id": np.repeat(IDS, LENGTHS),
            "position": np.concatenate([np.arange(n) for n in LENGTHS]),
            "token": tokens,
            "logprob": rollout,
            "train_logprob": rollout + d,
            "loss_mask": mask,
            "weight_version": np.full(len(d), 7),
        }
    )
    order = RNG.permutation(len(d))  # rows may come in any order
    pa.parquet.write_table(table.take(order).sort_by("sample_id"), path)
    return path


def slime_samples() -> list[dict]:
    return [
        {
            "sample_index": name,
            "tokens": torch.cat([torch.tensor([1, 2, 3]), torch.from_numpy(tokens)]),
            "response_lengths": len(d),
            "loss_masks": torch.from_numpy(mask.astype(np.int32)),
            "rollout_log_probs": torch.from_numpy(rollout),
            "log_probs": torch.from_numpy(rollout + d),
        }
        for name, (rollout, d, mask, tokens) in zip(IDS, SEQUENCES, strict=True)
    ]


def slime2(path: Path) -> Path:
    torch.save({"format_version": 2, "rollout_id": 0, "rank": 0, "samples": slime_samples(), "dp_shards": []}, path)
    return path


def slime1(path: Path) -> Path:
    samples = slime_samples()
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    columns["sample_indices"] = columns.pop("sample_index")
    torch.save({"rollout_id": 0, "rank": 0, "rollout_data": {**columns, "raw_reward": 1.0}}, path)
    return path


def verl_tensors() -> dict[str, np.ndarray]:
    width = max(LENGTHS)

    def padded(which: int, dtype: type) -> np.ndarray:
        out = np.zeros((len(SEQUENCES), width), dtype)
        for i, (rollout, d, mask, tokens) in enumerate(SEQUENCES):
            values = (rollout, rollout + d, mask, tokens)[which]
            out[i, : len(values)] = values
        return out

    names = ("rollout_log_probs", "old_log_probs", "response_mask", "responses")
    return {name: padded(i, (float, float, np.int64, np.int64)[i]) for i, name in enumerate(names)}


def verl_pt(path: Path) -> Path:
    torch.save({name: torch.from_numpy(values) for name, values in verl_tensors().items()}, path)
    return path


def verl_safetensors(path: Path) -> Path:
    save_file(verl_tensors(), path)
    return path


MAKERS = {
    "a.jsonl": jsonl,
    "a.npz": npz,
    "a.parquet": parquet,
    "slime-2.pt": slime2,
    "slime-1.pt": slime1,
    "verl.pt": verl_pt,
    "verl.safetensors": verl_safetensors,
}


@pytest.mark.parametrize("name", MAKERS)
def test_every_format_says_the_same(tmp_path, name: str) -> None:
    result = diagnose_dumps({"train": [MAKERS[name](tmp_path / name)]}, resamples=100)
    assert list(result.forwards) == ["train"]
    gap = result.gaps["train"]
    d = np.concatenate([d[mask] for _, d, mask, _ in SEQUENCES])
    assert gap.num_tokens == len(d)
    assert gap.k3 == pytest.approx(float((np.expm1(d) - d).mean()), rel=1e-6)
    assert gap.k1 == pytest.approx(float(-d.mean()), rel=1e-6)
    assert result.verdict.level == "unknown"
    assert "nothing says what replay would change" in result.verdict.text
    top = result.forwards["train"].top_tokens[0]
    sequence, at = max(((i, int(j)) for i in range(len(LENGTHS)) for j in np.flatnonzero(SEQUENCES[i][2])),
                       key=lambda ij: np.expm1(SEQUENCES[ij[0]][1][ij[1]]) - SEQUENCES[ij[0]][1][ij[1]])  # fmt: skip
    assert (top.token_id, top.position) == (SEQUENCES[sequence][3][at], at)
    json.dumps(result.to_dict(), allow_nan=False)


def test_two_dumps_of_the_same_rollout_are_paired(tmp_path) -> None:
    on, off = jsonl(tmp_path / "on.jsonl", 0.1), jsonl(tmp_path / "off.jsonl")
    result = diagnose_dumps({"live": [off], "replay": [on]}, resamples=200)
    assert list(result.forwards) == ["live", "replay"]
    compared = result.comparison("k3")
    assert compared.ratio.value == pytest.approx(0.01, rel=0.05)
    assert compared.ratio.high < 0.02
    assert result.verdict.text.startswith("Replay lowers the gap by")
    assert result.forwards[LIVE].by_version[0]["version"] == 7
    named = diagnose_dumps({"train": [jsonl(tmp_path / "both.jsonl", named=True)]}, resamples=100)
    assert list(named.forwards) == ["live", "replay"]
    assert named.gaps[REPLAY].k3 == 0


def test_the_same_numbers_as_with_the_model(tmp_path) -> None:
    """Export a store to parquet, add the trainer's log-probs as a column: diagnosed without the model, the result is the same."""
    import pyarrow as pa
    import pyarrow.parquet

    store, trainer = Engine().store(tmp_path / "s", count=12), Trainer()
    export.export(tmp_path / "s", tmp_path / "s.parquet")
    table = pa.parquet.read_table(tmp_path / "s.parquet")
    scored = [trainer.score([sample], replay=False, temperature=1.0)[0].logprobs for sample in store]
    column = pa.array(np.concatenate(scored))
    pa.parquet.write_table(table.append_column("train_logprob", column), tmp_path / "t.parquet")
    dumped = diagnose_dumps({"live": [tmp_path / "t.parquet"]}, resamples=100)
    assert dumped.gaps[LIVE].k3 == pytest.approx(diagnose(store, trainer, resamples=100).gaps[LIVE].k3, rel=1e-6)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def pickled(path: Path) -> Path:
    torch.save({"rollout_log_probs": pathlib_trap()}, path)
    return path


class pathlib_trap:
    def __reduce__(self):
        return (pytest.fail, ("a dump was unpickled",))


def cut_npz(path: Path) -> Path:
    np.savez(path, lengths=np.array([3]), rollout_logprobs=-np.ones(2), train_logprobs=-np.ones(3))
    return path


def few_ids(path: Path) -> Path:
    ones = -np.ones(2)
    np.savez(path, lengths=np.array([1, 1]), rollout_logprobs=ones, train_logprobs=ones, sample_ids=np.array(["a"]))
    return path


def bfloat16(path: Path) -> Path:
    from safetensors.torch import save_file as save_tensors

    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    save_tensors({name: -torch.ones(1, 2, dtype=torch.bfloat16) for name in names}, path)
    return path


def slime_rollout_only(path: Path) -> Path:
    torch.save({"rollout_id": 0, "samples": [{"index": 0, "tokens": [1, 2], "rollout_log_probs": [-1.0]}]}, path)
    return path


def cp_slice(path: Path) -> Path:
    samples = slime_samples()
    samples[2]["log_probs"] = samples[2]["log_probs"][:2]
    torch.save({"samples": samples}, path)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "gone.npz", "no such file"),
        (lambda p: write(p / "a.csv", "x"), "not a dump of log-probs"),
        (lambda p: write(p / "a.jsonl", "{"), r"a.jsonl:1: not JSON"),
        (
            lambda p: write(p / "a.jsonl", '{"input": "", "output": "", "score": 1}'),
            "holds texts and scores, not log-probs",
        ),
        (lambda p: write(p / "a.jsonl", '{"rollout_logprobs": [-1]}'), "no log-probs of the trainer"),
        (
            lambda p: write(p / "a.jsonl", '{"rollout_logprobs": [-1], "train_logprobs": [-1, -2]}'),
            "train_logprobs train and rollout_logprobs are of unequal length",
        ),
        (lambda p: write(p / "a.jsonl", '{"rollout_logprobs": [-1], "train_logprobs": [2]}'), "not a log-prob"),
        (lambda p: write(p / "a.jsonl", '{"rollout_logprobs": [-9999], "train_logprobs": [-1]}'), "not a log-prob"),
        (lambda p: write(p / "a.jsonl", '{"rollout_logprobs": [{}], "train_logprobs": [-1]}'), "not all numbers"),
        (
            lambda p: write(
                p / "a.jsonl", '{"rollout_logprobs": [-1], "train_logprobs": [-1], "weight_version": "v3"}'
            ),
            "weight_version are not all numbers",
        ),
        (
            lambda p: write(
                p / "a.jsonl", '{"rollout_logprobs": [-1], "train_logprobs": [-1], "weight_version": 1e12}'
            ),
            "weight_version is out of range",
        ),
        (
            lambda p: write(p / "a.jsonl", '{"rollout_logprobs": [-1], "train_logprobs": [-1], "loss_mask": [null]}'),
            "loss_mask is not known for every token",
        ),
        (
            lambda p: write(
                p / "a.jsonl",
                '{"rollout_logprobs": [-1], "train_logprobs": {"a": [-1], "b": [-1]}}\n'
                '{"rollout_logprobs": [-1], "train_logprobs": {"a": [-1]}}',
            ),
            "a sequence has other forwards than the first one",
        ),
        (lambda p: few_ids(p / "a.npz"), "one id per sequence"),
        (lambda p: bfloat16(p / "a.safetensors"), "dtype that numpy has not"),
        (lambda p: write(p / "a.npz", "no zip"), "not an .npz of plain arrays"),
        (lambda p: cut_npz(p / "a.npz"), "does not have one value per token"),
        (lambda p: write(p / "a.parquet", "no"), "not a parquet file"),
        (lambda p: write(p / "a.safetensors", "no"), "not a safetensors file"),
        (lambda p: pickled(p / "a.pt"), "cannot read this file without executing code"),
        (lambda p: slime_rollout_only(p / "a.pt"), "no log_probs of the trainer"),
        (
            lambda p: cp_slice(p / "a.pt"),
            "sample 'q2': train_logprobs train and rollout_logprobs are of unequal length",
        ),
        (
            lambda p: write(p / "a.jsonl", '{"rollout_logprobs": [-1], "train_logprobs": [-1], "loss_mask": [0]}'),
            "no sampled token to compare",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(tmp_path, make, message: str) -> None:
    with pytest.raises(R3Error, match=message):
        diagnose_dumps({"train": [make(tmp_path)]})


def test_a_pickled_batch_of_verl_is_never_loaded(tmp_path) -> None:
    path = tmp_path / "batch.pt"
    path.write_bytes(pickle.dumps(pathlib_trap()))
    with pytest.raises(MetricError, match="without executing code"):
        next(read_dump(path))


def test_dumps_that_are_not_the_same_rollout_are_not_paired(tmp_path) -> None:
    a = jsonl(tmp_path / "a.jsonl")
    lines = a.read_text().splitlines()
    fewer = write(tmp_path / "fewer.jsonl", "\n".join(lines[:-1]))
    with pytest.raises(MetricError, match="1 samples of the first dump are not in 'replay'"):
        diagnose_dumps({"live": [a], "replay": [fewer]})
    with pytest.raises(MetricError, match="has a sample that the first has not"):
        diagnose_dumps({"live": [fewer], "replay": [a]})
    entry = json.loads(lines[0])
    entry["rollout_logprobs"][0] -= 0.5
    other = write(tmp_path / "other.jsonl", "\n".join([json.dumps(entry), *lines[1:]]))
    with pytest.raises(MetricError, match="they are not the same rollout"):
        diagnose_dumps({"live": [a], "replay": [other]})
    with pytest.raises(MetricError, match="a sample twice"):
        diagnose_dumps({"live": [a, a]})


def test_guards_work_without_a_model(tmp_path) -> None:
    """A temperature shows in the slope, a shift in the correlations."""
    engine = Engine(temperature=0.6, processed=True)
    trainer = Trainer(flips=0.0)

    def dump(path: Path, shift: int, temperature: float) -> Path:
        trainer.shift = shift
        with path.open("w") as file:
            for sample in (engine.sample(f"s{i}", 60) for i in range(12)):
                [scored] = trainer.score([sample], replay=False, temperature=temperature)
                used = sample.loss_mask
                entry = {
                    "rollout_logprobs": sample.rollout_logprobs[used].tolist(),
                    "train_logprobs": scored.logprobs[used].tolist(),
                }
                file.write(json.dumps(entry) + "\n")
        return path

    def found(shift: int, temperature: float) -> list[str]:
        result = diagnose_dumps({"train": [dump(tmp_path / "d.jsonl", shift, temperature)]}, resamples=100)
        return [f.id for f in result.findings if f.id not in ("few-sequences", "unknown-weights")]

    assert found(0, 0.6) == []
    assert found(0, 1.0) == ["slope"]
    assert found(1, 0.6) == ["token-shift"]


def test_an_unknown_file_is_a_wrong_setting(tmp_path) -> None:
    with pytest.raises(ConfigError):
        diagnose_dumps({"train": [tmp_path / "gone.pt"]})


def test_the_command_reads_dumps(tmp_path) -> None:
    on, off = jsonl(tmp_path / "on.jsonl", 0.1), jsonl(tmp_path / "off.jsonl")
    out = tmp_path / "out" / "d"
    command = ["diagnose", "--logprobs", f"live={off}", "--logprobs", f"replay={on}", "--report", str(out), "--no-page"]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "Replay lowers the gap by" in done.output
    data = json.loads(out.with_suffix(".json").read_text())
    assert data["diagnoses"][0]["run"]["source"] == [str(off), str(on)]
    assert out.with_suffix(".sequences.npz").is_file()
    for wrong, message in (
        (["diagnose"], "nothing to diagnose"),
        (["diagnose", str(tmp_path), "--logprobs", str(on)], "takes neither stores nor a model"),
        (["diagnose", str(tmp_path), "--model", "m", "--r2-model", "m"], "does nothing without --r2"),
    ):
        assert message in str(CliRunner().invoke(cli.app, wrong).exception)


def test_sequences_without_names_pair_by_their_order(tmp_path) -> None:
    """veRL's tensors name no sample: the two files of a pair have other names, and one forward may have several files."""
    (tmp_path / "rank1").mkdir()
    off, on, more = (verl_pt(tmp_path / name) for name in ("r3-off.pt", "r3-on.pt", "rank1/r3-off.pt"))
    paired = diagnose_dumps({"live": [off], "replay": [on]}, resamples=100)
    assert list(paired.forwards) == [LIVE, REPLAY]
    assert paired.sequences == len(LENGTHS)
    assert diagnose_dumps({"train": [off, more]}, resamples=100).sequences == 2 * len(LENGTHS)


def test_an_aborted_sample_of_slime_is_an_empty_sequence(tmp_path) -> None:
    samples = slime_samples()
    empty = {"loss_masks": [], "rollout_log_probs": [], "log_probs": []}
    torch.save({"samples": [*samples, {**samples[0], **empty, "sample_index": 99}]}, tmp_path / "a.pt")
    assert diagnose_dumps({"train": [tmp_path / "a.pt"]}, resamples=100).empty == 1


def test_null_weight_versions_are_unknown(tmp_path) -> None:
    entry = {"rollout_logprobs": [-1, -2], "train_logprobs": [-1, -2], "weight_version": [None, 3]}
    [sequence] = read_dump(write(tmp_path / "a.jsonl", json.dumps(entry)))
    assert sequence.versions.tolist() == [-1, 3]
