"""transformers' `generate` on top of the engine: tensors in, tensors out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_flexgen.checkpoint.files import generation_settings
from h2o_flexgen.config.checks import iterable, shown
from h2o_flexgen.config.sampling import SAMPLING_ONLY, SamplingParams, plain, warn_idle
from h2o_flexgen.engine.model import Model
from h2o_flexgen.engine.requests.sequence import Hooks, Processor, Sequence
from h2o_flexgen.engine.sampling.processors import NOTHING
from h2o_flexgen.errors import ModelError, UsageError, required
from h2o_flexgen.registry import suggestion

log = logging.getLogger(__name__)

DEFAULT_NEW_TOKENS = 20
"""New tokens if no length is given, as in transformers."""

LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
CALLS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer", "tokenizer")
OURS = ("seed", "ignore_eos", "response_format", "fold", "presence_penalty", "frequency_penalty")
"""Settings of SamplingParams that transformers does not have."""

SHARED = tuple(
    item.name
    for item in fields(SamplingParams)
    if item.name not in (*LENGTHS, *SPECIAL_TOKENS, *OURS, "stop_strings", "logprobs")
)
"""Settings with the same name and meaning in SamplingParams."""

WITHOUT_EFFECT = (
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("compile_config", "disable_compile", "synced_gpus", "transformers_version", "decoder_start_token_id"),
    *("early_stopping", "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
    "assistant_ensemble_weight",
)
"""Accepted and ignored: the engine has its own cache, placement and prompt chunks, or transformers ignores them,
too."""

CACHES = ("dynamic", "static", "offloaded", "offloaded_static", "quantized", "paged", "hybrid", "sliding_window")
OLD_CACHES = ("hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked")

REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "constraints": (),
    "force_words_ids": (),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
    "guidance_scale": (1.0,),
    "negative_prompt_ids": (),
    "negative_prompt_attention_mask": (),
    "watermarking_config": (),
    "assistant_model": (),
    "assistant_tokenizer": (),
    "prompt_lookup_num_tokens": (),
    "assistant_early_exit": (),
    "is_assistant": (False,),
    "use_mtp": (False,),
    "speculation_type": (),
    "token_healing": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "custom_generate": (),
    "trust_remote_code": (False,),
    "continuous_batching_config": (),
    "inputs_embeds": (),
    "position_ids": (),
    "past_key_values": (),
}
"""Refused, unless None or one of these values, which ask for nothing."""

IN_CONFIGS = {*LENGTHS, *SPECIAL_TOKENS, *OUTPUTS, *SHARED, *WITHOUT_EFFECT, *REFUSED, "stop_strings"}
KNOWN = {*IN_CONFIGS, *CALLS, *OURS}


@dataclass(frozen=True)
class Settings:
    """One call's settings: `values` of the call, its config object and the model's files, None is "off"; `given`: the
    names that the caller set."""

    values: Mapping[str, Any]
    given: frozenset[str]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`; `default` if it is not set, or None."""
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str) -> int | None:
        """The value of a setting that is a whole number; UsageError for anything else."""
        value = plain(self.get(name))
        if isinstance(value, bool) or not isinstance(value, int | None):
            raise UsageError(f"{name} is {shown(value)}", "needed a whole number")
        return value

    def eos(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The ids that end a sequence: `own` unless set; none for an explicit None."""
        if "eos_token_id" not in self.values:
            return own
        return token_ids(self.values["eos_token_id"])


def read_settings(arguments: Mapping[str, Any], config: Any, folder: Path | None) -> Settings:
    """Merges keyword `arguments` over the `config` object over generation_config.json (or config.json) in `folder`.
    UsageError for unknown and refused names."""
    unknown = [name for name, value in arguments.items() if name not in KNOWN and value is not None]
    if unknown:
        raise UsageError(
            f"{unknown[0]!r} is not an argument of generate_ids", suggestion(unknown[0], {*KNOWN, "generation_config"})
        )
    stored, origin = _stored(folder)
    passed = _of_object(config)
    values = {**stored, **passed, **{name: value for name, value in arguments.items() if name in KNOWN}}
    _refuse(values, arguments, passed, origin)
    cache = values.get("cache_implementation")
    if cache is not None and cache not in (*CACHES, *OLD_CACHES):
        raise UsageError(
            f"cache_implementation={cache!r}", f"needed one of {', '.join(CACHES)}", suggestion(cache, CACHES)
        )
    return Settings(values, frozenset({*arguments, *passed}))


def sampling_params(settings: Settings, new_tokens: int, min_new_tokens: int, **own: Any) -> SamplingParams:
    """The settings as SamplingParams, overridden by `own`. Warns of sampling settings without do_sample."""
    wanted = {name: value for name in (*SHARED, *OURS) if (value := _or_off(settings, name)) is not None}
    if not wanted.get("do_sample", False):
        neutral = {"temperature": 1.0, "top_k": 50, **_OFF, "typical_p": 1.0}
        idle = [name for name in SAMPLING_ONLY if name in wanted and wanted[name] != neutral.get(name)]
        if said := [name for name in idle if name in settings.given and settings.values[name] is not None]:
            warn_idle(said, stacklevel=5)
        wanted = {name: value for name, value in wanted.items() if name not in SAMPLING_ONLY}
    return SamplingParams(max_new_tokens=new_tokens, min_new_tokens=min_new_tokens, **{**wanted, **own})


def lengths(settings: Settings, width: int, max_positions: int) -> tuple[int, int]:
    """(most, fewest) new tokens after prompts padded to `width`: by max_new_tokens, else max_length, which counts the
    prompt, else 20 within the context of `max_positions`. UsageError if none are left."""
    most, total, fewest, shortest = (settings.whole(name) for name in LENGTHS)
    if most is not None:
        if total is not None:
            log.warning("max_new_tokens=%s and max_length=%s are both set; max_new_tokens counts", most, total)
    elif total is not None:
        most = total - width
    else:
        most, total = min(DEFAULT_NEW_TOKENS, max_positions - width), max_positions
    if most <= 0:
        if settings.get("max_new_tokens") is not None:
            raise UsageError(f"max_new_tokens={most}", "needed 1 or more")
        raise UsageError(
            f"input_ids has {width} tokens, and max_length is {total}",
            change="set max_new_tokens, or a larger max_length",
        )
    fewest = max(0, (shortest or 0) - width) if fewest is None else fewest
    if fewest > most:
        log.warning("at least %d new tokens are asked for, and at most %d: generation ends there", fewest, most)
    return most, min(fewest, most)


def token_ids(value: Any) -> tuple[int, ...]:
    """One id, a list, a tensor or None as a tuple."""
    if value is None:
        return ()
    value = plain(value)
    many = [value] if isinstance(value, int) else iterable(value, "eos_token_id", "needed token ids")
    return tuple(map(plain, many))


_OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
"""The meaning of an explicit None, if it is not the default."""


def _or_off(settings: Settings, name: str) -> Any:
    value: Any = settings.values.get(name)
    if value is None and name in settings.values:
        return _OFF.get(name)
    return value.tolist() if hasattr(value, "tolist") else value


def _of_object(config: Any) -> dict[str, Any]:
    """The settings of a GenerationConfig or a mapping; None counts as unset."""
    if config is None:
        return {}
    if not isinstance(config, Mapping) and not hasattr(config, "__dict__"):
        raise UsageError(f"generation_config is a {type(config).__name__}", "needed a GenerationConfig")
    said = config if isinstance(config, Mapping) else vars(config)
    return {name: value for name, value in said.items() if name in IN_CONFIGS and value is not None}


def _stored(folder: Path | None) -> tuple[dict[str, Any], str]:
    """Generation settings in a model's folder, and the name of their file; old models have them in config.json."""
    for name in ("generation_config.json", "config.json"):
        path = None if folder is None else folder / name
        if path is None or not path.exists():
            continue
        said = generation_settings(path)
        # Old conversions wrote -1 for no token.
        absent = {key for key in SPECIAL_TOKENS if isinstance(said.get(key), int) and said[key] < 0}
        # A token that this file leaves out is none, whatever config.json says of it.
        unsaid = dict.fromkeys(SPECIAL_TOKENS if name.startswith("generation") else ())
        return {**unsaid, **{key: value for key, value in _of_object(said).items() if key not in absent}}, name
    return {}, ""


def _refuse(values: Mapping[str, Any], arguments: Mapping[str, Any], passed: Mapping[str, Any], origin: str) -> None:
    for name, idle in REFUSED.items():
        value = values.get(name)
        if value is None or any(value is each or (isinstance(value, (int, float)) and value == each) for each in idle):
            continue
        where = "" if name in arguments else " in generation_config" if name in passed else f" in the model's {origin}"
        change = f"leave {name} out" if not where else f"pass {name}={idle[0] if idle else None}"
        raise UsageError(f"{name} is set{where}, and this engine does not offer it", change=change)


Read = Callable[[list[list[int]], SamplingParams], list[Sequence]]
Run = Callable[[list[Sequence]], Iterable[Sequence]]


@dataclass(frozen=True)
class Inputs:
    """Prompts: `ids` (n, S) int64 on the host, and `mask` (n, S) bool, False for padding."""

    ids: Tensor
    mask: Tensor
    device: torch.device

    def prompts(self) -> list[list[int]]:
        """The rows without padding. UsageError for a row of padding only, or with some at its end."""
        for row in (~self.mask.any(1)).nonzero().flatten().tolist():
            raise UsageError(f"attention_mask is 0 all over row {row}", "needed at least one token to continue")
        for row in (~self.mask[:, -1]).nonzero().flatten().tolist():
            raise UsageError(
                f"row {row} of input_ids ends in padding",
                "needed it at the beginning, as transformers' generate does",
                "make the tokenizer with padding_side='left'",
            )
        return [ids[mask].tolist() for ids, mask in zip(self.ids, self.mask, strict=True)]


class Generator:
    """One model's `generate_ids`. read: makes sequences of prompts; run: runs them and yields them when finished."""

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
        own = None if "pad_token_id" in settings.values else self._model.spec.pad_token_id
        pad = settings.whole("pad_token_id")
        pad = own if pad is None else pad
        pad = eos[0] if pad is None and eos else pad
        inputs = self._inputs(given if input_ids is None else input_ids, attention_mask, settings, (pad, eos))
        if not len(inputs.ids):
            return self._result(inputs, [], settings, pad)
        rows = self._rows(inputs, settings, eos)
        streamer = settings.get("streamer")
        if streamer is None:
            return self._outcome(inputs, rows, settings, pad)
        if len(rows) > 1:
            raise UsageError(f"a streamer for {len(rows)} sequences", "needed a single one, as for transformers")
        if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise UsageError(f"streamer is {shown(streamer)}", "needed put(ids) and end(), as TextStreamer has")
        streamer.put(inputs.ids)
        _hooks(rows[0]).on_token = lambda token: streamer.put(torch.tensor([token]))
        try:
            return self._outcome(inputs, rows, settings, pad)
        finally:
            # The streamer's reader must not wait for ever.
            streamer.end()

    def _inputs(self, ids: Any, mask: Any, settings: Settings, special: tuple[int | None, tuple[int, ...]]) -> Inputs:
        """Without ids a single BOS. Without a mask pad tokens are padding, unless they are an eos, too."""
        if ids is None:
            bos = settings.whole("bos_token_id")
            ids = [[self._model.spec.bos_token_id if bos is None else bos]]
        ids = _tensor(ids, "input_ids")
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
            kept = _tensor(mask, "attention_mask").to("cpu") != 0
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
                from transformers.generation import StopStringCriteria

                criteria = [StopStringCriteria(tokenizer, stops), *criteria]
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
        """A caller's MaxLengthCriteria replaces max_new_tokens and max_length, as in transformers."""
        if "MaxLengthCriteria" in replaced:
            total = {"max_new_tokens": None, "max_length": replaced["MaxLengthCriteria"].max_length}
            settings = Settings({**settings.values, **total}, settings.given)
        return lengths(settings, inputs.ids.shape[1], self._model.spec.max_positions)

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
    """(rows, vocab) per step; of a finished row the pad token's score is 0, all others are -inf."""
    certain = torch.full((size,), NOTHING)
    certain[pad] = 0.0
    for step in range(steps):
        yield torch.stack([row[step] if step < len(row) else certain for row in rows]).to(device)


def _hooks(row: Sequence) -> Hooks:
    return required(row.hooks, f"sequence {row.row_id} was made without hooks")


def _tensor(value: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{name} is {shown(value)}", "needed a tensor (rows, tokens), or lists like it") from None


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, Iterable) or not all(callable(each) for each in value):
        raise UsageError(f"{name} is a {type(value).__name__}", "needed a list of callables", f"wrap it: {name}=[...]")
    return list(value)


def _prefix(allowed: Callable[[int, Tensor], list[int]], row: int) -> Processor:
    """`prefix_allowed_tokens_fn` for one row, which is told its own number."""
    from transformers.generation import PrefixConstrainedLogitsProcessor

    processor: Processor = PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    return processor
