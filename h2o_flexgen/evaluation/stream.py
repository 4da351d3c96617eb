"""Perplexity along streams that are far longer than the model's context, at a fixed KV budget."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.reports.quality import Positions, StreamReport, StreamRow
from h2o_flexgen.engine.model import Model
from h2o_flexgen.errors import UsageError
from h2o_flexgen.evaluation.quality import Window, encoded, evicting, record_of, whole
from h2o_flexgen.evaluation.settings import TEXT_FILE, EvaluationSettings, StreamSettings, read_text, spread
from h2o_flexgen.planning.llm import LLM

CONTEXT_KEY = "max_position_embeddings"


class Streams(NamedTuple):
    """Parts of one text, all of `length` tokens, of which the first `prompt` are not scored.

    Each begins with the first `head` tokens of the text: BOS, if the tokenizer adds one.
    """

    pairs: list[Window]
    prompt: int
    length: int
    head: int

    def recomputed(self, window: int, context: int) -> list[Window]:
        """Every window of every stream after what precedes it, stream by stream: `context` tokens in all, or fewer."""
        pairs = []
        for ids in (prompt + rest for prompt, rest in self.pairs):
            for at in range(self.prompt, self.length, window):
                first = max(self.head, at - (context - window - self.head))
                pairs.append((ids[: self.head] + ids[first:at], ids[at : at + window]))
        return pairs


def evaluate_streams(
    streams: StreamSettings,
    settings: EvaluationSettings,
    model: str = "demo",
    engine: Mapping[str, Any] | None = None,
    on_row: Callable[[StreamRow], None] = lambda row: None,
) -> StreamReport:
    """Scores the same streams under every policy of `settings`, with every kind of positions.

    Each stream is one sequence: its first tokens are prefilled and pruned, all others decoded as given, so that
    eviction is active from then on. `engine` are further settings of LLM, `on_row` hears of each row. UsageError where
    the model has learned positions, and where the text is too short.
    """
    rows: list[StreamRow] = []
    with LLM(model, **(engine or {})) as llm:
        folder = _checked_folder(llm.model, streams.positions)
        name, text = _text(settings.text, folder)
        context = llm.model.spec.max_positions
        parts = cut_streams(llm, text, streams, settings.context)
    with longer_context(folder, parts.length + 1) as longer:
        for positions, cell in streams.cells(settings.policies, context):
            with evicting(longer if positions == "absolute" else model, engine, cell) as llm:
                row = _measure(llm, positions, cell, parts, streams.window)
                dtype, device = llm.model.dtype, llm.device.type
            rows.append(row)
            on_row(row)
    return StreamReport(
        model=model,
        dtype=dtype,
        device=device,
        text_file=name,
        context=context,
        prompt=parts.prompt,
        length=parts.length,
        window=streams.window,
        streams=len(parts.pairs),
        rows=tuple(rows),
    )


def cut_streams(llm: LLM, text: str, settings: StreamSettings, prompt: int | None) -> Streams:
    """Streams spread evenly over `text`, none overlapping; each starts as the tokenizer starts a text.

    `prompt` is how many tokens are read before the first is scored, None for as many as a window has. UsageError where
    the text has not one stream.
    """
    head, body = encoded(llm, text)
    before = settings.window if prompt is None else prompt
    length = settings.rounded(before)
    inside = length - len(head)
    starts = range(0, len(body) - inside + 1, inside)
    if not starts:
        raise UsageError(
            f"the text has {len(body)} tokens",
            f"needed {inside} for a stream",
            "give a longer --text, or lower --stream",
        )
    chosen = [head + body[at : at + inside] for at in spread(starts, settings.streams)]
    return Streams([(ids[:before], ids[before:]) for ids in chosen], before, length, len(head))


@contextmanager
def longer_context(folder: Path, tokens: int) -> Iterator[str]:
    """A folder of links to the model in `folder`, whose config.json claims a context of `tokens`.

    That is how absolute positions can be followed past the context: rotary angles need no table that could end.
    """
    with tempfile.TemporaryDirectory(prefix="h2o_flexgen-") as place:
        for file in folder.iterdir():
            if file.name != "config.json" and file.is_file():
                (Path(place) / file.name).symlink_to(file.resolve())
        config = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
        (Path(place) / "config.json").write_text(json.dumps(config | {CONTEXT_KEY: tokens}), encoding="utf-8")
        yield place


def _text(file: str | None, folder: Path) -> tuple[str, str]:
    """Name and contents of `file`, for None of the held-out text that lies beside the model, else of the demo's."""
    beside = folder / TEXT_FILE
    if file is None and beside.is_file():
        return TEXT_FILE, read_text(str(beside))
    return file or TEXT_FILE, read_text(file)


def _checked_folder(model: Model, positions: Collection[Positions]) -> Path:
    """Where `model` is; UsageError where it has no weights, or positions of a kind that does not go on."""
    if model.folder is None or model.dummy:
        raise UsageError(f"{model.spec.name} has no weights", "needed a checkpoint: random ones have no perplexity")
    rotary = model.spec.arch.rotary
    if rotary is None:
        learned = model.spec.arch.positions == "learned"
        why = "which learned a table of positions" if learned else "whose keys are rotated by transformers' own modules"
        raise UsageError(
            f"--stream with {model.spec.name}, {why}",
            "needed a model with rotary positions and a family of its own here, which can roll",
        )
    if "absolute" in positions and rotary.scaling != "none":
        raise UsageError(
            f"the rotary positions of {model.spec.name} are scaled to its context ({rotary.scaling})",
            "needed unscaled ones to follow absolute positions past the context",
            "--positions rolling",
        )
    return model.folder


def _measure(llm: LLM, positions: Positions, eviction: EvictionConfig, parts: Streams, window: int) -> StreamRow:
    started = time.perf_counter()
    again = positions == "recomputed"
    scores = whole(llm.score(parts.recomputed(window, llm.model.spec.max_positions) if again else parts.pairs))
    record = record_of(llm)
    logprobs = [logprob for score in scores for logprob in score.token_logprobs]
    scored = parts.length - parts.prompt
    total = [0.0] * (scored // window)
    for at, logprob in enumerate(logprobs):
        total[at % scored // window] -= logprob
    return StreamRow(
        policy=eviction.name,
        positions=positions,
        eviction=record.eviction,
        nll=tuple(value / (window * len(parts.pairs)) for value in total),
        kv_bytes=record.kv_bytes,
        seconds=time.perf_counter() - started,
    )
