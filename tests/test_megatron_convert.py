"""Qwen3-MoE weights in Megatron-core: the same numbers as transformers in every layout, and the same files when saved."""

from __future__ import annotations

import json
import pickle
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen
import torch
import transformers
from megatron_hf_ranks import LAYOUTS, run
from safetensors.torch import load_file, save_file

from r3 import ShardStore
from r3.errors import ConfigError
from r3.trainers.score import TransformersScorer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("one_thread")]

LENGTHS = (9, 12, 5, 16)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE of four layers, the first one dense, with untied embeddings; and samples with random routes."""
    path = tmp_path_factory.mktemp("qwen") / "model"
    qwen.build(norm_topk_prob=True).save_pretrained(path)
    store = ShardStore(path / "shards", create=True)
    for sample in qwen.samples_of(*LENGTHS):
        store.add(sample)
    return path


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, Any]:
    scorer = TransformersScorer(model_dir, dtype="float32", device="cpu")
    samples = list(ShardStore(model_dir / "shards"))
    return {name: scorer.score(samples, replay=name == "replay") for name in ("live", "replay")}


@pytest.fixture(scope="module")
def ranks(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """(where the saved models are, what each of two ranks saw in each layout)."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run, args=(port, model_dir, out), nprocs=2)
    return out, [pickle.loads((out / f"{rank}.pickle").read_bytes()) for rank in (0, 1)]


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayouts:
    def test_log_probs_and_experts_are_those_of_transformers(self, layout, ranks, expected) -> None:
        for seen in ranks[1]:
            for forward in ("live", "replay"):
                for got, want in zip(seen[layout][forward], expected[forward], strict=True):
                    assert np.isnan(got.logprobs[0])
                    assert np.abs(got.logprobs[1:] - want.logprobs[1:]).max() < 2e-5
                    assert np.array_equal(got.expert_ids, np.sort(want.expert_ids, axis=-1))

    def test_each_rank_reads_what_it_holds(self, layout, ranks) -> None:
        for seen in ranks[1]:
            read, held = seen[layout]["read"]
            assert read == held

    def test_megatron_knows_which_parameters_are_parts(self, layout, ranks) -> None:
        """Its gradient norm, by which gradients are clipped, counts others on one rank only."""
        assert [seen[layout]["uncounted"] for seen in ranks[1]] == [[], []]

    def test_saved_weights_are_the_ones_that_were_loaded(self, layout, ranks, model_dir) -> None:
        original = load_file(model_dir / "model.safetensors")
        index = json.loads((ranks[0] / layout / "model.safetensors.index.json").read_text())
        saved: dict[str, torch.Tensor] = {}
        for file in set(index["weight_map"].values()):
            part = load_file(ranks[0] / layout / file)
            assert set(part) == {name for name, place in index["weight_map"].items() if place == file}
            saved |= part
        assert saved.keys() == original.keys()
        assert all(torch.equal(saved[name], original[name]) for name in original)
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(ranks[0] / layout)
        assert torch.equal(reloaded.lm_head.weight, original["lm_head.weight"])


def test_the_stages_hold_layers_of_their_own(ranks) -> None:
    assert [seen["pipeline"]["layers"] for seen in ranks[1]] == [(1,), (2, 3)]
    assert [seen["interleaved"]["layers"] for seen in ranks[1]] == [(2,), (1, 3)]
    assert ranks[1][0]["tensor and expert"]["describe"]["parallel"] == "TP 2 EP 2"


# One process ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    from megatron.core import parallel_state

    from r3.trainers.megatron import model

    model.initialize()
    yield model
    torch.distributed.destroy_process_group()
    parallel_state.destroy_model_parallel()


def logits_of(alone: Any, path: Path, tokens: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(Megatron's, transformers'), [b, s, vocabulary] float32."""
    (chunk,) = alone.load_model(path, dtype=dtype)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.no_grad():
        return chunk.eval()(tokens, None, None).float(), reference(tokens).logits.float()


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": True},
        {"norm_topk_prob": False},
        {"norm_topk_prob": True, "tie_word_embeddings": True, "mlp_only_layers": []},
        {
            "norm_topk_prob": True,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
        },
        {
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_logits_are_those_of_transformers(alone, tmp_path, changes) -> None:
    qwen.build(**changes).save_pretrained(tmp_path)
    tokens = torch.randint(0, 100, (2, 24), generator=torch.Generator().manual_seed(0))
    got, want = logits_of(alone, tmp_path, tokens, torch.float32)
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    got, want = logits_of(alone, tmp_path, tokens, torch.bfloat16)
    assert (got - want).abs().mean() < 0.02 * want.abs().mean()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.MixtralConfig(num_hidden_layers=1), "model family 'mixtral' is not converted"),
        (transformers.LlamaConfig(num_hidden_layers=1), "model family 'llama' is not converted"),
        (qwen.config(attention_bias=True), "features that are not converted"),
        (
            qwen.config(
                rope_parameters={
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 64,
                }
            ),
            "a scaled rotary embedding is not converted",
        ),
    ],
    ids=["mixtral", "llama", "bias", "yarn"],
)
def test_what_is_not_converted_is_refused_by_name(alone, tmp_path, config, message) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        alone.load_model(tmp_path, dtype=torch.float32)


def test_weights_that_do_not_fit_are_named(alone, tmp_path) -> None:
    qwen.build(norm_topk_prob=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    save_file({n: t for n, t in weights.items() if n != name}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=re.escape(name)):
        alone.load_model(tmp_path, dtype=torch.float32)
    weights["model.layers.1.mlp.gate.weight"] = torch.zeros(9, 32)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"router.weight from model.layers.1.mlp.gate.weight: .*does not fit"):
        alone.load_model(tmp_path, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"no config.json"):
        alone.load_model(tmp_path / "nowhere")


def test_saving_again_leaves_no_weights_of_another_save(alone, tmp_path) -> None:
    """transformers loads `model.safetensors` if there is one, whatever the index says."""
    from r3.trainers.megatron import convert

    path, out = tmp_path / "model", tmp_path / "out"
    for place in (path, out):
        qwen.build(norm_topk_prob=True).save_pretrained(place)
    (out / "model-00003-of-00004.safetensors").write_bytes(b"of four ranks")
    (chunk,) = alone.load_model(path, dtype=torch.float32)
    with torch.no_grad():
        chunk.output_layer.weight.fill_(0.5)
    convert.save([chunk], out, path)
    assert [file.name for file in out.glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert bool((reloaded.lm_head.weight == 0.5).all())
    with pytest.raises(ConfigError, match="would be overwritten"):
        convert.save([chunk], path, path)


def test_sizes_that_do_not_fit_the_processes_are_refused(alone) -> None:
    with pytest.raises(ConfigError, match="do not fit the number of processes"):
        alone.initialize(tensor=2)
    with pytest.raises(ConfigError, match="Megatron-core sums their gradients only if there is expert parallelism"):
        alone.initialize(tensor=2, expert_tensor=1)
