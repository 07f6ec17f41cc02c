"""Two more tiny mixture-of-experts models, for seeing what routing replay does where the router is another.

Same text, size and recipe as the Qwen3-MoE of `tiny_moe.py`, whose docstring tells the rest:

    glm4_moe   DeepSeek-V3's router: sigmoid scores, experts in groups of which half are kept, a correction bias in place of a
               balancing loss, a dense first layer, a shared expert
    mixtral    softmax over the chosen experts only, no shared expert, untied embeddings

    python scripts/tiny_families.py glm4_moe OUT_DIR

Both end at 1.74 to 1.79 nats per byte. DeepSeek-V3 itself was tried first. The CPU build of vLLM 0.30 serves it with routes
(its MLA kernel needs the original's latent of 512 and 64), but its log-probs of the same weights are k3 = 0.46 away from
those of transformers, no nearer in float32 and one request at a time, and replay takes off a sixth: a gap that is not routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from tiny_moe import Recipe, build

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Mixtral(Recipe):
    """The recipe of Qwen3-MoE on the oldest of the families."""

    family: ClassVar[str] = "mixtral"

    def config(self) -> dict[str, Any]:
        return {
            **self.common(),
            "intermediate_size": self.expert_hidden,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_local_experts": self.experts,
            "router_aux_loss_coef": self.balance,
            "sliding_window": None,
            "tie_word_embeddings": False,
        }


@dataclass(frozen=True)
class Glm4Moe(Recipe):
    """DeepSeek-V3's router (arXiv 2412.19437) with every part that it has, on grouped-query attention."""

    groups: int = 4
    kept_groups: int = 2
    dense_layers: int = 1
    shared_experts: int = 1
    scaling: float = 1.0
    bias_rate: float = 0.001
    family: ClassVar[str] = "glm4_moe"

    def config(self) -> dict[str, Any]:
        return {
            **self.common(),
            "intermediate_size": self.expert_hidden * (self.top_k + self.shared_experts),
            "moe_intermediate_size": self.expert_hidden,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "n_routed_experts": self.experts,
            "n_group": self.groups,
            "topk_group": self.kept_groups,
            "n_shared_experts": self.shared_experts,
            "first_k_dense_replace": self.dense_layers,
            "routed_scaling_factor": self.scaling,
            "norm_topk_prob": True,
            "use_qk_norm": True,
            "tie_word_embeddings": False,
        }

    def forward(self, model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits, logits.new_zeros(())

    def balancer(self, model: PreTrainedModel) -> Callable[[], None]:
        """Section 2.1.2 of the paper: after each step, the bias of an expert that had more than the mean load falls by
        `bias_rate`, that of one that had less rises."""
        loads: dict[Any, torch.Tensor] = {}

        def counter(gate: Any) -> Callable[..., None]:
            def count(_experts: Any, arguments: tuple[Any, ...]) -> None:
                loads[gate] = arguments[1].flatten().bincount(minlength=self.experts).float()

            return count

        for layer in model.model.layers[self.dense_layers :]:
            layer.mlp.experts.register_forward_pre_hook(counter(layer.mlp.gate))

        def rebalance() -> None:
            for gate, load in loads.items():
                gate.e_score_correction_bias += self.bias_rate * (load.mean() - load).sign()

        return rebalance


RECIPES: dict[str, type[Recipe]] = {recipe.family: recipe for recipe in (Recipe, Glm4Moe, Mixtral)}


class Family(str, Enum):
    qwen3_moe = "qwen3_moe"
    glm4_moe = "glm4_moe"
    mixtral = "mixtral"


def main(
    family: Family,
    out_dir: Path,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = Recipe.steps,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and prompts.")] = Recipe.seed,
) -> None:
    """Train the tiny model of a FAMILY into OUT_DIR, unless it is already there."""
    typer.echo(build(out_dir, recipe=RECIPES[family.value](steps=steps, seed=seed)))


if __name__ == "__main__":
    typer.run(main)
