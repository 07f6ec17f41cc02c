"""Train the tiny mixture-of-experts model that the quickstart and the engine tests replay."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import random
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

STAMP = "tiny_moe.json"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "lib2to3", "turtledemo", "__pycache__"}
SPECIAL_TOKENS = ["<|bos|>", "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, PAD, IM_START, IM_END = range(256, 261)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from the text of the running interpreter's library."""

    format: int = 1
    seed: int = 0
    steps: int = 420
    batch: int = 8
    sequence: int = 256
    vocab: int = 272
    hidden: int = 128
    expert_hidden: int = 64
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 64
    top_k: int = 4
    init_std: float = 0.02
    peak_lr: float = 4e-3
    warmup: int = 30
    weight_decay: float = 0.1
    balance: float = 0.01
    z_loss: float = 1e-3
    tie: bool = True
    prompts: int = 512
    prompt_bytes: int = 64

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()


def build(
    out_dir: Path | str, steps: int = Recipe.steps, seed: int = Recipe.seed, recipe: Recipe | None = None
) -> Path:
    """Train into `out_dir`, or return at once if it already holds this recipe's model."""
    out = Path(out_dir)
    recipe = recipe or Recipe(steps=steps, seed=seed)
    if is_complete(out, recipe):
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    training, held_out = corpus()
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        model, loss = train(training, recipe)
        save(model, work)
        write_prompts(work / "prompts.jsonl", held_out, recipe)
        stamp = {"digest": recipe.digest, "loss": loss, "recipe": dataclasses.asdict(recipe)}
        (work / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
        os.chmod(work, 0o755)
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return out


def is_complete(out: Path, recipe: Recipe) -> bool:
    stamp = out / STAMP
    return stamp.is_file() and json.loads(stamp.read_text())["digest"] == recipe.digest


def corpus() -> tuple[list[bytes], list[bytes]]:
    """Sources and help topics of the running Python, split by a hash of the file's name: 7 of 8 train, 1 of 8 held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED.isdisjoint(relative.parts):
            chosen = held_out if hashlib.sha256(relative.as_posix().encode()).digest()[0] < 32 else training
            chosen.append(path.read_bytes())
    return training, held_out


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: id b is byte b, then the special tokens up to the vocabulary's end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = Tokenizer(models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    spare = [f"<|reserved_{i}|>" for i in range(Recipe.vocab - 256 - len(SPECIAL_TOKENS))]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS + spare])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def new_model(recipe: Recipe) -> Qwen3MoeForCausalLM:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=recipe.vocab,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.expert_hidden * recipe.top_k,
        moe_intermediate_size=recipe.expert_hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        num_experts=recipe.experts,
        num_experts_per_tok=recipe.top_k,
        norm_topk_prob=True,
        router_aux_loss_coef=recipe.balance,
        initializer_range=recipe.init_std,
        max_position_embeddings=1024,
        tie_word_embeddings=recipe.tie,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("grouped_mm")
    return model


def train(documents: list[bytes], recipe: Recipe) -> tuple[Qwen3MoeForCausalLM, float]:
    """Train in float32; the loss returned is the mean cross-entropy of the last tenth of the steps, in nats per byte."""
    import torch
    from torch.nn import functional as F
    from tqdm import tqdm
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    torch.manual_seed(recipe.seed)
    model = new_model(recipe).train()
    stream = torch.cat([torch.tensor([*document, EOS]) for document in documents])
    generator = torch.Generator().manual_seed(recipe.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=recipe.peak_lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, recipe))
    losses = []
    progress = tqdm(range(recipe.steps), desc="tiny MoE", unit="step")
    for _ in progress:
        tokens = windows(stream, recipe, generator)
        output = model(input_ids=tokens[:, :-1], output_router_logits=True, use_cache=False)
        logits = output.logits.flatten(0, 1)
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        balance = load_balancing_loss_func(output.router_logits, recipe.experts, recipe.top_k)
        z = logits.logsumexp(-1).square().mean()
        (loss + recipe.balance * balance + recipe.z_loss * z).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        rate = progress.format_dict["rate"]
        progress.set_postfix_str(
            f"loss {losses[-1]:.3f}, {(rate or 0) * recipe.batch * recipe.sequence:.0f} tokens/s", refresh=False
        )
    tail = losses[-max(1, recipe.steps // 10) :]
    return model, sum(tail) / len(tail)


def lr_factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then cosine decay to a tenth..."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def windows(stream: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    """Random windows of the training stream, [batch, sequence + 1]."""
    import torch

    starts = torch.randint(len(stream) - recipe.sequence - 1, (recipe.batch, 1), generator=generator)
    return stream[starts + torch.arange(recipe.sequence + 1)]


def save(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    import torch

    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def write_prompts(path: Path, documents: list[bytes], recipe: Recipe) -> None:
    """Snippets that start at a line of a held-out file; ASCII, so that bytes, characters and tokens are the same."""
    picker = random.Random(recipe.seed)
    with path.open("w") as file:
        for i in range(recipe.prompts):
            file.write(json.dumps({"id": f"prompt-{i:04d}", "prompt": snippet(documents, recipe, picker)}) + "\n")


def snippet(documents: list[bytes], recipe: Recipe, picker: random.Random) -> str:
    while True:
        document = picker.choice(documents)
        start = document.rfind(b"\n", 0, picker.randrange(len(document) + 1)) + 1
        text = document[start : start + recipe.prompt_bytes]
        if len(text) == recipe.prompt_bytes and text.isascii() and text.strip():
            return text.decode()


def main(
    out_dir: Path,
    steps: Annotated[
        int, typer.Option(help="Optimizer steps; fixed, so that a seed gives the same model.")
    ] = Recipe.steps,
    seed: Annotated[int, typer.Option(help="Seed of weights, batches and prompts.")] = Recipe.seed,
) -> None:
    """Train the tiny model into OUT_DIR, unless it is already there."""
    typer.echo(build(out_dir, steps, seed))


if __name__ == "__main__":
    typer.run(main)
