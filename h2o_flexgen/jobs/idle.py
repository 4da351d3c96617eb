"""Fields of a body that are taken where they ask for nothing: clients and services write them unasked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LABELS: Mapping[str, type] = {
    **dict.fromkeys(("user", "safety_identifier", "service_tier", "request_id", "cache_salt"), str),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), str),
    **dict.fromkeys(("metadata", "prompt_cache_options"), dict),
    "priority": int,
}
"""Say who asks, or how a service is to go about it: any value of these kinds changes no answer."""

_ALWAYS_ASKS = (
    *("moderation", "audio", "prediction", "reasoning_effort", "web_search_options", "truncate_prompt_tokens"),
    *("prompt_logprobs", "add_special_tokens", "allowed_token_ids", "chat_template", "kv_transfer_params", "lora_path"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf"),
    *("json_schema", "repetition_detection", "thinking_token_budget"),
)
_LISTS = ("tools", "functions", "documents", "bad_words", "logits_processors")
_OFF = (
    *("store", "echo", "use_beam_search", "early_stopping", "include_stop_str_in_output", "no_stop_trim"),
    *("continue_final_message", "return_tokens_as_token_ids", "return_token_ids", "return_hidden_states"),
)
_EITHER = ("parallel_tool_calls", "spaces_between_special_tokens", "include_reasoning", "separate_reasoning")
_ONE = ("best_of", "num_beams", "length_penalty", "typical_p")
_IDLE: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ALWAYS_ASKS, ()),
    **dict.fromkeys(_LISTS, ([],)),
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(_EITHER, (True, False)),
    **dict.fromkeys(("add_generation_prompt", "detokenize"), (True,)),
    **dict.fromkeys(_ONE, (1,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("mm_processor_kwargs", "vllm_xargs"), ({},)),
    "stream_options": ({}, {"include_usage": False}, {"include_usage": True}),
    "modalities": ([], ["text"]),
    "verbosity": ("medium",),
    "top_logprobs": (0,),
    "suffix": ("",),
}
"""Not served, of OpenAI's, vLLM's and SGLang's, with the values besides null that ask for nothing."""


def known(name: str) -> bool:
    """Whether some service has a field of this name, so that it is no spelling mistake."""
    return name in _IDLE or name in _LABELS


def asks_nothing(name: str, value: Any) -> bool:
    """Whether an answer is the same without the field `name` of this value. No number is a truth value, or the other
    way round."""
    if value is None:
        return True
    kinds = _LABELS.get(name)
    if kinds is not None:
        return isinstance(value, kinds) and not isinstance(value, bool)
    return any(value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in _IDLE.get(name, ()))
