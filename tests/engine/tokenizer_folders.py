"""Tokenizers of every kind that the hub has, tiny, in the files that the hub has them in."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, again and again; the dog does not mind.",
    "Don't say it's over: 12 of 345 answers are left, and they're the best ones!",
    "Grüße aus Köln, wo der Dom steht. Ça va très bien, merci. 你好，世界。",
    "def main():\n    return [x for x in range(10) if x % 2]\n\n\tprint(main())",
]
TEXTS = [
    "",
    " ",
    "The dog",
    " the dog does  not mind.",
    "Hello , world . It's \n\n over\t!",
    "Grüße 你好 🦊 \x00 unknown ☃",
    "<s> spelt out</s> and <pad>",
    "<|user|> says <|tool|> 12345",
]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>"]
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def write(folder: Path, model_type: str, made: Tokenizer | None = None, **settings: Any) -> Path:
    """A folder with a config.json, with a tokenizer.json if one is `made`, and settings in tokenizer_config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if made is not None:
        made.save(str(folder / "tokenizer.json"))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def with_bos(made: Tokenizer) -> Tokenizer:
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def byte_level() -> Tokenizer:
    """As GPT-2, OPT, Llama 3 and Qwen have it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    made.add_special_tokens(ROLES)
    made.add_tokens([AddedToken("<|tool|>", normalized=False)])
    return made


def metaspace() -> Tokenizer:
    """As Llama 2 and Mistral have it: spaces as a letter, characters that are not in the vocabulary byte by byte."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=pieces, limit_alphabet=60, show_progress=False)
    made.train_from_iterator([line.replace("\n", " ")[:100] for line in CORPUS], trainer)
    state = json.loads(made.to_str())
    state["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    made = Tokenizer.from_str(json.dumps(state))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(ROLES)
    return with_bos(made)


def gemma() -> Tokenizer:
    """As Gemma 1 to 3 have it: no space before the first word, and tokens of several spaces."""
    state = json.loads(metaspace().to_str())
    state["model"]["vocab"]["<mask>"] = len(state["model"]["vocab"])
    made = Tokenizer.from_str(json.dumps(state))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<mask>"])
    made.add_tokens([AddedToken("<|tool|>", normalized=False), AddedToken("\n\n", normalized=False)])
    return made


def words() -> Tokenizer:
    """A word a token, and what stands between words; as tests and toys have it."""
    pattern = Regex(r"\w+|[^\w]")
    found = sorted(
        {word for line in CORPUS for word, _ in pre_tokenizers.Split(pattern, "isolated").pre_tokenize_str(line)}
    )
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *found])}, unk_token="<unk>"))
    made.add_special_tokens(SPECIAL)
    made.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    made.decoder = decoders.Fuse()
    return with_bos(made)


def word_pieces() -> Tokenizer:
    """Pieces joined by spaces, some of which only a clean-up takes away again."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    return with_bos(made)


def sentencepiece_model(kind: str) -> bytes:
    """A tokenizer.model; `kind` is bpe or unigram. Skips the test where the package is not installed."""
    import pytest

    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    pytest.importorskip("google.protobuf")
    model = io.BytesIO()
    trainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        model_type=kind,
        vocab_size=360 if kind == "bpe" else 340,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return model.getvalue()


def opt(folder: Path) -> Path:
    """vocab.json and merges.txt, as facebook/opt-6.7b has them."""
    write(folder, "opt", tokenizer_class="GPT2Tokenizer", add_bos_token=True, **{**NAMED, "bos_token": "</s>"})
    byte_level().model.save(str(folder))
    return folder


def llama(folder: Path) -> Path:
    return write(
        folder, "llama", metaspace(), tokenizer_class="LlamaTokenizer", add_bos_token=True, legacy=True, **NAMED
    )


def llama_sentencepiece(folder: Path) -> Path:
    write(folder, "llama", tokenizer_class="LlamaTokenizer", add_bos_token=True, add_eos_token=False, **NAMED)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model("bpe"))
    return folder


def gemma_sentencepiece(folder: Path) -> Path:
    write(folder, "gemma", tokenizer_class="GemmaTokenizer", **NAMED)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model("bpe"))
    return folder


def llama3(folder: Path) -> Path:
    made = with_bos(byte_level())
    return write(folder, "llama", made, tokenizer_class="PreTrainedTokenizerFast", chat_template=TEMPLATE, **NAMED)


def gemma_folder(folder: Path, **more: Any) -> Path:
    """All the files that Google's folders have; `more` goes into tokenizer_config.json."""
    made = gemma()
    tokens = {
        str(number): {name: getattr(token, name) for name in ("content", "lstrip", "normalized", "rstrip", "special")}
        for number, token in made.get_added_tokens_decoder().items()
    }
    settings = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": tokens,
        "additional_special_tokens": ROLES[:2],
        "clean_up_tokenization_spaces": False,
        "sp_model_kwargs": {},
        "spaces_between_special_tokens": False,
        "use_default_system_prompt": False,
        **NAMED,
    }
    write(folder, "gemma3_text", made, **{**settings, **more})
    described = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({**NAMED, "bos_token": described}))
    (folder / "added_tokens.json").write_text(json.dumps({"<|tool|>": made.token_to_id("<|tool|>")}))
    return folder


def added(folder: Path) -> Path:
    """Tokens that only tokenizer_config.json knows."""
    tokens = {"extra_special_tokens": ["<|extra|>"], "eos_token": "<|end|>"}
    return write(folder, "llama", byte_level(), tokenizer_class="PreTrainedTokenizerFast", **{**NAMED, **tokens})


def mapped(folder: Path) -> Path:
    """special_tokens_map.json in the place of a tokenizer_config.json."""
    write(folder, "gpt_neox", byte_level())
    (folder / "special_tokens_map.json").write_text(json.dumps({**NAMED, "pad_token": "<|padding|>"}))
    return folder


def plain(make: Callable[[], Tokenizer], model_type: str, **more: Any) -> Callable[[Path], Path]:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 7, **NAMED, **more}
    return lambda folder: write(folder, model_type, make(), **settings)


def with_classes(make: Callable[[], Tokenizer], model_type: str, name: str, **more: Any) -> Callable[[Path], Path]:
    return lambda folder: write(folder, model_type, make(), tokenizer_class=name, **NAMED, **more)


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "opt": opt,
    "llama": llama,
    "llama-no-legacy": with_classes(metaspace, "llama", "LlamaTokenizerFast", legacy=False, add_prefix_space=False),
    "llama-sentencepiece": llama_sentencepiece,
    "llama3": llama3,
    "llama-byte-level": with_classes(lambda: with_bos(byte_level()), "llama", "LlamaTokenizer", add_bos_token=True),
    "mistral": with_classes(
        metaspace, "mistral", "LlamaTokenizer", add_bos_token=True, spaces_between_special_tokens=False
    ),
    "gemma": with_classes(metaspace, "gemma2", "GemmaTokenizer", add_bos_token=True),
    "gemma-sentencepiece": gemma_sentencepiece,
    "gemma-without-bos": lambda folder: gemma_folder(folder, add_bos_token=False),
    "gemma-more-tokens": lambda folder: gemma_folder(folder, extra_special_tokens={"image_token": "<|image|>"}),
    "gemma-chat": lambda folder: gemma_folder(folder, chat_template=TEMPLATE),
    "qwen2": with_classes(byte_level, "qwen2", "Qwen2Tokenizer", add_prefix_space=False),
    "qwen2-plain": plain(byte_level, "qwen2"),
    "gpt-neox": with_classes(byte_level, "gpt_neox", "GPTNeoXTokenizer", add_prefix_space=False),
    "phi3": with_classes(metaspace, "phi3", "LlamaTokenizer", add_bos_token=False),
    "added": added,
    "mapped": mapped,
    "cleaned": plain(word_pieces, "opt", clean_up_tokenization_spaces=True),
    "bos-and-eos": plain(byte_level, "llama", add_bos_token=True, add_eos_token=True),
    "plain-gemma": gemma_folder,
    "plain-with-bos": plain(lambda: with_bos(byte_level()), "llama", add_bos_token=True),
    "plain-words": plain(words, "opt"),
    "plain-bytes": plain(byte_level, "gpt_neox", clean_up_tokenization_spaces=False, backend="tokenizers"),
    "plain-metaspace": plain(metaspace, "llama", padding_side="left"),
    "plain-pieces": plain(word_pieces, "llama"),
}
