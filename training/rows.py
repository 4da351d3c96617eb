"""Rows of token ids for training the demo model, and its tokenizer: prose, stories, recall passages, repeated noise."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from training.generated import Fact, Piece, draw_facts, recall_passage, story

CONTEXT = 1024
VOCAB = 4096
BOS, PAD = 2, 1
ANSWER_WEIGHT = 5.0
DENSE_UNTIL, NOISE_UNTIL, EASY_UNTIL, REVIEW_FROM = 240, 288, 360, 800  # steps: the curriculum
VERSE = re.compile(r"^[A-Z0-9][A-Za-z0-9]{1,5}?(\d+:\d+)\s+(.*)$")
ROLE = re.compile(r":[\w:+-]+:`!?~?([^`<]+?)(?:\s*<[^`>]*>)?`")


def clean_rst(text: str) -> list[str]:
    """Prose paragraphs of a reStructuredText file: no directives, code, tables or headings."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        if block.startswith((" ", "\t", "..", "*", "-", "+", "|", "=", "#", ">", ":")) or len(block) < 120:
            continue
        line = re.sub(r"\s+", " ", ROLE.sub(r"\1", block)).strip()
        line = re.sub(r"`([^`<]+?)(\s*<[^`>]*>)?`_*", r"\1", line.replace("``", "").replace("::", ":"))
        line = re.sub(r"\*\*?([^*]+)\*\*?", r"\1", line).replace("\\", "")
        if line.endswith((".", ":", "?", "!")) and "====" not in line and "----" not in line and line.isascii():
            kept.append(line)
    return kept


def clean_plain(text: str) -> list[str]:
    """Paragraphs of a plain text file; numbered verses ('Ge1:1 In the ...') are joined, eight to a paragraph."""
    verses = [match[2] for match in map(VERSE.match, text.splitlines()) if match]
    if len(verses) > 100:
        return [" ".join(verses[at : at + 8]) for at in range(0, len(verses), 8)]
    return [re.sub(r"\s+", " ", block).strip() for block in re.split(r"\n\s*\n", text) if len(block) >= 80]


def load_source(path: Path) -> list[str]:
    """Paragraphs of one source: a text file, or a folder of reStructuredText files."""
    if path.is_dir():
        files = sorted([*path.rglob("*.rst"), *path.rglob("*.rst.txt")])
        return [line for file in files for line in clean_rst(file.read_text(encoding="utf-8", errors="ignore"))]
    return clean_plain(path.read_text(encoding="utf-8", errors="ignore"))


def split_heldout(paragraphs: list[str], run: int = 20, every: int = 40) -> tuple[list[str], list[str]]:
    """(training, held-out): every 40th run of 20 consecutive paragraphs is held out."""
    groups = [paragraphs[at : at + run] for at in range(0, len(paragraphs), run)]
    held = [line for index, group in enumerate(groups) if index % every == every - 1 for line in group]
    kept = [line for index, group in enumerate(groups) if index % every != every - 1 for line in group]
    return kept, held


def sentences_of(paragraph: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?]) +(?=[A-Z\"])", paragraph) if part]


def build_tokenizer(sources: list[Path], seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE with OPT's special ids; each digit, with the space before it, is a token, for copying codes."""
    rng = Random(seed)
    lines = [line for path in sources for line in split_heldout(load_source(path))[0]]
    for _ in range(4000):
        told = story(rng)
        lines.append(" ".join(told))
        spans = recall_passage(rng, told[:3], draw_facts(rng, 4, set()), 0.5, 1.0, 4)
        lines.append("".join(span.text for span in spans))
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return with_special_tokens(core, "</s>", CONTEXT)


def with_special_tokens(core: Tokenizer, eos: str, context: int) -> PreTrainedTokenizerFast:
    """As OPT has them: texts start with BOS."""
    core.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A </s> $B", special_tokens=[("</s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="</s>",
        eos_token=eos,
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


class RecallCase(NamedTuple):
    """A question about a fact last mentioned `distance` tokens back; `prompt` ends where the answer must come.

    `prompt[:question_at]` is the passage without the question; `asked` counts the earlier questions about the fact.
    """

    prompt: str
    answer: str
    distance: int
    question_at: int
    asked: int


class Corpus:
    """The sources as token streams, split into training and held-out, and the maker of seeded batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sources: list[Path]) -> None:
        self.tokenizer = tokenizer
        self.names = [path.stem.strip("_") for path in sources]
        self.train_text: list[list[str]] = []
        self.held_text: list[list[str]] = []
        self.streams: list[list[int]] = []
        for path in sources:
            kept, held = split_heldout(load_source(path))
            self.train_text.append(kept)
            self.held_text.append(held)
            self.streams.append(self.encode("\n".join(kept)))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_spans(self, spans: list[Piece]) -> tuple[list[int], list[float]]:
        """Ids of the joined text, and each token's loss weight: that of the span its last character lies in."""
        coded = self.tokenizer.backend_tokenizer.encode("".join(span.text for span in spans), add_special_tokens=False)
        weights = [span.weight for span in spans for _ in span.text]
        return coded.ids, [weights[end - 1] for _, end in coded.offsets]

    def filler(self, rng: Random, tokens: int, held: bool = False) -> list[str]:
        """Consecutive sentences of about `tokens` tokens: half the time stories, else one of the sources."""
        pools = self.held_text if held else self.train_text
        pool = rng.choice(pools) if pools and rng.random() < 0.5 else None
        at = rng.randrange(len(pool)) if pool else 0
        found: list[str] = []
        room = tokens * 4.2
        while room > 0:
            for sentence in sentences_of(pool[at % len(pool)]) if pool else story(rng):
                if room > 0:
                    found.append(sentence)
                    room -= len(sentence) + 1
            at += 1
        return found

    def passage(self, rng: Random, tokens: int, used: set[str], step: int) -> tuple[list[int], list[float]]:
        """A recall passage of about `tokens` tokens: few facts and long filler, or many facts and little filler."""
        most = max(2, min(10, tokens // 40))
        facts = draw_facts(rng, rng.randint(2, most), used)
        questions = rng.randint(1, len(facts))
        room = tokens - 17 * len(facts) - 24 * questions
        filler = self.filler(rng, room) if room > 15 else []
        late = len(filler) > 8 and rng.random() < 0.4
        plain = 0.95 if step < EASY_UNTIL else 0.6
        review = 0.12 if step >= REVIEW_FROM and rng.random() < 0.5 else 0.0
        return self.encode_spans(recall_passage(rng, filler, facts, plain, ANSWER_WEIGHT, questions, late, review))

    def recall_row(self, rng: Random, length: int, step: int) -> tuple[list[int], list[float]]:
        """Passages until the row is full, each whole; subjects are distinct within the row."""
        ids, weights, used = [BOS], [1.0], set[str]()
        while (room := length - len(ids)) > 90:
            size = room - 30 if rng.random() < 0.5 else rng.randint(60, room)
            if step < DENSE_UNTIL:
                size = min(size, rng.randint(80, 250))
            more, heavy = self.passage(rng, size, used, step)
            if len(more) < room:
                ids += [*more, BOS]
                weights += [*heavy, 1.0]
        more = self.encode(" ".join(story(rng)))[: length - len(ids)]
        return ids + more, weights + [1.0] * len(more)

    def text_row(self, rng: Random, length: int) -> list[int]:
        """A run of one source, or stories."""
        ids = [BOS]
        if self.streams and rng.random() < 0.6:
            stream = rng.choice(self.streams)
            start = rng.randrange(max(1, len(stream) - length))
            return ids + stream[start : start + length - 1]
        while len(ids) < length:
            ids += [*self.encode(" ".join(story(rng))), BOS]
        return ids[:length]

    def noise_row(self, rng: Random, length: int) -> tuple[list[int], list[float]]:
        """Random tokens said twice or more; only the repeats count. The quickest lesson in copying."""
        period = rng.randint(12, min(100, length // 2))
        ids = [rng.randrange(4, len(self.tokenizer)) for _ in range(period)]
        return (ids * (length // period + 1))[:length], ([0.0] * period + [1.0] * length)[:length]

    def batch(self, rng: Random, rows: int, length: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, weights), each (rows, length + 1)."""
        all_ids, all_weights = [], []
        noise = 0.15 if step < NOISE_UNTIL else 0.0
        recall = 0.45 if step < REVIEW_FROM else 0.4
        for _ in range(rows):
            kind, weights = rng.random(), [1.0] * (length + 1)
            if kind < noise:
                ids, weights = self.noise_row(rng, length + 1)
            elif kind < noise + recall:
                ids, weights = self.recall_row(rng, length + 1, step)
            else:
                ids = self.text_row(rng, length + 1)
            short = length + 1 - len(ids)
            all_ids.append(ids + [PAD] * short)
            all_weights.append(weights[: len(ids)] + [0.0] * short)
        return torch.tensor(all_ids), torch.tensor(all_weights)

    def recall_case(self, rng: Random, distance: int) -> RecallCase:
        """A fact told once, within 15 % of `distance` tokens before the question; the filler is held out."""
        while True:
            facts = draw_facts(rng, rng.randint(3, 6), set())
            filler = self.filler(rng, distance + rng.randint(0, 40), held=True)
            case = self.last_question(recall_passage(rng, filler, facts, 0.8, 1.0, 1), facts)
            if abs(case.distance - distance) <= 0.15 * distance and len(self.encode(case.prompt)) < CONTEXT - 20:
                return case

    def used_case(self, rng: Random, tokens: int) -> RecallCase:
        """A fact told early, asked for twice or more on the way, and last mentioned at least 30 % of the prompt ago."""
        while True:
            facts = draw_facts(rng, rng.randint(3, 6), set())
            filler = self.filler(rng, tokens - 100, held=True)
            case = self.last_question(recall_passage(rng, filler, facts, 0.8, 1.0, 1, True, 0.12), facts)
            length = len(self.encode(case.prompt))
            if case.asked > 1 and case.distance >= 0.3 * length and length < CONTEXT - 20:
                return case

    def last_question(self, spans: list[Piece], facts: list[Fact]) -> RecallCase:
        """Cut a passage just before its last answer."""
        prompt = "".join(span.text for span in spans[:-2])
        before = prompt[: len(prompt) - len(spans[-3].text) - 1]
        fact = next(fact for fact in facts if prompt.endswith(fact.lead))
        mentions = [*fact.tells, f"{fact.lead} {fact.answer}"]
        last = max(before.lower().rfind(mention.lower()) for mention in mentions)
        return RecallCase(
            prompt,
            fact.answer,
            len(self.encode(prompt[last:])),
            len(before),
            sum(before.count(ask) for ask in fact.asks),
        )
