"""Fields of a body that are taken where they ask for nothing: what clients and services write unasked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LABELS: Mapping[str, tuple[type, ...]] = {
    "user": (str,),
    "metadata": (dict,),
    "safety_identifier": (str,),
    "prompt_cache_key": (str,),
    "prompt_cache_retention": (str,),
    "prompt_cache_options": (dict,),
    "cache_salt": (str,),
    "service_tier": (str,),
    "request_id": (str,),
    "priority": (int,),
}
"""Say who asks, or how a service is to go about it: any value of these kinds changes no answer."""

_IDLE: Mapping[str, tuple[Any, ...]] = {
    # OpenAI's
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "stream_options": ({}, {"include_usage": False}, {"include_usage": True}),
    "store": (False,),
    "modalities": ([], ["text"]),
    "verbosity": ("medium",),
    "moderation": (),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "top_logprobs": (0,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    # vLLM's and SGLang's
    "use_beam_search": (False,),
    "num_beams": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "typical_p": (1,),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": (True, False),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (),
    "detokenize": (True,),
    "documents": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_hidden_states": (False,),
    "include_reasoning": (True, False),
    "separate_reasoning": (True, False),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "vllm_xargs": ({},),
    "kv_transfer_params": (),
    "repetition_detection": (),
    "thinking_token_budget": (),
    "lora_path": (),
}
"""Not served, with the values besides null that ask for nothing."""


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
