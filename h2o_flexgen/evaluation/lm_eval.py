"""This engine as a model of EleutherAI's lm-evaluation-harness, with eviction active in whatever it is asked.

The harness finds it under the name h2o_flexgen, by the entry point `lm_eval.models` or by `h2o_flexgen.lm_eval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.flags import flags_of
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.requests.chat import chat_text
from h2o_flexgen.engine.sampling.hf_generate import REFUSED, WITHOUT_EFFECT
from h2o_flexgen.errors import UsageError
from h2o_flexgen.planning.llm import LLM

EVICTION = {
    flags_of(item)[0].removeprefix("--").replace("-", "_"): item.name
    for item in fields(EvictionConfig)
    if item.metadata and item.name != "spans"  # which the harness's prompts cannot mark
}
"""Model arguments by the names of the flags of `run`, and the fields of EvictionConfig that they are."""
SCORED = 256
"""Requests that are scored in one call: a crash costs a cache of answers (`--use_cache`) so many at most."""

Pair = tuple[list[int], list[int]]


@register_model("h2o_flexgen")
class H2OFlexGenLM(TemplateLM):
    """`--model h2o_flexgen --model_args pretrained=demo,eviction=h2o,hh_ratio=0.2`.

    Model arguments: `pretrained`, those of `EVICTION`, and any field of EngineConfig (`dtype`, `weights`, `cpu_mem`,
    `cache_bits`, ...). `batch_size`: sequences of a GPU batch; by default and with "auto" the engine plans blocks.
    Contexts that are too long lose their beginning. A continuation is scored as `LLM.score` does it: the context is
    pruned to the budget, and tokens are evicted while the continuation is read.
    """

    def __init__(
        self,
        pretrained: str = "demo",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_gen_toks: int = 256,
        **settings: Any,
    ) -> None:
        super().__init__()
        asked = {EVICTION[name]: settings.pop(name) for name in EVICTION if name in settings}
        self._eviction = EvictionConfig(**asked)
        settings.setdefault("device", "cpu" if device == "cpu" else "auto")  # unasked the harness says cuda:0
        if batch_size not in (None, 1, "1") and not str(batch_size).startswith("auto"):
            settings["policy"] = {"gpu_batch_size": int(str(batch_size))}
        self.llm, self._max_gen_toks = LLM(pretrained, eviction=self._eviction, **settings), max_gen_toks
        if self.llm.model.codec is None:
            raise UsageError(f"{pretrained} has no tokenizer", "needed one beside its config.json")
        self._codec, self._spec = self.llm.model.codec, self.llm.model.spec

    @property
    def max_length(self) -> int:
        """Tokens of a context and what follows it."""
        return int(self._spec.max_positions)

    @property
    def eot_token_id(self) -> int:
        return next(iter(self._spec.eos_token_ids), self._spec.bos_token_id)

    @property
    def prefix_token_id(self) -> int:
        return int(self._spec.bos_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids, opening = self._codec.encode_bare(string), self._codec.opening
        return ids if add_special_tokens is False or ids[: len(opening)] == opening else [*opening, *ids]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        # Long contexts first; requests of one context next to each other, as they share its computation.
        order = sorted(range(len(pairs)), key=lambda i: (-len(pairs[i][0]), pairs[i]))
        for some in tqdm([order[i : i + SCORED] for i in range(0, len(order), SCORED)], disable=disable_tqdm):
            for i, score in zip(some, self.llm.score([pairs[i] for i in some]), strict=True):
                if score.error is not None:
                    raise RuntimeError(f"request {i}: {score.error}")
                answers[i] = score.logprob, score.is_greedy
                if (asked := requests[i][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", asked, answers[i])
        return answers

    def _cut(self, context: list[int], continuation: list[int]) -> Pair:
        room = self.max_length - len(continuation)
        if room < 1:
            raise UsageError(f"a continuation has {len(continuation)} tokens", f"needed at most {self.max_length - 1}")
        return context[-room:], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        asked, owners = list[tuple[tuple[str, str] | None, list[int], list[int]]](), list[int]()
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, context_len=1)
            for context, continuation in map(make_disjoint_window, windows):
                asked.append((None, context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        scored = self._loglikelihood_tokens(asked, disable_tqdm=disable_tqdm)
        for number, (logprob, _) in zip(owners, scored, strict=True):
            totals[number] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, settings = list[list[int]](), list[SamplingParams]()
        for request in requests:
            context, asked = request.args
            params = _sampling(normalize_gen_kwargs(asked, self._max_gen_toks))
            room = self.max_length - params.max_new_tokens
            if room < 1:
                found = f"{params.max_new_tokens} tokens are asked for"
                raise UsageError(found, f"needed less than the context of {self.max_length}", "lower max_gen_toks")
            prompts.append(self.tok_encode(context)[-room:])
            settings.append(params)
        texts = [""] * len(prompts)
        for output in tqdm(self.llm.stream(prompts, settings), total=len(prompts), disable=disable_tqdm):
            if output.error is not None:
                raise RuntimeError(f"request {output.index}: {output.error}")
            texts[output.index] = output.text or ""
            self.cache_hook.add_partial("generate_until", requests[output.index].args, texts[output.index])
        return texts

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.config.model).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template in words, for the results; one of another name is refused."""
        if not chat_template:
            return None
        if chat_template is not True:
            raise UsageError(f"the chat template {chat_template!r} is asked for", "needed the model's own")
        return str(getattr(self._codec.transformed, "chat_template", "") or "")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not add_generation_prompt:
            raise UsageError("an answer is to be gone on with", "needed a conversation that ends with a question")
        return chat_text(self._codec, str(self.llm.config.model), chat_history, "a conversation")

    def get_model_info(self) -> dict[str, Any]:
        """For the results: the eviction policy, whether it acts while scoring, and the dtype."""
        return {
            "eviction": self._eviction.to_json(),
            "eviction_active_while_scoring": self._eviction.name != "full",
            "model_dtype": self.llm.model.dtype,
            "model_num_parameters": None,
        }


def _sampling(asked: dict[str, Any]) -> SamplingParams:
    """The settings of a request, as the harness has normalised them, without the ones that ask for nothing.

    UsageError for a setting that is not offered.
    """
    own = ("until", "max_gen_toks", "temperature", *WITHOUT_EFFECT)
    settings = {name: value for name, value in asked.items() if name not in own and value is not None}
    for name in REFUSED.keys() & settings.keys():
        value = settings.pop(name)
        if value not in REFUSED[name]:
            raise UsageError(f"{name}={value!r} is asked for, and this engine does not offer it", change="leave it out")
    if settings.get("do_sample"):
        settings["temperature"] = asked.get("temperature", 1.0)
    stops = tuple(stop for stop in asked.get("until", ()) if stop)
    return SamplingParams(max_new_tokens=asked["max_gen_toks"], stop_strings=stops, **settings)
