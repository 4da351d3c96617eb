"""GGUF files with random weights, for llama.cpp: of the shape that a config.json says, in the type asked for.

Matrices are all of that type, the embedding and the head included; norms and biases are float32. Only the features
that matter for speed are there: no rotary scaling, no sliding windows, and a vocabulary without a text.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from h2o_flexgen.baselines.work import CannotRun

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmoe": "olmoe",
    "qwen3_moe": "qwen3moe",
}
"""GGUF's name of an architecture, by the model_type of its config.json."""
TYPES = {
    kind.name.lower(): kind for kind in (gguf.GGMLQuantizationType[name] for name in ("F16", "BF16", "Q8_0", "Q4_0"))
}
"""The types that `write_random` writes."""
_POOL = 1 << 22  # random numbers that every matrix is filled with, over and over: drawing them all would take minutes
_SCALE = 0.02
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_ROUTER = "ffn_gate_inp.weight"


class Tensor(NamedTuple):
    """A tensor by its name in the file: a matrix as (outputs, inputs), those of experts in one, or a vector filled with
    `value`."""

    name: str
    shape: tuple[int, ...]
    value: float = 0.0


@dataclass(frozen=True)
class GgufShape:
    """The sizes of a model that a file of random weights needs. `tied`: the head is the embedding; `inner`: of an
    expert where there are `experts`, of which a token uses `active`."""

    architecture: str
    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    epsilon: float
    rope_base: float
    tied: bool
    experts: int = 0
    active: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> GgufShape:
        """The shape of a config.json; CannotRun for a family that is not written here, or where sizes are missing."""
        family = config.get("model_type")
        if family not in ARCHITECTURES:
            written = ", ".join(ARCHITECTURES)
            raise CannotRun(f"llama.cpp is compared on models of {written}, and this is a {family}")
        rope = config.get("rope_parameters") or {}
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            return cls(
                architecture=ARCHITECTURES[family],
                vocab=config["vocab_size"],
                hidden=hidden,
                inner=config.get("moe_intermediate_size") or config["intermediate_size"],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or hidden // heads,
                context=config.get("max_position_embeddings") or 2048,
                epsilon=config.get("rms_norm_eps", 1e-6),
                rope_base=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
                tied=bool(config.get("tie_word_embeddings", False)),
                experts=config.get("num_experts") or config.get("num_local_experts") or 0,
                active=config.get("num_experts_per_tok") or 0,
            )
        except KeyError as missing:
            raise CannotRun(f"config.json has no {missing.args[0]}, which a file for llama.cpp needs") from None

    @property
    def fingerprint(self) -> str:
        """The same for the same shape."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]

    def tensors(self) -> Iterator[Tensor]:
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        outputs = (wide, narrow, narrow, self.hidden, self.inner, self.inner, self.hidden)
        inputs = (self.hidden, self.hidden, self.hidden, wide, self.hidden, self.hidden, self.inner)
        yield Tensor("token_embd.weight", (self.vocab, self.hidden))
        for block in (f"blk.{layer}" for layer in range(self.layers)):
            yield Tensor(f"{block}.attn_norm.weight", (self.hidden,), 1.0)
            for name, rows, columns in zip(_MATRICES, outputs, inputs, strict=True):
                experts = self.experts and name.startswith("ffn_")
                shape = (self.experts, rows, columns) if experts else (rows, columns)
                yield Tensor(f"{block}.{name}{'_exps' if experts else ''}.weight", shape)
                if self.architecture == "qwen2" and name in _MATRICES[:3]:
                    yield Tensor(f"{block}.{name}.bias", (rows,))
            if self.experts:
                yield Tensor(f"{block}.{_ROUTER}", (self.experts, self.hidden))
            if self.architecture in ("qwen3", "qwen3moe", "olmoe"):
                joint = self.architecture == "olmoe"
                yield Tensor(f"{block}.attn_q_norm.weight", (wide if joint else self.head_dim,), 1.0)
                yield Tensor(f"{block}.attn_k_norm.weight", (narrow if joint else self.head_dim,), 1.0)
            yield Tensor(f"{block}.ffn_norm.weight", (self.hidden,), 1.0)
        yield Tensor("output_norm.weight", (self.hidden,), 1.0)
        if not self.tied:
            yield Tensor("output.weight", (self.vocab, self.hidden))


def random_file(folder: Path, shape: GgufShape, kind: str, seed: int = 0) -> Path:
    """The file of a model of `shape` in a type of TYPES, written there once."""
    path = folder / f"random-{shape.fingerprint}-{seed}-{kind}.gguf"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_random(path, shape, kind, seed)
    return path


def write_random(path: Path, shape: GgufShape, kind: str, seed: int) -> None:
    """Writes it, a tensor at a time, whole or not at all."""
    wanted = TYPES[kind]
    tensors = {tensor.name: (tensor, _type_of(tensor, wanted)) for tensor in shape.tensors()}
    partial = path.with_name(f".{path.name}.partial")
    writer = gguf.GGUFWriter(partial, shape.architecture)
    _describe(writer, shape, wanted)
    for tensor, type_ in tensors.values():
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), _nbytes(tensor, type_), type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    numbers = np.random.default_rng(seed).standard_normal(_POOL, dtype=np.float32) * np.float32(_SCALE)
    pools = {type_: gguf.quants.quantize(numbers, type_).view(np.uint8) for _, type_ in tensors.values()}
    for number, (tensor, type_) in enumerate(tensors.values()):
        if len(tensor.shape) == 1:
            writer.write_tensor_data(np.full(tensor.shape, tensor.value, np.float32))
        else:
            pool = np.roll(pools[type_], -number * gguf.GGML_QUANT_SIZES[type_][1])
            writer.write_tensor_data(np.resize(pool, _nbytes(tensor, type_)))
    writer.close()
    partial.replace(path)


def _type_of(tensor: Tensor, wanted: gguf.GGMLQuantizationType) -> gguf.GGMLQuantizationType:
    """`wanted` for matrices, or float16 where their rows are not a whole number of its blocks."""
    if len(tensor.shape) == 1 or tensor.name.endswith(_ROUTER):
        return gguf.GGMLQuantizationType.F32
    block, _ = gguf.GGML_QUANT_SIZES[wanted]
    return wanted if tensor.shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _nbytes(tensor: Tensor, type_: gguf.GGMLQuantizationType) -> int:
    block, nbytes = gguf.GGML_QUANT_SIZES[type_]
    return math.prod(tensor.shape) // block * nbytes


def _describe(writer: gguf.GGUFWriter, shape: GgufShape, wanted: gguf.GGMLQuantizationType) -> None:
    writer.add_name("random")
    writer.add_file_type(gguf.LlamaFileType["MOSTLY_" + wanted.name])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.active)
        writer.add_expert_feed_forward_length(shape.inner)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_vocab_size(shape.vocab)
    writer.add_tokenizer_model("none")
