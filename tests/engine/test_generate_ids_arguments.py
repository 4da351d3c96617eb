"""What `generate_ids` refuses, what it takes without effect, and stop strings with a real tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GenerationMixin, TextIteratorStreamer

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.sampling import hf_generate
from h2o_flexgen.errors import UsageError

IDS = torch.tensor([[2, 9, 14, 33]])


REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": [object()],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "guidance_scale": 1.5,
    "negative_prompt_ids": IDS,
    "negative_prompt_attention_mask": IDS,
    "watermarking_config": {},
    "assistant_model": object(),
    "assistant_tokenizer": object(),
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "is_assistant": True,
    "use_mtp": True,
    "speculation_type": "dflash",
    "token_healing": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "custom_generate": "somebody/something",
    "trust_remote_code": True,
    "continuous_batching_config": object(),
    "inputs_embeds": torch.zeros(1, 4, 32),
    "position_ids": IDS,
    "past_key_values": object(),
}


@pytest.mark.parametrize("name", sorted(hf_generate.REFUSED))
def test_what_is_not_offered_is_refused_by_name(llm, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is set, and this engine does not offer it"):
        llm.generate_ids(IDS, max_new_tokens=2, **{name: REFUSED[name]})


def test_refused_in_a_config_object_too(llm) -> None:
    with pytest.raises(ValueError, match="num_beams is set in generation_config"):
        llm.generate_ids(IDS, generation_config=GenerationConfig(num_beams=3))
    asked = GenerationConfig(num_beams=3, max_new_tokens=2, min_new_tokens=2)
    assert llm.generate_ids(IDS, generation_config=asked, num_beams=1).shape[1] == 6


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'"),
        ({"token_type_ids": IDS}, "'token_type_ids' is not an argument"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": -2}, "max_new_tokens=-2"),
        ({"max_new_tokens": "9"}, "max_new_tokens is '9'. needed a whole number"),
        ({"max_length": 9.5}, r"max_length is 9\.5"),
        ({"max_new_tokens": 2, "pad_token_id": "x"}, "pad_token_id is 'x'"),
        ({"max_new_tokens": 2, "eos_token_id": 1.5}, r"eos_token_id is 1\.5"),
        ({"max_new_tokens": 2, "streamer": 5}, "streamer is 5"),
        ({"attention_mask": [[None]]}, r"attention_mask is \[\[None\]\]"),
        ({"max_length": 4}, "input_ids has 4 tokens, and max_length is 4"),
        ({"max_new_tokens": 125}, "context of .* is 128"),
        ({"max_new_tokens": 2, "num_return_sequences": 2}, "num_return_sequences=2"),
        ({"max_new_tokens": 2, "do_sample": True, "temperature": 0.0}, r"temperature is 0\.0"),
        ({"max_new_tokens": 2, "do_sample": True, "top_k": -1}, "top_k is -1"),
        ({"max_new_tokens": 2, "cache_implementation": "dynamo"}, "cache_implementation='dynamo'"),
        ({"max_new_tokens": 2, "stop_strings": "x"}, "no tokenizer"),
        ({"max_new_tokens": 2, "suppress_tokens": [97]}, "suppress_tokens holds token id 97"),
        ({"max_new_tokens": 2, "bad_words_ids": [5]}, "wrong shape"),
        ({"max_new_tokens": 2, "bad_words_ids": [[]]}, "bad_words_ids holds an empty list"),
        ({"max_new_tokens": 2, "forced_eos_token_id": 2, "suppress_tokens": [2, 5]}, "suppress_tokens forbids"),
        ({"max_new_tokens": 2, "logits_processor": max}, "wrap it"),
        ({"max_new_tokens": 2, "stopping_criteria": [5]}, "list of callables"),
        ({"inputs": IDS}, "both given"),
        ({"attention_mask": GenerationConfig()}, "attention_mask is a GenerationConfig"),
        ({"attention_mask": IDS[:, 1:]}, "attention_mask has shape"),
        ({"attention_mask": IDS * 0}, "0 all over row 0"),
        ({"generation_config": 5}, "generation_config is a int"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_a_value_error(llm, settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        llm.generate_ids(IDS, **settings)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize(
    "ids", [torch.tensor([2, 5]), torch.zeros(1, 4), torch.zeros(1, 0, dtype=torch.int64)], ids=str
)
def test_what_is_no_batch_of_ids(llm, ids: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="input_ids has shape"):
        llm.generate_ids(ids, max_new_tokens=2)


@pytest.mark.parametrize("ids", ["x", [["a"]], [[1, 2], [3]], {}], ids=str)
def test_what_is_no_tensor(llm, ids: Any) -> None:
    with pytest.raises(UsageError, match="input_ids is "):
        llm.generate_ids(ids, max_new_tokens=2)


def test_a_row_whose_settings_forbid_every_token_is_an_error(llm) -> None:
    with pytest.raises(Exception, match="row 0 of input_ids: its settings forbid every token"):
        llm.generate_ids(IDS, max_new_tokens=2, suppress_tokens=list(range(97)))


def test_every_argument_of_transformers_is_known() -> None:
    """A new option of a new transformers must be looked at, not fall under "unknown"."""
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    names |= set(inspect.signature(GenerationMixin.generate).parameters) - {
        "self",
        "inputs",
        "kwargs",
        "generation_config",
    }
    assert names <= hf_generate.KNOWN
    assert not set(hf_generate.REFUSED) & {*hf_generate.SHARED, *hf_generate.WITHOUT_EFFECT}


def test_what_has_no_effect_is_taken(llm) -> None:
    expected = llm.generate_ids(IDS, max_new_tokens=5)
    settings = {
        "use_cache": False,
        "cache_implementation": "offloaded_static",
        "cache_config": {"nbits": 4},
        "prefill_chunk_size": 64,
        "synced_gpus": False,
        "early_stopping": True,
        "length_penalty": 2.0,
        "disable_compile": True,
        "output_scores": True,
        "guidance_scale": 1,
        "num_beams": 1,
        "min_p": None,
        "top_h": None,
    }
    assert torch.equal(llm.generate_ids(IDS, max_new_tokens=5, **settings), expected)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any, Engine]]:
    """The demo model, which has a tokenizer: by transformers, its tokenizer, by this engine."""
    folder = str(resources.files("h2o_flexgen") / "data" / "demo")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with Engine("demo", dtype="float32") as engine:
        yield model, AutoTokenizer.from_pretrained(folder), engine


class TestText:
    def test_stop_strings(self, pair) -> None:
        model, tokenizer, llm = pair
        given = tokenizer("Once upon a time", return_tensors="pt")
        plain = model.generate(given.input_ids, max_new_tokens=24)
        text = tokenizer.decode(plain[0, given.input_ids.shape[1] :])
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        expected = model.generate(given.input_ids, max_new_tokens=24, stop_strings=[stop, "@@"], tokenizer=tokenizer)
        assert expected.shape[1] < plain.shape[1]
        for settings in ({"tokenizer": tokenizer}, {}):
            found = llm.generate_ids(given.input_ids, max_new_tokens=24, stop_strings=[stop, "@@"], **settings)
            assert torch.equal(found, expected)

    def test_text_streamer(self, pair) -> None:
        model, tokenizer, llm = pair
        ids = tokenizer("The", return_tensors="pt").input_ids
        streams = []
        for generate in (model.generate, llm.generate_ids):
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
            generate(ids, max_new_tokens=12, streamer=streamer)
            streams.append(list(streamer))
        assert streams[0] == streams[1]
        assert "".join(streams[1])
