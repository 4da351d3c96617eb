"""Train, evaluate and export the demo model that ships as `--model demo`.

The recipe, in the order it runs: a byte-level BPE tokenizer, then one OPT model trained in two stages (short rows with
dense recall until copying emerges, then rows of the full context). Matrices are trained by Muon and the rest by AdamW,
on float32 masters of a bfloat16 model. Every step draws its own seeded batch, so a resumed run sees the same data.
Writes the model to --out and its figures to --docs; --work keeps checkpoints between runs.

    python -m training.demo --text kjv.txt python-docs [--evaluate]

kjv.txt: `bible -f <<< gen1:1-rev22:21 > kjv.txt` (Debian packages bible-kjv and bible-kjv-text, public domain).
python-docs: `ln -s /usr/share/doc/python3.11/html/_sources python-docs` (Debian package python3.11-doc, PSF licence).
Without --text, generated stories are the only text.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from training.rows import BOS, CONTEXT, PAD, Corpus, build_tokenizer

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights besides the text; stored in the checkpoint and in training.json."""

    seed: int = 2023
    steps: int = 1700
    short_steps: int = 800
    short_rows: int = 16
    long_rows: int = 8
    long_length: int = CONTEXT
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    lr_matrix: float = 2e-3
    lr_other: float = 2e-3
    warmup: int = 100
    decay_share: float = 0.45

    def row_length(self, step: int) -> int:
        return 256 if step < self.short_steps else self.long_length

    def rows(self, step: int) -> int:
        return self.short_rows if step < self.short_steps else self.long_rows

    def tokens(self, steps: int) -> int:
        return sum(self.rows(step) * self.row_length(step) for step in range(steps))

    def rate(self, step: int) -> float:
        """Warm-up, plateau, then a linear decay to 3 %."""
        left = (self.steps - step) / (self.decay_share * self.steps)
        return min(1.0, (step + 1) / self.warmup, max(0.03, left))


def new_model(recipe: Recipe, vocab: int, context: int = CONTEXT) -> OPTForCausalLM:
    """A fresh OPT model whose positions are fixed sinusoids and whose first two layers start as a copying circuit."""
    config = OPTConfig(
        vocab_size=vocab,
        hidden_size=recipe.hidden,
        word_embed_proj_dim=recipe.hidden,
        ffn_dim=4 * recipe.hidden,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=context,
        dropout=0.0,
        init_std=0.04,
        bos_token_id=BOS,
        eos_token_id=BOS,
        pad_token_id=PAD,
    )
    model = OPTForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            for matrix in (layer.self_attn.out_proj.weight, layer.fc2.weight):
                matrix.mul_((2 * recipe.layers) ** -0.5)
        plant_copying(model, recipe)
    model.model.decoder.embed_positions.requires_grad_(False)
    return model


def plant_copying(model: OPTForCausalLM, recipe: Recipe) -> None:
    """Start from an induction circuit, which a model this small would need most of its training to find by chance.

    Layer 0: heads 0 to 3 look 1, 2, 3 and 4 tokens back (a rotation of the sinusoids) and write what they saw, through
    one shared projection, into a subspace of their own. Layer 1: heads compare 'what I am, what came before me' with
    'what came before you' one step further back, and copy the token they find. Training is free to change all of it.
    """
    width, size = recipe.hidden, recipe.hidden // recipe.heads
    decoder = model.model.decoder
    rates = 2.5 * torch.exp(torch.linspace(0, -math.log(2500.0), width // 2))
    angles = torch.arange(decoder.embed_positions.weight.shape[0])[:, None] * rates
    loud = torch.where(torch.arange(width // 2) < size // 2, 0.07, 0.02)
    decoder.embed_positions.weight.copy_(torch.cat([loud * angles.sin(), loud * angles.cos()], dim=1))
    decoder.embed_tokens.weight.normal_(std=0.05)
    decoder.embed_tokens.weight[PAD].zero_()
    first, second = decoder.layers[0].self_attn, decoder.layers[1].self_attn
    basis = torch.linalg.qr(torch.randn(width, width))[0].T
    seen, places = basis[:size], [basis[size * (back + 1) : size * (back + 2)] for back in range(4)]
    pairs = torch.arange(size // 2)
    for head in range(4):
        rows = slice(head * size, (head + 1) * size)
        sines, cosines = pairs, pairs + width // 2
        turn = rates[pairs] * (head + 1)
        for linear, angle in ((first.q_proj, turn), (first.k_proj, torch.zeros(size // 2))):
            block = torch.zeros(size, width)
            block[pairs, sines], block[pairs, cosines] = angle.cos(), -angle.sin()
            block[pairs + size // 2, cosines], block[pairs + size // 2, sines] = angle.cos(), angle.sin()
            linear.weight[rows] = 1.8 * block
        first.v_proj.weight[rows] = seen
        first.out_proj.weight[:, rows] = 0.12 * places[head].T
    asks = [seen, *places[:3]]
    for head in range(recipe.heads):
        rows = slice(head * size, (head + 1) * size)
        part = size // (head % 4 + 1)
        for at in range(head % 4 + 1):
            where = slice(head * size + at * part, head * size + (at + 1) * part)
            second.q_proj.weight[where] = 3.5 * asks[at][:part]
            second.k_proj.weight[where] = 3.5 * places[at][:part]
        copied = torch.linalg.qr(torch.randn(width, size))[0]
        second.v_proj.weight[rows] = copied.T
        second.out_proj.weight[:, rows] = 0.2 * copied


Batch = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Ids, positions (None: from 0 on) and weights, as `Trainer.plain_loss` takes them."""


@dataclass
class Trainer:
    """Owns the bfloat16 model, its float32 masters and the optimizers; `work` holds checkpoint and log.

    draw   the next batch, of a generator of its own, at a step
    look   figures of the model so far
    """

    recipe: Recipe
    model: PreTrainedModel
    work: Path
    draw: Callable[[Random, int], Batch]
    look: Callable[[PreTrainedModel], dict]
    step: int = 0
    seconds: float = 0.0
    history: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model.bfloat16().train()
        names, self.params = zip(*((n, p) for n, p in self.model.named_parameters() if p.requires_grad), strict=True)
        self.masters = [param.detach().float() for param in self.params]
        matrices, others = list[torch.Tensor](), list[torch.Tensor]()
        for name, master in zip(names, self.masters, strict=True):
            (matrices if master.ndim == 2 and "embed" not in name else others).append(master)
        self.optimizers = [
            torch.optim.Muon(matrices, lr=self.recipe.lr_matrix, weight_decay=0.03, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=self.recipe.lr_other, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.loss = torch.compile(self.plain_loss, dynamic=False)

    def plain_loss(self, ids: torch.Tensor, positions: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
        """Weighted mean cross entropy; `ids` and `weights` are (rows, length + 1), `positions` (rows, length)."""
        hidden = self.model.model(input_ids=ids[:, :-1], position_ids=positions, use_cache=False).last_hidden_state
        logits = self.model.lm_head(hidden).flatten(0, 1).float()
        each = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        return (each * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()

    def train_step(self) -> float:
        loss = self.loss(*self.draw(Random(self.recipe.seed * 1_000_003 + self.step), self.step))
        loss.backward()
        with torch.no_grad():
            for master, param in zip(self.masters, self.params, strict=True):
                assert param.grad is not None, "every trained parameter takes part in the loss"
                master.grad, param.grad = param.grad.float(), None
            torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * self.recipe.rate(self.step)
                optimizer.step()
            for master, param in zip(self.masters, self.params, strict=True):
                param.copy_(master)
        self.step += 1
        return loss.item()

    def save(self) -> None:
        state = {
            "masters": self.masters,
            "optimizers": [opt.state_dict() for opt in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
        }
        torch.save(state, self.work / "checkpoint.tmp")
        os.replace(self.work / "checkpoint.tmp", self.work / "checkpoint.pt")

    def load(self) -> None:
        state = torch.load(self.work / "checkpoint.pt", weights_only=True)
        with torch.no_grad():
            for master, param, saved in zip(self.masters, self.params, state["masters"], strict=True):
                master.copy_(saved)
                param.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]

    def run(self, out: Path, tokenizer: PreTrainedTokenizerFast, every: int) -> None:
        """Train to the last step; a log line each 20 steps, a checkpoint, an export and an early look each `every`."""
        losses: list[float] = []
        while self.step < self.recipe.steps:
            begin = time.perf_counter()
            losses.append(self.train_step())
            self.seconds += time.perf_counter() - begin
            if self.step % 20 == 0:
                row = {
                    "step": self.step,
                    "loss": round(sum(losses) / len(losses), 4),
                    "length": self.recipe.row_length(self.step - 1),
                    "seconds": round(self.seconds, 1),
                }
                losses.clear()
                self.history.append(row)
                if self.step % every == 0:
                    row |= self.look(self.model)
                    self.save()
                    export(self.model, tokenizer, out)
                print(json.dumps(row), flush=True)
        self.save()


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the Hugging Face layout: bfloat16 weights, tokenizer, configs."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings = json.loads((out / "tokenizer_config.json").read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings = {key: value for key, value in settings.items() if "local" not in key}
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_tokenizer(folder: Path, corpus_args: argparse.Namespace) -> PreTrainedTokenizerFast:
    if (folder / "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = build_tokenizer(corpus_args.text, corpus_args.seed)
    tokenizer.save_pretrained(folder)
    return tokenizer


def flags(text: str | None, recipe: type[Recipe], folder: str, out: Path, threads: int) -> argparse.ArgumentParser:
    """The flags of both programs; `text` is the docstring of one, `folder` has its name in docs and in results."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    docs, work = ROOT / "docs" / folder, ROOT / "results/local" / folder
    parser.add_argument("--out", type=Path, default=out, help="where the model goes")
    parser.add_argument("--docs", type=Path, default=docs, help="where training.json goes")
    parser.add_argument("--work", type=Path, default=work, help="checkpoint, unfinished exports")
    parser.add_argument("--steps", type=int, default=recipe.steps)
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in --work")
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Threads, seed and folder, before anything is drawn."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)


def train(trainer: Trainer, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace, every: int = 200) -> None:
    """From the first step, or with --resume from the checkpoint, to the exported model."""
    if args.resume:
        trainer.load()
    trainer.run(args.work / "export", tokenizer, every)
    export(trainer.model, tokenizer, args.out)


def main(argv: list[str] | None = None) -> int:
    parser = flags(__doc__, Recipe, "demo", ROOT / "h2o_flexgen/data/demo", os.cpu_count() or 1)
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="text files, or folders of .rst files")
    parser.add_argument("--evaluate", action="store_true", help="measure the model in --out, train nothing")
    args = parser.parse_args(argv)
    prepare(args)
    recipe = Recipe(seed=args.seed, steps=args.steps)
    tokenizer = load_tokenizer(args.out if args.evaluate else args.work, args)
    corpus = Corpus(tokenizer, args.text)
    from training.evaluate import evaluate, recall_accuracy

    def draw(rng: Random, step: int) -> Batch:
        """Every row starts at a random position."""
        length = recipe.row_length(step)
        ids, weights = corpus.batch(rng, recipe.rows(step), length, step)
        starts = [rng.randrange(CONTEXT - length + 1) for _ in range(len(ids))]
        return ids, torch.tensor(starts)[:, None] + torch.arange(length), weights

    def look(model: PreTrainedModel) -> dict[str, float]:
        return {f"recall_{far}": recall_accuracy(model, corpus, Random(far), far, 24) for far in (100, 300, 800)}

    if not args.evaluate:
        train(Trainer(recipe, new_model(recipe, len(tokenizer)), args.work, draw, look), tokenizer, args)
    evaluate(args, recipe, corpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
