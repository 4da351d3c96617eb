"""Tests how a model of transformers' modules can be run, on a tiny random model of its kind, in a second or two.

The engine's tokens are compared with transformers': packed, and if these differ, row by row. The result is stored.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import H2OFlexGenError, ModelError, PlanError, first_line, is_out_of_memory
from h2o_flexgen.models.families import spec_from_config
from h2o_flexgen.models.hf.build import quiet
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from h2o_flexgen.models.hf.trusted import Untested, Way, assumed, keep

log = logging.getLogger(__name__)
NEW, NEAR = 6, 2e-3
"""Tokens that are compared, and the largest difference of their log-probabilities."""
_LENGTHS = (5, 21, 13)
_POLICIES = (
    {"gpu_batch_size": 2, "num_gpu_batches": 2, "prefill_chunk": 16, "weights": {"cpu": 1.0}},
    {"gpu_batch_size": 1, "num_gpu_batches": 3, "weights": {"disk": 1.0}},
)
Make = Callable[..., Any]
"""The class Engine, which itself imports this module."""
Tokens = list[tuple[list[int], list[float]]]
"""By prompt: new tokens and their log-probabilities."""


def tested_spec(config: Mapping[str, Any], name: str, make: Make) -> ModelSpec:
    """The ModelSpec of a model of transformers' modules, which is tested first if its type is not known. ModelError if
    it cannot be run correctly, or tested."""
    try:
        return spec_from_config(config, name, "transformers")
    except Untested as doubt:
        try:
            way = way_by_test(config, make)
        except (OSError, MemoryError, PlanError, RuntimeError) as error:
            found = f"{name}: how it can be run cannot be tested now: {error or 'out of memory'}"
            raise ModelError(found, "needed memory and a folder for temporary files") from error
        log.info("%s: a tiny model of its kind was run, and is %s (%s)", name, way.how, doubt.found)
        try:
            keep(config, way)
        except OSError as error:
            log.warning("what the test of %s has found cannot be kept: %s", name, error)
        with assumed(way):
            return spec_from_config(config, name, "transformers")


def way_by_test(config: Mapping[str, Any], make: Make) -> Way:
    """How models like this one are run: the first way whose tokens equal those of transformers. Raises what is a fault
    of this machine."""
    try:
        with quiet(), torch.random.fork_rng(), torch.inference_mode(False), torch.no_grad():
            model = random_model(shrunk(config))
            prompts = prompts_of(model.config.get_text_config(decoder=True).vocab_size)
            if _looks_ahead(model, prompts[1]):
                return Way("refused", "a token's logits depend on the tokens behind it: it is no decoder")
            wanted = [_by_transformers(model, prompt) for prompt in prompts]
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                del model
                differs = _difference(make, folder, Way("packed"), prompts, wanted)
                if differs is None:
                    return Way("packed")
                again = _difference(make, folder, Way("rows", differs), prompts, wanted)
                return Way("rows", differs) if again is None else Way("refused", again)
    except Exception as error:  # whatever it raises, nothing was shown to be right
        if _lacks_room(error):
            raise
        said = f"{type(error).__name__}: {first_line(error)}"
        return Way("refused", f"transformers {transformers.__version__} cannot run a tiny one of it: {said}")


def _lacks_room(error: Exception) -> bool:
    return isinstance(error, OSError | PlanError) or is_out_of_memory(error)


def prompts_of(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocab - 8, (length,), generator=generator).tolist() for length in _LENGTHS]


def _looks_ahead(model: Any, prompt: list[int]) -> bool:
    """Whether earlier tokens' logits depend on the last token."""
    ids = torch.tensor([prompt, [*prompt[:-1], prompt[0]]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, :-1].float()
    return not torch.allclose(logits[0], logits[1], rtol=1e-3, atol=1e-3)


def _by_transformers(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens after a prompt and their log-probabilities, by transformers."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids, mask = torch.tensor([prompt]), torch.ones(1, len(prompt), dtype=torch.int64)
    made = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **settings)
    tokens = made.sequences[0, len(prompt) :].tolist()
    likely = [logits[0].float().log_softmax(-1) for logits in made.logits]
    return tokens, [float(each[token]) for each, token in zip(likely, tokens, strict=True)]


def _difference(make: Make, folder: str, way: Way, prompts: list[list[int]], wanted: Tokens) -> str | None:
    """How the engine's answers differ; None: they do not."""
    for policy in _POLICIES:
        how: dict[str, Any] = {"dtype": "float32", "model_impl": "transformers", "policy": policy}
        try:
            with assumed(way), make(folder, offload_dir=folder, **how) as engine:
                found = engine.generate(prompts, max_new_tokens=NEW, ignore_eos=True, logprobs=0)
        except H2OFlexGenError as error:
            if _lacks_room(error):
                raise
            return error.found.removeprefix(f"{folder}: ")
        for output, (tokens, logprobs) in zip(found, wanted, strict=True):
            if output.error is not None:
                return output.error
            for step, (token, own) in enumerate(zip(tokens, logprobs, strict=True)):
                near = output.logprobs is not None and abs(output.logprobs[step] - own) <= NEAR
                if not near or output.token_ids[step] != token:
                    return f"answers other than those of transformers {transformers.__version__}"
    return None
