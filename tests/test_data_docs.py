"""The Python code of docs/data.md runs, in its order, on stores like those that it speaks of."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen
import torch
import torch.distributed as dist
from helpers import random_sample

from r3 import ShardStore
from r3.trainers.transformers import detach

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/data.md").read_text(), re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """shards/step-000011 and -12 with 6 groups of 4 each; one of the older step is of older weights."""
    monkeypatch.chdir(tmp_path)
    run = ShardStore("shards", create=True)
    rng = np.random.default_rng(0)
    for step in (11, 12):
        store = run.step(step, create=True)
        for group in range(6):
            for number in range(4):
                sample = random_sample(
                    rng,
                    qwen.SPEC,
                    10 + number,
                    sample_id=f"p{group}.{number}",
                    group_id=f"p{group}",
                    weight_version=5 if (step, group) == (11, 0) else step,
                )
                store.add(sample, fsync=False)
    return tmp_path


def trusting(model: Any, **options: Any) -> Any:
    """The routes are random here, so the model does not agree with them."""
    from r3.trainers.transformers import attach

    return attach(model, **{"min_agreement": 0, **options})


@pytest.mark.usefixtures("one_thread", "folder")
def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == 8
    model = qwen.build()
    names: dict[str, Any] = {"model": model, "rank": 0, "world_size": 1, "trusting": trusting}
    for block in BLOCKS:
        exec(compile(block.replace("attach(model)", "trusting(model)"), "docs/data.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "44 samples, 4 left out: too old" in printed
    assert [line.split() for line in printed.splitlines()[-3:]] == [["0", "7"], ["1", "7"], ["2", "7"]]
    assert any(parameter.grad is not None for parameter in model.parameters())
    detach(model)


def work(rank: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    names: dict[str, Any] = {"trusting": trusting}
    imports = [line for block in BLOCKS for line in block.splitlines() if line.startswith(("from ", "import "))]
    exec("\n".join(imports), names)
    exec(BLOCKS[-1].replace("attach(model)", "trusting(model)"), names)
    model = qwen.build().train()
    state, coverage = names["train"](model, "shards/step-000012")
    _, none = names["train"](qwen.build().train(), "shards/step-000012", state)
    torch.save((coverage.forwards, coverage.replayed, none.forwards), Path(out) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_the_fsdp_loop_runs_on_two_ranks(folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(work, (port, str(folder)), nprocs=2, start_method="fork")
    results = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    assert [result[0] for result in results] == [3, 3]  # 6 groups
    assert [result[2] for result in results] == [0, 0]  # nothing is left after the last state
    assert sum(result[1] for result in results) == sum(s.num_tokens - 1 for s in ShardStore("shards/step-000012"))
