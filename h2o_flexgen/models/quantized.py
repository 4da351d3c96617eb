"""The description in config.json of weights that are stored in fewer bits: its quantization_config. No torch.

One policy for this and for all files that people have. A key that repeats a known fact is taken, under any of the names
that programs have for it; one that contradicts a fact is refused, with both; an unknown key is bookkeeping and taken
with a warning, unless its name says that it changes numbers (`_CHANGES`): then it is refused by name. The tensors show
which modules are packed, and in which shapes; they have to agree with the settings.

Frantar et al. 2022, "GPTQ", arXiv 2210.17323; Lin et al. 2023, "AWQ", arXiv 2306.00978; the keys are those that
GPTQModel, AutoAWQ, AutoRound, transformers and compressed-tensors write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import warn_once
from h2o_flexgen.models.fields import ConfigReader, shown
from h2o_flexgen.models.schemes import MXFP4, Quantization, Scheme, pattern_fault

T = TypeVar("T")

SETTINGS_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files beside config.json in which AutoGPTQ, AutoAWQ and ModelOpt wrote what transformers keeps in
quantization_config."""


def read_quantization(config: Mapping[str, Any], name: str) -> Quantization | None:
    """The quantization_config of a config.json, None where it has none. ModelError for what is not understood."""
    key = "quantization_config"
    if not config.get(key) and config.get("compression_config"):
        key = "compression_config"  # what compressed-tensors wrote first
    if not config.get(key):
        return None
    read = ConfigReader(config, name).section(key)
    method = read.values().get("quant_method")
    if method is None and any(key in read for key in _LOADED):
        method = "bitsandbytes"  # as transformers has it: older files do not say it
    method = method.lower().removeprefix("intel/") if isinstance(method, str) else method
    if not isinstance(method, str) or method not in _METHODS:
        change = "name the .gguf file itself" if method == "gguf" else "use the model's checkpoint in 16 bits"
        raise read.error("quant_method", f"one of {', '.join(_METHODS)}", change)
    return _METHODS[method](read)


_TRAINING = (
    "quant_method static_groups true_sequential damp_percent damp_auto_increment act_group_aware hyb_act mse dataset "
    "tokenizer nsamples seqlen model_seqlen batch_size pad_token_id model_name_or_path model_file_base_name meta "
    "backend exllama_config disable_exllama use_exllama max_input_length cache_block_outputs use_cuda_fp16 pack_impl "
    "block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize lm_head iters lr minmax_lr "
    "enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input gradient_accumulate_steps low_gpu_mem_usage amp "
    "autoround_version scale_dtype data_type to_quant_block_names sampler train_bs act_bits act_group_size act_sym "
    "act_dynamic act_data_type super_bits super_group_size do_fuse fuse_max_seq_len modules_to_fuse "
    "duo_scaling apply_scale auto_scale apply_clip modules_to_not_convert modules_to_convert ignored_layers dequantize "
    "run_compressed global_compression_ratio version observer observer_kwargs zp_dtype actorder "
)
"""Keys that say how weights were quantised, which were, or how another program should run them."""

_CHANGES = re.compile(
    r"rotat|hadamard|transform|adapter|lora|low_?rank|outlier|spars|codebook|lookup|marlin|kv_|permut|svd|residual"
    r"|activation|scale|zero|offset|levels|format|layout",
    re.IGNORECASE,
)
"""Words in the names of keys that change numbers. Bits and group sizes are not among them: the shapes of tensors show
both, so that no key is needed."""


def _repeated(read: ConfigReader, keys: str, default: str, options: Mapping[str, T]) -> T:
    """The entry of `options` for the values of those of `keys` that are there, which must all say the same."""
    there = [key for key in keys.split() if key in read] or [keys.split()[0]]
    found = [read.choice(key, default, options) for key in there]
    for key, each in zip(there[1:], found[1:], strict=True):
        if each != found[0]:
            raise read.error(key, f"the same as {there[0]}, {read.values()[there[0]]!r}")
    return found[0]


def _cased(**options: T) -> dict[str, T]:
    """`options` in small and large letters."""
    return {**options, **{key.upper(): value for key, value in options.items()}}


def _check_keys(read: ConfigReader, known: str, *names: str) -> None:
    """`_only` of a whole quantization_config, and that GPTQModel's `method` is one of `names`, as quant_method is."""
    _only(read, names[0], _TRAINING + known + " method")
    if "method" in read and str(read.values()["method"]).lower() not in names:
        raise read.error("method", f"the same as quant_method, {names[0]!r}")


def _check_words(read: ConfigReader) -> None:
    """That of GPTQ's and AWQ's ways those are asked for that are done: words of 32 bits, activations of 16."""
    if read.values().get("act_bits", 16) != 16:
        raise read.error("act_bits", "activations of 16 bits")
    read.choice("pack_dtype", "int32", {"int32": None, "torch.int32": None})


_PACKING_FORMATS = ("auto_round:auto_gptq", "auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_awq")


def _gptq(read: ConfigReader) -> Quantization:
    known = "bits group_size sym desc_act checkpoint_format format pack_dtype packing_format dynamic extra_config"
    _check_keys(read, known, "gptq", "auto-round")
    _check_words(read)
    step = _repeated(read, "checkpoint_format format", "gptq", _cased(gptq=1, gptq_v2=0))
    read.choice("packing_format", _PACKING_FORMATS[0], dict.fromkeys(_PACKING_FORMATS[:3]))
    others = tuple(_overrides(read, step))
    last = ((("Linear", "Embedding"), _gptq_scheme(read, step)),)
    return Quantization("gptq", (*others, *last), in_order=True)


def _gptq_scheme(read: ConfigReader, step: int) -> Scheme:
    levels: Literal["uint4", "int8"] = "uint4" if _bits(read, "bits", (4, 8)) == 4 else "int8"
    group, ordered = _group(read, "group_size"), read.flag("desc_act", False)
    return Scheme("gptq", levels, (1, group), read.flag("sym", True), step, ordered and group > 0)


def _overrides(read: ConfigReader, step: int) -> Iterator[tuple[tuple[str, ...], Scheme]]:
    """The modules that GPTQModel's `dynamic` or AutoRound's `extra_config` quantise otherwise, the first that matches
    first. Rules for modules that are left out are not looked at: these have plain tensors."""
    for key, plain in (("dynamic", False), ("extra_config", True)):
        section = read.section(key)
        if len(section.values()) > _MOST_RULES:
            raise read.error(key, f"at most {_MOST_RULES} rules")
        for rule in section.values():
            own = section.section(rule)
            if rule.startswith("-:") or own.values().get("bits") in (16, 32):
                continue
            _only(own, "gptq", _TRAINING + "bits group_size sym desc_act")
            target = rule if plain else f"re:{rule.removeprefix('+:')}"
            _check_pattern(section, rule, target)
            shared = {each: read.values()[each] for each in ("bits", "group_size", "sym", "desc_act") if each in read}
            yield (target,), _gptq_scheme(own.filled(**shared), step)


def _awq(read: ConfigReader) -> Quantization:
    known = "bits w_bit group_size q_group_size zero_point version format sym checkpoint_format pack_dtype "
    _check_keys(read, known + "packing_format desc_act extra_config dynamic", "awq", "auto-round")
    _check_words(read)
    read.choice("packing_format", _PACKING_FORMATS[3], dict.fromkeys(_PACKING_FORMATS[3:]))
    for _, other in _overrides(read, 0):
        if (other.bits, other.block) != (4, (1, _group(read, "group_size"))):
            raise read.error("dynamic" if "dynamic" in read else "extra_config", "the same bits and groups throughout")
    for key in ("w_bit", "bits"):
        if key in read:
            _bits(read, key, (4,))
    _repeated(read, "version format checkpoint_format", "gemm", _cased(gemm=None, awq=None))
    if not read.flag("zero_point", True):
        raise read.error("zero_point", "true")
    if read.values().get("backend") == "llm-awq":
        raise read.error("backend", "the layout of AutoAWQ")
    _texts(read, "modules_to_not_convert")
    key = "q_group_size" if "q_group_size" in read else "group_size"
    group = _group(read, key)
    if "group_size" in read and _group(read, "group_size") != group:
        raise read.error("group_size", f"the same as {key}, {group}")
    return _everywhere("awq", Scheme("awq", "uint4", (1, group), symmetric=False))


def _auto_round(read: ConfigReader) -> Quantization:
    """AutoRound's own name for what it stores in the layouts of others."""
    stored = read.values().get("packing_format", "auto_round")
    if stored in _PACKING_FORMATS[3:]:
        return _awq(read)
    # The zero points of symmetric matrices show how they are stored; for other matrices this key alone tells.
    if stored not in _PACKING_FORMATS[:2] and not (
        stored in ("auto_round", _PACKING_FORMATS[2]) and read.flag("sym", True)
    ):
        raise read.error("packing_format", f"one of {', '.join(_PACKING_FORMATS)}")
    return _gptq(read.replaced(packing_format=_PACKING_FORMATS[0]))


def _fp8(read: ConfigReader) -> Quantization:
    _check_keys(read, "activation_scheme weight_block_size fmt scale_fmt expert_dtype format", "fp8")
    static = read.choice("activation_scheme", "dynamic", {"dynamic": False, "static": True})
    read.choice("fmt", "e4m3", {"e4m3": None, "float8_e4m3fn": None})
    read.choice("format", "e4m3", {"e4m3": None, "float8_e4m3fn": None, "fp8": None})
    read.choice("scale_fmt", "float", {"float": None, "ue8m0": None})
    read.choice("expert_dtype", "fp8", {"fp8": None})
    for key in ("modules_to_not_convert", "ignored_layers"):
        _texts(read, key)
    if static:
        _tell_static(read.name)
    return replace(_everywhere("fp8", Scheme("scaled", "e4m3", _block(read, "weight_block_size"))), static=static)


def packings_of_config(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Packing]:
    """The packings that follow from a config.json alone: MXFP4 is that of all experts. Of what other methods pack only
    the tensors of a checkpoint tell, and nothing is said here. ModelError as `read_quantization`."""
    quantization = read_quantization(config, spec.name)
    if quantization is None or quantization.method != "mxfp4":
        return {}
    tensors = spec.multiplied.get("experts", ())
    return {tensor.name: MXFP4 for tensor in tensors}


def _mxfp4(read: ConfigReader) -> Quantization:
    _check_keys(read, "", "mxfp4")
    _texts(read, "modules_to_not_convert")
    return _everywhere("mxfp4", Scheme("mxfp4", "e2m1", (1, 32)))


_FLOATS4 = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
"""Formats of floats of 4 bits, and how many share a scale."""
_COMPRESSED = {"pack-quantized": "packed", **{key: key for key in _FLOATS4}}
_COMPRESSED |= dict.fromkeys(("float-quantized", "naive-quantized", "int-quantized"), "scaled")


def _compressed(read: ConfigReader) -> Quantization:
    known = "config_groups format ignore quantization_status kv_cache_scheme"
    _check_keys(read, f"{known} sparsity_config", "compressed-tensors")
    read.choice("quantization_status", "compressed", {"compressed": None, "frozen": None})
    sparse = read.section("sparsity_config")
    if sparse.values():
        sparse.choice("format", "", {"dense": None})
    groups = read.section("config_groups")
    schemes, static = [], False
    for key in groups.values():
        group = groups.section(key)
        targets = _texts(group, "targets")
        if sum(target.startswith("re:") for target in targets) > _MOST_PATTERNS:
            raise group.error("targets", f"at most {_MOST_PATTERNS} patterns")
        for target in targets:
            _check_pattern(group, "targets", target)
        stored = group if "format" in group else read
        layout = stored.choice("format", "", _COMPRESSED)
        _only(group, "compressed-tensors", _TRAINING + "targets weights input_activations output_activations format")
        if not targets or "weights" not in group:
            raise group.error("weights" if targets else "targets", "a group with targets and weights")
        static = _has_static(group) or static
        schemes.append((targets, _compressed_scheme(group.section("weights"), layout)))
    if not schemes:
        raise read.error("config_groups", "at least one group")
    # The tensors show which modules are left out, so that a pattern that may take for ever is not needed.
    ignored = tuple(text for text in _texts(read, "ignore") if not pattern_fault(text))
    return Quantization("compressed-tensors", tuple(schemes), ignored, static=static, cached=_has_cached(read))


def _has_static(group: ConfigReader) -> bool:
    """Whether inputs have scales that were found beforehand, which are not used. ModelError for other such scales."""
    dynamic = {
        key: group.section(key).values().get("dynamic", False)
        for key in ("input_activations", "output_activations")
        if key in group
    }
    for key, value in dynamic.items():
        if value is not True and (key != "input_activations" or value not in (False, "local")):
            raise group.error(key, "none, or dynamic ones: static scales of activations are not used")
    static = any(value is not True for value in dynamic.values())
    if static:
        _tell_static(group.name)
    return static


def _has_cached(read: ConfigReader) -> bool:
    """Whether caches have scales, which are not used."""
    found = "kv_cache_quant_algo" in read or "kv_cache_scheme" in read
    if found:
        warn_once(f"{read.name}: its scales of caches are not used: keys and values keep the bits that are asked for")
    return found


def _compressed_scheme(read: ConfigReader, layout: str) -> Scheme:
    known = "num_bits type symmetric group_size strategy block_structure dynamic"
    _only(read, "compressed-tensors", _TRAINING + known)
    read.refuse(["dynamic"])
    floats = read.choice("type", "int", {"int": False, "float": True})
    kinds = {"packed": "int", **dict.fromkeys(_FLOATS4, "float")}
    if layout in kinds and floats != (kinds[layout] == "float"):
        name = "pack-quantized" if layout == "packed" else layout
        raise read.error("type", f"{kinds[layout]!r} in the format {name}")
    bits = _bits(read, "num_bits", (4,) if layout in _FLOATS4 else (4, 8) if layout == "packed" else (8,))
    symmetric = read.flag("symmetric", True)
    if floats and not symmetric:
        raise read.error("symmetric", "true for numbers of the type float")
    if layout in _FLOATS4:
        read.choice("strategy", "group", {"group": None, "tensor_group": None})
        if _group(read, "group_size", _FLOATS4[layout]) != _FLOATS4[layout]:
            raise read.error("group_size", f"{_FLOATS4[layout]} in the format {layout}")
        return Scheme("fp4", "e2m1", (1, _FLOATS4[layout]))
    size = read.values().get("group_size")
    implied = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = read.choice("strategy", implied, {key: key for key in ("tensor", "channel", "group", "block")})
    if strategy == "tensor" and layout == "packed":
        raise read.error("strategy", "'group' or 'channel' in the format pack-quantized")
    if strategy == "block" and not floats:
        raise read.error("strategy", "'group' or 'channel' for numbers of the type int")
    group = _group(read, "group_size", -1)
    if (strategy == "group") != bool(group):
        raise read.error("group_size", f"{'a' if strategy == 'group' else 'no'} size for the strategy {strategy!r}")
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, group), "block": _block(read, "block_structure")}
    if strategy == "block" and blocks["block"] is None:
        raise read.error("block_structure", "two numbers for the strategy 'block'")
    levels: Literal["uint4", "int8", "e4m3"] = "e4m3" if floats else "uint4" if bits == 4 else "int8"
    ordered = layout == "packed" and read.values().get("actorder") in ("group", "dynamic", True)
    return Scheme("packed" if layout == "packed" else "scaled", levels, blocks[strategy], symmetric, ordered=ordered)


_NVFP4 = Scheme("modelopt", "e2m1", (1, 16))
_ALGORITHMS = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "FP8": Scheme("scaled", "e4m3", (0, 0)),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("scaled", "e4m3", (1, 0)),
    "FP8_PB_WO": Scheme("scaled", "e4m3", (128, 128)),
}


def _modelopt(read: ConfigReader) -> Quantization:
    """NVIDIA's ModelOpt: its hf_quant_config.json, or what config.json has of that."""
    own = read.section("quantization") if "quantization" in read else read
    known = "producer quantization quant_algo kv_cache_quant_algo kv_cache_scheme exclude_modules ignore config_groups"
    for each in (read, own):
        _only(each, "modelopt", f"{_TRAINING} {known} group_size")
    cached = _has_cached(own)
    name = str(own.values().get("quant_algo", "")).upper()
    if not name and cached:
        return Quantization("modelopt", (), cached=True)
    scheme = own.replaced(quant_algo=name or None).choice("quant_algo", "", _ALGORITHMS)
    groups = own.section("config_groups")
    for part in [own, *(groups.section(key).section("weights") for key in groups.values())]:
        if scheme is _NVFP4 and _group(part, "group_size", 16) != 16:
            raise part.error("group_size", f"16 for {name}")
        if part.values().get("num_bits", scheme.bits) != scheme.bits or part.values().get("type", "float") != "float":
            raise part.error("num_bits", f"{scheme.bits} of the type float for {name}")
    if name in ("NVFP4", "FP8"):
        _tell_static(read.name)
    return replace(_everywhere("modelopt", scheme), static=True, cached=cached)


_LOADED = ("load_in_4bit", "load_in_8bit")


def _bitsandbytes(read: ConfigReader) -> Quantization:
    """Dettmers et al. 2022, "LLM.int8()", arXiv 2208.07339, and 2023, "QLoRA", arXiv 2305.14314."""
    four = "bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage bnb_4bit_compute_dtype"
    eight = "llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight"
    _check_keys(read, f"{four} {eight} {' '.join(f'{key} _{key}' for key in _LOADED)}", "bitsandbytes")
    floats, whole = (read.flag(key, read.flag(f"_{key}", False)) for key in _LOADED)
    if floats == whole:
        raise read.error("load_in_4bit", "either it or load_in_8bit to be true")
    if whole:
        return _everywhere("bitsandbytes", Scheme("bnb8", "int8", (1, 0)))
    levels: dict[str, Literal["nf4", "fp4"]] = {"nf4": "nf4", "fp4": "fp4"}
    return _everywhere("bitsandbytes", Scheme("bnb4", read.choice("bnb_4bit_quant_type", "fp4", levels), None))


_METHODS: dict[str, Callable[[ConfigReader], Quantization]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "auto-round": _auto_round,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
}


def _everywhere(method: str, scheme: Scheme) -> Quantization:
    return Quantization(method, ((("Linear", "Embedding"), scheme),))


def _only(read: ConfigReader, method: str, known: str) -> None:
    """Of keys that ask for something and are not `known`: ModelError where the name changes numbers, else a warning."""
    others = read.others(known.split())
    for key in others:
        if _CHANGES.search(key):
            raise read.error(key, f"a checkpoint of {method} without it: it is not supported")
    if others:
        keys = ", ".join(map(shown, others[:5])) + (f" and {len(others) - 5} more" if others[5:] else "")
        warn_once(f"{read.name}: {keys} in quantization_config is not known, and taken for bookkeeping")


def _tell_static(name: str) -> None:
    warn_once(f"{name}: its static scales of activations are not used: activations keep 16 bits or more")


def _bits(read: ConfigReader, key: str, allowed: tuple[int, ...]) -> int:
    bits = read.whole(key)
    if bits not in allowed:
        raise read.error(key, " or ".join(str(each) for each in allowed))
    return bits


def _group(read: ConfigReader, key: str, default: int = 128) -> int:
    """Inputs that share a scale; 0 for all."""
    value = read.values().get(key, default)
    if value == -1 and type(value) is int:
        return 0
    group = read.whole(key, default)
    _check_group(read, key, group)
    return group


def _check_group(read: ConfigReader, key: str, group: int) -> None:
    if group < 16 or group & (group - 1):
        raise read.error(key, "groups of inputs of a power of two from 16 on, or -1 for whole rows")


def _block(read: ConfigReader, key: str) -> tuple[int, int] | None:
    """(outputs, inputs) that share a scale, None where there is no such key."""
    if key not in read:
        return None
    value = read.values()[key]
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise read.error(key, "two whole numbers")
    outs, ins = read.numbers(key, 2)
    _check_group(read, key, int(ins))
    return int(outs), int(ins)


def _texts(read: ConfigReader, key: str) -> tuple[str, ...]:
    values = read.values().get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise read.error(key, "a list of names")
    return tuple(values)


_MOST_PATTERNS = 64
_MOST_RULES = 4096


def _check_pattern(read: ConfigReader, key: str, text: str) -> None:
    """ModelError for a pattern, of those that "re:" begins, that is not safe to search for."""
    fault = pattern_fault(text)
    if fault:
        raise read.error(key, fault)
