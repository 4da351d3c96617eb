"""The model families, by the model_type of their config.json. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models import corrected, gemma, gpt_oss, llama, mistral, nested, olmo, opt, projections, qwen
from h2o_flexgen.models.fields import ConfigReader
from h2o_flexgen.models.llama_like import DEFAULTS, LlamaLike
from h2o_flexgen.models.quantized import read_quantization
from h2o_flexgen.models.stored import Names
from h2o_flexgen.registry import Registry

_MODULES = (corrected, gemma, gpt_oss, llama, mistral, olmo, opt, projections, qwen)
_ORDER = ("opt", *DEFAULTS)
FAMILIES: Registry[LlamaLike] = Registry("model family", ModelError)
_MADE = (each for module in _MODULES for each in module.FAMILIES)
for _family in sorted(_MADE, key=lambda each: _ORDER.index(each.family)):
    FAMILIES.register(_family.family, _family)


def family_of(config: Mapping[str, Any], name: str) -> LlamaLike:
    """The family of a config.json; ModelError for one that is not supported, with the list of those that are."""
    model_type = config.get("model_type")
    supported = ", ".join(FAMILIES.names())
    if not isinstance(model_type, str):
        raise ModelError(f"{name}: config.json has no model_type", f"needed one of {supported}")
    if model_type not in FAMILIES:
        raise ModelError(
            f"{name} is of the family {model_type!r}, which is not supported", f"needed one of {supported}"
        )
    return FAMILIES.get(model_type)


UNDONE = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys that ask for experts."""


def spec_from_config(config: Mapping[str, Any], name: str, impl: str = "native") -> ModelSpec:
    """The ModelSpec of a config.json; ModelError for what it asks and is not done.

    `impl`: "native" for the families here, "transformers" for transformers' own modules, which are imported, or "auto"
    for these where there is no family.
    """
    if by_modules(config, name, impl):
        return _spec_of_modules(config, name)
    text = nested.text_config(config, name)
    if text is not None and text["model_type"] in FAMILIES:
        spec = spec_from_config(text, name)
        return replace(spec, arch=replace(spec.arch, nested=True))
    family, read = family_of(config, name), ConfigReader(config, name)
    if not read.flag("is_causal", True):
        raise read.error("is_causal", "true: here tokens attend only to those before them")
    if not family.experts:
        read.refuse(UNDONE)
    read_quantization(config, name)
    return family.spec_from_config(read)


def check_config(config: Mapping[str, Any], name: str, impl: str) -> None:
    """ModelError for what `spec_from_config` refuses, as far as that is seen without torch, whose import takes seconds:
    all that a family refuses, and types that transformers has never heard of."""
    if not by_modules(config, name, impl):
        spec_from_config(config, name)
    elif not _in_transformers(config["model_type"]):
        raise _unknown(config["model_type"], name)


def by_modules(config: Mapping[str, Any], name: str, impl: str) -> bool:
    """Whether transformers' modules compute this model."""
    if impl != "auto":
        return impl == "transformers" and isinstance(config.get("model_type"), str)
    kind = (nested.text_config(config, name) or config).get("model_type")
    return isinstance(kind, str) and kind not in FAMILIES


def _in_transformers(kind: str) -> bool:
    """Whether transformers' tables of types have `kind` anywhere: their text is searched, since importing them imports
    torch. True where there is no such text."""
    found = importlib.util.find_spec("transformers")
    folders = (found.submodule_search_locations or []) if found else []
    tables = [path for folder in folders for path in Path(folder, "models/auto").glob("*.py")]
    return not tables or any(f'"{kind}"' in path.read_text(encoding="utf-8") for path in tables)


def _unknown(kind: str, name: str) -> ModelError:
    return ModelError(
        f"{name} is of the family {kind!r}, which is not supported, and transformers has no decoder of that type",
        f"needed one of {', '.join(FAMILIES.names())}, or a type that AutoModelForCausalLM makes",
    )


def _spec_of_modules(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Packed where that is known to be right, else by rows. Untested where neither is known."""
    from h2o_flexgen.models.hf.build import model_types
    from h2o_flexgen.models.hf.record import spec_of
    from h2o_flexgen.models.hf.rows import spec_of_rows
    from h2o_flexgen.models.hf.trusted import Untested, tested, under_test, way_of

    kind = config["model_type"]
    if kind not in model_types():
        raise _unknown(kind, name)
    read_quantization(config, name)
    way, refused = way_of(config), ""
    if way is not None and way.how == "packed":
        try:
            return spec_of(config, name)
        except ModelError as error:
            if under_test():
                raise
            # This one is not as others of its type are.
            way, refused = tested(config), error.found
    if way is None or way.how == "packed":
        raise Untested(refused or f"{name} is of the type {kind!r}, which is not among those that were tried")
    if way.how == "refused":
        raise ModelError(f"{name} is of the family {kind!r}, which is not supported: {way.why}")
    return spec_of_rows(config, name, way.why)


def checkpoint_names(spec: ModelSpec) -> Names:
    """For every canonical tensor of `spec` where a checkpoint may keep it, the usual place first."""
    if isinstance(spec, ModuleSpec):
        from h2o_flexgen.models.hf import names

        return names.checkpoint_names(spec)
    found = FAMILIES.get(spec.arch.family).checkpoint_names(spec)
    return nested.within(found) if spec.arch.nested else found


def ignored_names(spec: ModelSpec) -> tuple[str, ...]:
    """Regular expressions, to be searched for, of checkpoint tensors that are not weights and may be skipped."""
    if isinstance(spec, ModuleSpec):
        from h2o_flexgen.models.hf import names

        return names.ignored_names(spec)
    behind = "|".join(map(str, range(spec.num_layers, spec.num_layers + spec.arch.predicting)))
    return (
        *FAMILIES.get(spec.arch.family).ignored,
        # Layers that predict more tokens at once stand behind the model's own.
        *([] if not behind else [rf"^model\.layers\.({behind})\."]),
        *(nested.IGNORED if spec.arch.nested else ()),
    )
