"""Requests that are prompts and nothing else: lines of text, JSON lines, rows of Parquet; results as JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.sequence import RequestOutput
from h2o_flexgen.engine.requests.tokenizer import TextCodec
from h2o_flexgen.errors import UsageError
from h2o_flexgen.jobs.requests import BatchRequest, Refused, output_json, seed_of, talk_of, with_spans
from h2o_flexgen.jobs.source import BadLine, Record, load_json


@dataclass
class PlainFormat:
    """`kind`: text, jsonl or parquet. A row's prompt is its `prompt_column`, text or token ids, or `messages` there is
    instead; its name in the result that in `id_column`, where one is given. All are answered by `sampling`, whose
    number of new tokens is one that nobody asked for where they are to be what `fits`."""

    kind: str
    model: str
    codec: TextCodec | None
    seed: int
    sampling: SamplingParams
    prompt_column: str = "prompt"
    id_column: str | None = None
    chat: bool = False
    dummy: bool = False
    fits: bool = False

    def asked(self, record: Record) -> BatchRequest:
        """The prompt of a line or row; Refused where there is none."""
        row = self._row(record)
        prompt = row.get(self.prompt_column)
        spans = row.get("spans") or ()
        if prompt is None and row.get("messages") is not None:
            prompt = talk_of(self.codec, self.model, row["messages"], spans, row.get("chat_template_kwargs"))
        elif self.chat and isinstance(prompt, str):
            said = [{"role": "user", "content": prompt}]
            prompt = talk_of(self.codec, self.model, said, spans, row.get("chat_template_kwargs"))
        elif not isinstance(prompt, str) and not (
            isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
        ):
            raise Refused(f"{self.prompt_column} is no text and no token ids", param=self.prompt_column)
        elif spans:
            prompt = with_spans(prompt, spans)
        params = self.sampling
        if params.do_sample:
            params = replace(params, seed=seed_of(self.seed, record.line))
        for name in ("response_format", "fold"):
            if row.get(name) is not None:
                try:
                    params = replace(params, **{name: row[name]})
                except UsageError as error:
                    raise Refused.of(error, param=name) from None
        return BatchRequest([prompt], params, fits=self.fits)

    def answer(self, record: Record, asked: BatchRequest, outputs: Sequence[Sequence[RequestOutput]]) -> dict[str, Any]:
        """One object a request; of several samples they are in `samples`."""
        samples = outputs[0]
        failed = next((output for output in samples if output.error is not None), None)
        if failed is not None:
            return self.refusal(record, Refused.of_output(failed))
        made = [output_json(output) for output in samples]
        answer = {**self._named(record), **(made[0] if len(made) == 1 else {"samples": made})}
        return {**answer, "weights": "dummy"} if self.dummy else answer

    def refusal(self, record: Record, why: Refused) -> dict[str, Any]:
        """The error, in the place of a text."""
        return {**self._named(record), "error": {"code": why.code, "message": why.message}}

    def _row(self, record: Record) -> dict[str, Any]:
        if self.kind == "parquet":
            if not record.data.keys() >= {self.prompt_column, self.id_column or self.prompt_column}:
                raise Refused("the row is not UTF-8 text", "invalid_line")
            return dict(record.data)
        if self.kind == "text":
            return {self.prompt_column: self._text(record)}
        try:
            row = load_json(record.data)
        except BadLine as error:
            raise Refused(f"the line {error}", "invalid_json_line") from None
        if isinstance(row, str):
            row = {self.prompt_column: row}
        if not isinstance(row, dict):
            raise Refused("the line is no JSON object and no text", "invalid_json_line")
        return row

    def _text(self, record: Record) -> str:
        if record.data is None:
            raise Refused("the line is too long", "invalid_line")
        try:
            text: str = record.data.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError:
            raise Refused("the line is not UTF-8 text", "invalid_line") from None
        if "\0" in text:
            raise Refused("the line holds a NUL byte, which is not text", "invalid_line")
        return text

    def _named(self, record: Record) -> dict[str, Any]:
        if self.id_column is None:
            return {"line": record.line}
        try:
            row = record.data if self.kind == "parquet" else self._row(record)
            name = row.get(self.id_column)
        except Refused:
            name = None
        return {"line": record.line, "id": name if isinstance(name, str | int | None) else str(name)}
