"""`generate_ids` equals transformers' `generate`, token for token and score for score, for every option it honours."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.errors import ModelError, UsageError
from tests.engine.against_generate import EOS, NEW, PAD, RAGGED, padded, same


@pytest.mark.parametrize("lengths", [RAGGED, [6], [1], [5, 5], [1, 1, 1]], ids=str)
def test_lengths_of_prompts(model, llm, lengths: list[int]) -> None:
    new = same(model, llm, padded(lengths), max_new_tokens=NEW)
    assert len(new) == len(lengths)
    assert new.shape[1] == NEW or (new == EOS).any(1).all()


@pytest.mark.parametrize("variant", ["llama-gqa", "gpt-neox"])
def test_other_families_with_left_padding(variant: str, checkpoint) -> None:
    model, folder = checkpoint(variant)
    with Engine(folder, dtype="float32", policy={"gpu_batch_size": 3}) as llm:
        same(model, llm, padded(RAGGED), max_new_tokens=NEW, repetition_penalty=1.4, eos_token_id=EOS, pad_token_id=PAD)


DETERMINISTIC: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.8},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[8], [89, 8], [EOS]]},
    {"bad_words_ids": [[89]], "eos_token_id": 8},
    {"suppress_tokens": [8, 89, 20]},
    {"begin_suppress_tokens": [8, 89]},
    {"sequence_bias": {(8,): -2.5, (89, 30): 50.0}},
    {"sequence_bias": [[[8], -2.5], [[89, 30], 50.0]]},
    {"forced_eos_token_id": EOS},
    {"forced_eos_token_id": [7, 9], "eos_token_id": [7, 9]},
    {"forced_bos_token_id": 33},
    {"exponential_decay_length_penalty": (3, 1.8)},
    {"remove_invalid_values": True},
    {"renormalize_logits": True, "suppress_tokens": [8]},
    {"min_new_tokens": 9, "eos_token_id": [8, 89]},
    {"min_length": 15, "eos_token_id": [8, 89]},
    {"min_length": 30, "min_new_tokens": 2, "eos_token_id": [8, 89]},
    {"eos_token_id": [8, 90]},
    {"eos_token_id": 89, "pad_token_id": 50},
    {"eos_token_id": 89, "pad_token_id": None},
    {"eos_token_id": None},
    {"max_new_tokens": 7.0, "suppress_tokens": [8.0], "eos_token_id": [89.0, 8], "pad_token_id": 50.0},
    {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "suppress_tokens": [5], "min_new_tokens": 4},
    {"do_sample": True, "top_k": 1},
    {"do_sample": True, "top_k": 0, "top_p": 0.0, "temperature": 0.7},
    {"do_sample": True, "top_k": None, "min_p": 1.0},
    {"use_cache": True, "cache_implementation": "dynamic", "num_beams": 1, "guidance_scale": None, "typo": None},
]


@pytest.mark.turns
@pytest.mark.parametrize("settings", DETERMINISTIC, ids=str)
def test_options(model, llm, settings: dict[str, Any]) -> None:
    # What depends on the first token sees a prompt of one token, too.
    single = any("bos" in name or "begin" in name for name in settings)
    for lengths in (RAGGED, [1]) if single else (RAGGED,):
        same(model, llm, padded(lengths), **{"max_new_tokens": NEW, **settings})


DEFAULT_LENGTH = pytest.mark.filterwarnings("ignore:Using the model-agnostic default")


@DEFAULT_LENGTH
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_length": 17}, {"max_length": 12}, {"max_length": 12, "max_new_tokens": 3}, {"max_new_tokens": None}],
    ids=str,
)
def test_how_long(model, llm, settings: dict[str, Any]) -> None:
    same(model, llm, padded(RAGGED), **settings)


@DEFAULT_LENGTH
def test_the_default_length_ends_at_the_context(model, llm) -> None:
    assert same(model, llm, padded([120])).shape == (1, 8)


@pytest.mark.parametrize("given", [{}, {"pad_token_id": PAD}, {"eos_token_id": [PAD, EOS]}], ids=str)
def test_padding_without_a_mask(model, llm, given: dict[str, Any]) -> None:
    """Pad tokens are padding, unless they could end a sequence too."""
    ids, _ = padded(RAGGED)
    expected = model.generate(ids, max_new_tokens=NEW, **given)
    assert torch.equal(llm.generate_ids(ids, max_new_tokens=NEW, **given), expected)


def test_forms_of_the_input(model, llm) -> None:
    ids, mask = padded([5, 5])
    expected = model.generate(ids, max_new_tokens=6)
    for found in (
        llm.generate_ids(inputs=ids, max_new_tokens=6),
        llm.generate_ids(ids.int(), max_new_tokens=6),
        llm.generate_ids(ids.tolist(), mask.bool(), max_new_tokens=6),
        llm.generate_ids(**{"input_ids": ids, "attention_mask": mask}, max_new_tokens=6),
    ):
        assert torch.equal(found, expected)
    assert torch.equal(llm.generate_ids(max_new_tokens=6), model.generate(max_new_tokens=6))
    assert llm.generate_ids(ids[:0], max_new_tokens=6).shape == (0, 5)


def test_holes_in_a_prompt_are_left_out(model, llm) -> None:
    ids, mask = padded([9, 9])
    mask[0, 3:5] = 0
    same(model, llm, (ids, mask), max_new_tokens=NEW)


@pytest.mark.parametrize("masked", [True, False])
def test_right_padding_is_refused(llm, masked: bool) -> None:
    """transformers goes on behind the pads, where no model was trained to."""
    ids, _ = padded([9, 9])
    ids[1, 6:] = PAD
    with pytest.raises(UsageError, match=r"row 1 of input_ids ends in padding.*padding_side"):
        llm.generate_ids(ids, ids != PAD if masked else None, max_new_tokens=6)


class TestWhereSettingsComeFrom:
    @pytest.fixture
    def folder(self, checkpoint, tmp_path) -> Path:
        return Path(shutil.copytree(checkpoint("opt")[1], tmp_path / "model"))

    @staticmethod
    def stored(folder: Path, **settings: Any) -> PreTrainedModel:
        """The folder's generation_config.json with `settings`; the model as transformers reads it back."""
        from transformers import OPTForCausalLM

        path = folder / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        return OPTForCausalLM.from_pretrained(folder)

    def test_keywords_then_object_then_file(self, folder) -> None:
        model = self.stored(folder, max_new_tokens=5, repetition_penalty=1.8, eos_token_id=[2, 96], suppress_tokens=[8])
        config = GenerationConfig(max_new_tokens=7, suppress_tokens=[89])
        inputs = padded(RAGGED)
        with Engine(str(folder), dtype="float32") as llm:
            assert same(model, llm, inputs).shape[1] == 5
            assert same(model, llm, inputs, generation_config=config).shape[1] == 7
            assert same(model, llm, inputs, generation_config=config, max_new_tokens=3).shape[1] == 3
            same(model, llm, inputs, repetition_penalty=None, suppress_tokens=None)

    @pytest.mark.parametrize("said", [{"pad_token_id": None}, {"pad_token_id": None, "eos_token_id": None}], ids=str)
    def test_tokens_that_the_file_leaves_out_are_none(self, folder, said: dict[str, Any]) -> None:
        """Though config.json has them: rows end with an eos again, or never, and no pad token is padding."""
        model = self.stored(folder, **said)
        ids, _ = inputs = padded(RAGGED)
        with Engine(str(folder), dtype="float32") as llm:
            same(model, llm, inputs, max_new_tokens=NEW)
            expected = model.generate(ids, max_new_tokens=NEW)
            assert torch.equal(llm.generate_ids(ids, max_new_tokens=NEW), expected)

    def test_sampling_settings_of_the_file_are_no_reason_to_warn(self, folder, recwarn) -> None:
        self.stored(folder, temperature=0.6, top_p=0.9, do_sample=True)
        recwarn.clear()
        with Engine(str(folder), dtype="float32") as llm:
            llm.generate_ids(padded([4])[0], max_new_tokens=2, do_sample=False)
            assert not recwarn.list
            with pytest.warns(UserWarning, match="temperature has no effect"):
                llm.generate_ids(padded([4])[0], max_new_tokens=2, do_sample=False, temperature=0.0)

    def test_an_old_model_has_them_in_its_config(self, folder) -> None:
        from transformers import OPTForCausalLM

        (folder / "generation_config.json").unlink()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_length": 13}))
        model = OPTForCausalLM.from_pretrained(folder)
        with Engine(str(folder), dtype="float32") as llm:
            assert same(model, llm, padded([4])).shape[1] == 9

    def test_a_torn_file_is_named(self, folder) -> None:
        (folder / "generation_config.json").write_text('{"max_new_tokens": ')
        with pytest.raises(ModelError, match=r"generation_config\.json"):
            Engine(str(folder), dtype="float32")


def test_after_a_row_has_ended_its_pad_token_is_certain(llm) -> None:
    ids, mask = padded(RAGGED)
    eos = int(llm.generate_ids(ids, mask, max_new_tokens=NEW)[0, ids.shape[1]])
    found = llm.generate_ids(
        ids, mask, max_new_tokens=NEW, eos_token_id=eos, return_dict_in_generate=True, output_scores=True
    )
    assert (found.logits, found.past_key_values, found.attentions) == (None, None, None)
    assert len(found.scores) == found.sequences.shape[1] - ids.shape[1] > 1
    assert found.scores[1][0].softmax(-1)[PAD] == 1.0


def test_samples_are_reproducible_and_follow_their_prompts(llm) -> None:
    ids, mask = padded(RAGGED)
    settings = {"do_sample": True, "temperature": 1.5, "max_new_tokens": NEW, "num_return_sequences": 3, "seed": 7}
    first = llm.generate_ids(ids, mask, **settings)
    assert first.shape == (12, ids.shape[1] + NEW)
    assert torch.equal(first, llm.generate_ids(ids, mask, **settings))
    assert torch.equal(first[:, : ids.shape[1]], ids.repeat_interleave(3, 0))
    assert len({tuple(row) for row in first.tolist()}) == 12
    assert not torch.equal(first, llm.generate_ids(ids, mask, **{**settings, "seed": 8}))
    alone = llm.generate_ids(ids[:1], mask[:1], **settings)
    assert torch.equal(alone, first[:3])
