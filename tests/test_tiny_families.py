"""The recipes of the tiny models: what decides their weights is pinned, and each family trains and routes as it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import ModuleType

import pytest
import torch

from r3 import RoutingSpec

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import tiny_families

    return tiny_families


def test_recipe_of_the_quickstart_is_the_one_that_its_numbers_were_measured_with(families) -> None:
    """Docs and README quote numbers of these weights: a changed recipe must not pass for it."""
    assert families.Recipe().digest == "ed9f340b405d0966437acf9cfb3b2b2d981a8a0d6e4e06494a02b884dcaf4948"
    digests = {recipe().digest for recipe in families.RECIPES.values()}
    assert len(digests) == len(families.RECIPES) == 3


@pytest.mark.engine  # 15 s: three models are made and trained for some steps
@pytest.mark.parametrize(
    ("family", "moe_layers"), [("qwen3_moe", (0, 1, 2)), ("glm4_moe", (1, 2)), ("mixtral", (0, 1, 2))]
)
def test_family_trains_and_routes_as_its_recipe_says(families, family: str, moe_layers: tuple[int, ...]) -> None:
    import tiny_moe

    small = {
        "layers": 3,
        "hidden": 64,
        "heads": 2,
        "kv_heads": 1,
        "experts": 16,
        "batch": 2,
        "sequence": 64,
        "warmup": 3,
    }
    recipe = families.RECIPES[family](**small, steps=12)
    model = tiny_moe.new_model(recipe)
    spec = RoutingSpec.from_config(model.config)
    assert (spec.moe_layers, spec.num_experts, spec.top_k, spec.model_type) == (moe_layers, 16, 2, family)
    documents = [b"def f(x):\n    return x + 1\n" * 40]
    torch.manual_seed(0)
    trained, late = tiny_moe.train(documents, recipe)
    _, early = tiny_moe.train(documents, dataclasses.replace(recipe, steps=1))
    assert late < early - 1, (early, late)
    biases = [value for name, value in trained.named_buffers() if name.endswith("correction_bias")]
    assert len(biases) == (2 if family == "glm4_moe" else 0)
    for bias in biases:  # 12 steps of 0.001 up or down, and not the same for all
        assert 0.001 < float(bias.abs().max()) <= 0.0121
        assert len(bias.unique()) > 1


@pytest.mark.engine
def test_correction_biases_are_kept_in_float32(families, tmp_path) -> None:
    """Both engines read them so; rounded to bfloat16, steps of 0.001 around 0.5 would vanish."""
    import tiny_moe
    from safetensors.torch import load_file

    recipe = families.RECIPES["glm4_moe"](layers=2, hidden=64, heads=2, kv_heads=1, experts=16)
    model = tiny_moe.new_model(recipe)
    model.model.layers[1].mlp.gate.e_score_correction_bias.fill_(0.501)
    tiny_moe.save(model, tmp_path, recipe)
    tensors = load_file(tmp_path / "model.safetensors")
    (bias,) = [value for name, value in tensors.items() if name.endswith("correction_bias")]
    assert bias.dtype == torch.float32
    assert float(bias[0]) == pytest.approx(0.501)
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
