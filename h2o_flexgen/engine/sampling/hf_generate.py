"""transformers' `generate` on top of the engine: tensors in, tensors out, by the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.model import Model
from h2o_flexgen.engine.requests.sequence import Criterion, Hooks, Processor, Sequence
from h2o_flexgen.engine.sampling.hf_settings import Settings, lengths, read_settings, sampling_params
from h2o_flexgen.engine.sampling.processors import NOTHING
from h2o_flexgen.errors import ModelError, UsageError

Read = Callable[[list[list[int]], SamplingParams], list[Sequence]]
Run = Callable[[list[Sequence]], Iterable[Sequence]]


@dataclass(frozen=True)
class Inputs:
    """What is to be continued: `ids` (n, S) int64 on the host, and `mask` (n, S) bool, False where padding is."""

    ids: Tensor
    mask: Tensor
    device: torch.device

    @property
    def width(self) -> int:
        return self.ids.shape[1]

    def prompts(self) -> list[list[int]]:
        """The rows without padding, wherever it is. UsageError for a row of nothing else."""
        for row in (~self.mask.any(1)).nonzero().flatten().tolist():
            raise UsageError(f"attention_mask is 0 all over row {row}", "needed at least one token to continue")
        return [ids[mask].tolist() for ids, mask in zip(self.ids, self.mask, strict=True)]


class Generator:
    """One model's `generate_ids`. `read` makes sequences of prompts, `run` runs them and yields those that finish."""

    def __init__(self, model: Model, read: Read, run: Run) -> None:
        self._model, self._read, self._run = model, read, run

    def __call__(self, input_ids: Any, attention_mask: Any, arguments: Mapping[str, Any]) -> Any:
        """(n * samples, S + new) token ids, or a GenerateDecoderOnlyOutput that holds them. See `LLM.generate_ids`."""
        rest = dict(arguments)
        given = rest.pop("inputs", None)
        if given is not None and input_ids is not None:
            raise UsageError("inputs and input_ids are both given", "needed one of them")
        config = rest.pop("generation_config", None)
        settings = read_settings(rest, config, self._model.folder)
        eos = settings.eos(self._model.spec.eos_token_ids)
        pad = self._pad(settings, eos)
        inputs = self._inputs(given if input_ids is None else input_ids, attention_mask, settings, (pad, eos))
        if not len(inputs.ids):
            return self._result(inputs, [], settings, pad)
        rows = self._rows(inputs, settings, eos)
        streamer = settings.get("streamer")
        if streamer is None:
            return self._outcome(inputs, rows, settings, pad)
        if len(rows) > 1:
            raise UsageError(f"a streamer for {len(rows)} sequences", "needed a single one, as for transformers")
        streamer.put(inputs.ids)
        _hooks(rows[0]).on_token = lambda token: streamer.put(torch.tensor([token]))
        try:
            return self._outcome(inputs, rows, settings, pad)
        finally:
            # Whoever reads the other end of the streamer is let go, whatever happened.
            streamer.end()

    def _pad(self, settings: Settings, eos: tuple[int, ...]) -> int | None:
        own = None if "pad_token_id" in settings.values else self._model.spec.pad_token_id
        pad = settings.get("pad_token_id", own)
        return pad if pad is not None or not eos else eos[0]

    def _inputs(self, ids: Any, mask: Any, settings: Settings, special: tuple[int | None, tuple[int, ...]]) -> Inputs:
        """Without ids a single BOS. Without a mask every pad token is padding, unless it is an eos too."""
        if ids is None:
            bos = settings.get("bos_token_id", self._model.spec.bos_token_id)
            ids = torch.tensor([[bos]])
        ids = torch.as_tensor(ids)
        if ids.dim() != 2 or ids.is_floating_point() or (len(ids) and not ids.shape[1]):
            raise UsageError(
                f"input_ids has shape {tuple(ids.shape)} and dtype {ids.dtype}", "needed (rows, tokens), int64"
            )
        host = ids.detach().to("cpu", torch.int64)
        pad, eos = special
        if mask is None:
            kept = torch.ones_like(host, dtype=torch.bool) if pad is None or pad in eos else host != pad
        elif not hasattr(mask, "shape") and not isinstance(mask, (list, tuple)):
            raise UsageError(f"attention_mask is a {type(mask).__name__}", "needed a tensor (rows, tokens) of 0 and 1")
        else:
            kept = torch.as_tensor(mask).to("cpu") != 0
        if kept.shape != host.shape:
            raise UsageError(
                f"attention_mask has shape {tuple(kept.shape)}", f"needed that of input_ids: {tuple(host.shape)}"
            )
        return Inputs(host, kept, ids.device)

    def _rows(self, inputs: Inputs, settings: Settings, eos: tuple[int, ...]) -> list[Sequence]:
        criteria = _listed("stopping_criteria", settings.get("stopping_criteria", ()))
        replaced = {type(criterion).__name__: criterion for criterion in criteria}
        most, fewest = self._lengths(inputs, settings, replaced)
        own: dict[str, Any] = {"eos_token_id": eos}
        if "EosTokenCriteria" in replaced:
            own["ignore_eos"] = True
        if "MaxTimeCriteria" in replaced:
            own["max_time"] = None
        stops, tokenizer = settings.get("stop_strings"), settings.get("tokenizer")
        if stops and "StopStringCriteria" not in replaced:
            if tokenizer is None:
                own["stop_strings"] = stops
            else:
                criteria = [_stop_strings(stops, tokenizer), *criteria]
        params = sampling_params(settings, most, fewest, **own)
        rows = self._read(inputs.prompts(), params)
        processors = _listed("logits_processor", settings.get("logits_processor", ()))
        returned, allowed = settings.get("return_dict_in_generate"), settings.get("prefix_allowed_tokens_fn")
        padding = inputs.mask.int().argmax(1).tolist()
        for number, row in enumerate(rows):
            row.hooks = Hooks(
                context=inputs.ids[row.index].tolist(),
                padding=padding[row.index],
                prefix=None if allowed is None else _prefix(allowed, number),
                processors=list(processors),
                criteria=list(criteria),
                logits=[] if returned and settings.get("output_logits") else None,
                scores=[] if returned and settings.get("output_scores") else None,
            )
        return rows

    def _lengths(self, inputs: Inputs, settings: Settings, replaced: Mapping[str, Any]) -> tuple[int, int]:
        """A caller's MaxLengthCriteria takes the place of max_new_tokens and max_length, as in transformers."""
        if "MaxLengthCriteria" in replaced:
            total = {"max_new_tokens": None, "max_length": replaced["MaxLengthCriteria"].max_length}
            settings = Settings({**settings.values, **total}, settings.given)
        return lengths(settings, inputs.width, self._model.spec.max_positions)

    def _outcome(self, inputs: Inputs, rows: list[Sequence], settings: Settings, pad: int | None) -> Any:
        for row in self._run(rows):
            if row.finish_reason == "error":
                raise ModelError(f"row {row.index} of input_ids: {row.error}")
        return self._result(inputs, rows, settings, pad)

    def _result(self, inputs: Inputs, rows: SequenceOf[Sequence], settings: Settings, pad: int | None) -> Any:
        longest = max((len(row.token_ids) for row in rows), default=0)
        fill = 0 if pad is None else pad
        new = [row.token_ids + [fill] * (longest - len(row.token_ids)) for row in rows]
        given = inputs.ids[[row.index for row in rows]]
        ids = torch.cat([given, torch.tensor(new, dtype=torch.int64).reshape(len(rows), longest)], dim=1)
        ids = ids.to(inputs.device)
        if not settings.get("return_dict_in_generate"):
            return ids
        from transformers.generation import GenerateDecoderOnlyOutput

        size = self._model.spec.vocab_size
        recorded: dict[str, Any] = {
            name: tuple(_steps([getattr(_hooks(row), name) for row in rows], longest, fill, size, inputs.device))
            for name, wanted in (("scores", "output_scores"), ("logits", "output_logits"))
            if settings.get(wanted)
        }
        return GenerateDecoderOnlyOutput(**{"sequences": ids, **recorded})


def _steps(rows: list[list[Tensor]], steps: int, pad: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """(rows, vocab) per step. Where a row has finished, its pad token is certain: its score is 0, all others -inf."""
    certain = torch.full((size,), NOTHING)
    certain[pad] = 0.0
    for step in range(steps):
        yield torch.stack([row[step] if step < len(row) else certain for row in rows]).to(device)


def _hooks(row: Sequence) -> Hooks:
    if row.hooks is None:
        raise RuntimeError(f"sequence {row.row_id} was made without hooks")
    return row.hooks


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, Iterable) or not all(callable(each) for each in value):
        raise UsageError(f"{name} is a {type(value).__name__}", "needed a list of callables", f"wrap it: {name}=[...]")
    return list(value)


def _stop_strings(stops: Any, tokenizer: Any) -> Criterion:
    from transformers.generation import StopStringCriteria

    criterion: Criterion = StopStringCriteria(tokenizer, stops)
    return criterion


def _prefix(allowed: Callable[[int, Tensor], list[int]], row: int) -> Processor:
    """`prefix_allowed_tokens_fn` for one row, which is told its own number."""
    from transformers.generation import PrefixConstrainedLogitsProcessor

    processor: Processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    return processor
