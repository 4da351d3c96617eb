"""Train the model of the streaming demonstration: a small LLaMA with a context of 256.

The demo model's tokenizer and optimizers (`training.demo`), another architecture and other rows: each starts with BOS
and goes on with stories and prose, from the first word of a line or from the middle of one. BOS stands nowhere else, so
the model never sees a window that has lost its first token. The prose is what `pydoc` shows on the Python that runs
this: the topics of the language reference, and the docstrings of the standard library. Both are under the PSF licence,
and nothing has to be fetched.

Writes the model to --out, its figures to --docs, and the held-out text beside the checkpoint in --work, which is kept
between runs.

    python -m training.stream
    python -m training.stream --text     (the held-out text only)
"""

from __future__ import annotations

import ast
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from training.demo import ROOT, Batch, Recipe, Trainer, flags, prepare, train
from training.evaluate import record
from training.generated import story
from training.rows import BOS, PAD, Corpus, split_heldout

CONTEXT = 256
PIECE = 32  # positions per figure of the perplexity by position
HELD_SEED = 77
SKIPPED = {"site-packages", "test", "tests", "idlelib", "idle_test", "pydoc_data", "lib2to3", "__pycache__"}
LEAST = 60  # characters of a paragraph


def python_prose() -> list[str]:
    """Paragraphs of the topics and of all docstrings of the standard library, in a fixed order, each once."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    root = Path(os.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if not SKIPPED & set(file.relative_to(root).parts):
            texts += docstrings(file)
    blocks = (" ".join(block.split()) for text in texts for block in re.split(r"\n\s*\n", text))
    return list(dict.fromkeys(block for block in blocks if len(block) >= LEAST and block.isascii()))


def docstrings(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="ignore"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield text


class Mix:
    """Lines of text: half of them stories, half as long runs of paragraphs of Python's prose."""

    def __init__(self, corpus: Corpus) -> None:
        self.encode = corpus.encode
        self.kept, self.held = split_heldout(python_prose(), every=25)

    def prose(self, pool: list[str], at: int) -> tuple[str, int]:
        """Paragraphs from `at` on that make about as many tokens as a story, and where they end."""
        taken: list[str] = []
        while sum(map(len, taken)) < 500:
            taken.append(pool[at % len(pool)])
            at += 1
        return " ".join(taken), at

    def row(self, rng: Random, length: int, held: bool = False) -> list[int]:
        """BOS and `length` - 1 tokens, half the time from the beginning of a line."""
        pool = self.held if held else self.kept
        skipped = rng.randrange(200) if rng.random() < 0.5 else 0
        ids: list[int] = []
        while len(ids) < length + skipped:
            prose = rng.random() < 0.5
            line = self.prose(pool, rng.randrange(len(pool)))[0] if prose else " ".join(story(rng))
            ids += self.encode(line + "\n")
        return [BOS, *ids[skipped : skipped + length - 1]]

    def heldout(self) -> str:
        """All prose that was held out, each paragraph once and in order, a story of another seed after each run."""
        rng, lines, at = Random(HELD_SEED), list[str](), 0
        while at < len(self.held):
            line, at = self.prose(self.held, at)
            lines += [line, " ".join(story(rng))]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class StreamRecipe(Recipe):
    """One stage, rows of the full context."""

    steps: int = 1200
    short_steps: int = 0
    long_rows: int = 16
    long_length: int = CONTEXT
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    inner: int = 512
    sink: float = 8.0
    gain: float = 3.0


def new_model(recipe: StreamRecipe, vocab: int) -> LlamaForCausalLM:
    """A fresh LLaMA with grouped KV heads and a tied head."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=CONTEXT,
        initializer_range=0.04,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=BOS,
        eos_token_id=BOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for matrix in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                matrix.mul_((2 * recipe.layers) ** -0.5)
        if recipe.sink:
            plant_sink(model, recipe)
    return model


def plant_sink(model: LlamaForCausalLM, recipe: StreamRecipe) -> None:
    """Start with an attention sink, as large models come to have and one this small does not in half an hour.

    The last three coordinates are set aside: `told` is alike in every token's embedding, `first` is BOS's alone. The
    heads of the last KV group of layer 0 ask `told` for `first`, in the two pairs of dimensions that turn least, and
    so rest on BOS from wherever they are; the value that they read there is `sink`, in coordinate `bias` alone. It is
    then what the norms above mostly divide by, and they multiply by `gain` instead. Training is free to change it all.
    """
    told, first, bias = range(recipe.hidden - 3, recipe.hidden)
    size, most = recipe.hidden // recipe.heads, recipe.hidden**0.5
    embedding, attention = model.model.embed_tokens.weight, model.model.layers[0].self_attn
    embedding[:, told], embedding[:, first], embedding[:, bias] = 0.12, 0.0, 0.0
    embedding[BOS] = 0.0
    embedding[BOS, first] = 3.0
    group = recipe.heads // recipe.kv_heads
    share = (recipe.sink / (group * most)) ** 0.5
    for head in range(recipe.heads - group, recipe.heads):
        attention.q_proj.weight[head * size + size // 2 - 2 : head * size + size // 2, told] += 1.2
        attention.o_proj.weight[:, head * size] = 0.0
        attention.o_proj.weight[bias, head * size] = share
    start = (recipe.kv_heads - 1) * size
    attention.k_proj.weight[start + size // 2 - 2 : start + size // 2, first] += 1.2
    attention.v_proj.weight[start : start + size, first] = 0.0
    attention.v_proj.weight[start] = 0.0
    attention.v_proj.weight[start, first] = share
    above = [norm for layer in model.model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    for norm in (*above[1:], model.model.norm):
        norm.weight.fill_(recipe.gain)
        norm.weight[bias] = 1 / most


@torch.no_grad()
def by_position(model: PreTrainedModel, mix: Mix, rows: int) -> list[float]:
    """Held-out perplexity of each `PIECE` positions of the context."""
    rng, total = Random(HELD_SEED), torch.zeros(CONTEXT)
    for _ in range(rows):
        ids = torch.tensor([mix.row(rng, CONTEXT + 1, held=True)])
        logits = model(input_ids=ids[:, :-1]).logits[0].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
    return [round(math.exp(nll), 3) for nll in (total / rows).view(-1, PIECE).mean(1).tolist()]


def main(argv: list[str] | None = None) -> int:
    parser = flags(__doc__, StreamRecipe, "stream", ROOT / "results/local/stream/model", 1)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "h2o_flexgen/data/demo", help="folder of a tokenizer")
    parser.add_argument("--sink", type=float, default=StreamRecipe.sink, help="of the planted sink, 0 for none")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--text", action="store_true", help="write the held-out text, train nothing")
    args = parser.parse_args(argv)
    prepare(args)
    recipe = StreamRecipe(seed=args.seed, steps=args.steps, sink=args.sink)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.tokenizer, model_max_length=CONTEXT)
    mix = Mix(Corpus(tokenizer, []))
    (args.work / "heldout.txt").write_text(mix.heldout(), encoding="utf-8")
    if args.text:
        return 0

    def draw(rng: Random, step: int) -> Batch:
        ids = torch.tensor([mix.row(rng, CONTEXT + 1) for _ in range(recipe.rows(step))])
        return ids, None, torch.ones(ids.shape)

    def look(model: PreTrainedModel) -> dict[str, list[float]]:
        return {"heldout_by_position": by_position(model, mix, 24)}

    train(Trainer(recipe, new_model(recipe, len(tokenizer)), args.work, draw, look), tokenizer, args, args.every)
    told = {"positions_per_figure": PIECE}
    record(args, recipe, lambda model: told | {"heldout_perplexity_by_position": by_position(model, mix, 128)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
