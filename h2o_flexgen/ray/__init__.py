"""`Predictor`: an engine as an actor of Ray Data, for `ds.map_batches(Predictor, ...)`. Imports nothing of Ray."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.reader import SAMPLE_BITS, Request
from h2o_flexgen.engine.requests.sequence import RequestOutput, Sequence
from h2o_flexgen.errors import UsageError
from h2o_flexgen.planning.llm import LLM

COLUMNS = ("generated_text", "generated_tokens", "finish_reason", "error")
"""Columns that a batch gets beside its own: text, a list of token ids, "stop", "length" or "error", why or None."""


class Predictor:
    """Completes the prompts of batches, each an engine of its own with a plan of its own.

        ds.map_batches(Predictor, fn_constructor_kwargs={"model": "demo", "max_new_tokens": 32}, batch_size=64,
                       concurrency=2)

    A row whose prompt cannot be run gets an `error`, and its neighbours their answers. Sampled tokens depend on the
    seed and on the row's prompt, or on its `seed` column, not on how Ray divides the data.

    prompt      the column of prompts: texts, or lists of token ids
    sampling    SamplingParams, or a dict of their fields; settings by name go before it
    settings    fields of SamplingParams and of EngineConfig (eviction, cpu_mem, dtype, ...) by name

    A column `response_format` has a JSON text for each row, or none: see SamplingParams. UsageError for settings that
    make no sense, for a batch without the column of prompts, and for names that a batch has already.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        prompt: str = "prompt",
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        own = {name: settings.pop(name) for name in list(settings) if name in SamplingParams.__dataclass_fields__}
        if not isinstance(sampling, SamplingParams):
            sampling = SamplingParams(**(sampling or {}))
        self._params = replace(sampling, **own)
        if self._params.num_return_sequences > 1:
            raise UsageError("num_return_sequences is above 1", "needed 1: a row has one answer")
        self._column = prompt
        self._llm = LLM(model, **settings)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """`batch`, columns by name as arrays or lists of one length, with the COLUMNS behind its own."""
        if self._column not in batch:
            raise UsageError(f"the data has no column {self._column!r}", f"found {', '.join(map(str, batch))}")
        if taken := [name for name in COLUMNS if name in batch]:
            raise UsageError(f"the data has a column {taken[0]!r} already", "needed another name for it")
        prompts = [_plain(value) for value in batch[self._column]]
        outputs, errors = dict[int, RequestOutput](), dict[int, str]()
        rows = list[Sequence]()
        for number, prompt in enumerate(prompts):
            try:
                rows += self._llm.read(Request(prompt, self._params_of(batch, number, prompt), number))
            except UsageError as error:
                errors[number] = str(error)
        for row, output in self._llm.run(rows):
            outputs[row.row_id >> SAMPLE_BITS] = output
        answers = [outputs.get(number) for number in range(len(prompts))]
        return {
            **batch,
            "generated_text": _objects([None if each is None else each.text for each in answers]),
            "generated_tokens": _objects([[] if each is None else list(each.token_ids) for each in answers]),
            "finish_reason": _objects(["error" if each is None else each.finish_reason for each in answers]),
            "error": _objects([errors[number] if each is None else each.error for number, each in enumerate(answers)]),
        }

    def _params_of(self, batch: Mapping[str, Any], number: int, prompt: Any) -> SamplingParams:
        if "seed" in batch:
            seed = int(batch["seed"][number])
        else:
            text = json.dumps([self._params.seed, prompt], default=str)
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6])
        params = replace(self._params, seed=seed)
        form = batch["response_format"][number] if "response_format" in batch else None
        if form is None:
            return params
        try:
            return replace(params, response_format=json.loads(form) if isinstance(form, str) else form)
        except ValueError as error:
            raise UsageError(f"response_format is not JSON: {error}") from None

    def close(self) -> None:
        """Gives the engine's memory, threads and files back; Ray ends actors without it."""
        self._llm.close()


def _plain(value: Any) -> Any:
    """A prompt as text or a list of ints, of numpy or of Arrow."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _objects(values: list[Any]) -> np.ndarray[Any, Any]:
    """A column of values that need not be of one length."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
