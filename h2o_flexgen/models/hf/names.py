"""The names that checkpoints have for the tensors of transformers' modules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TypeGuard

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
)

from h2o_flexgen.config.model.modules import ModuleSpec, ModuleTensor
from h2o_flexgen.errors import ModelError, required
from h2o_flexgen.models.hf.build import build
from h2o_flexgen.models.hf.experts import TEXT_ONLY
from h2o_flexgen.models.stored import Names, Stored

_TOWERS = r"^(model\.)?(vision_model|vision_tower|audio_tower|embed_vision|embed_audio|multi_modal_projector)\."
IGNORED = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$", r"position_ids$")
"""Regular expressions, to be searched for, of tensors that are in older checkpoints and are not weights."""


def _inside(name: str) -> tuple[str, str]:
    """The names that a tensor of a language model, made alone, may have in a model for images and text."""
    return f"language_model.{name}", f"model.language_model.{name.removeprefix('model.')}"


def checkpoint_names(spec: ModuleSpec) -> Names:
    """For every canonical tensor the names that it may have: as it is saved today, as the modules call it, and both
    without the name of the model inside. ModelError where tensors are joined or split while they are loaded."""
    model, renamings, converters = _transforms(spec)
    found: Names = {}
    for each in spec.tensors.values():
        if each.expert is not None:
            found[each.name] = _of_expert(each, model, renamings, converters)
            continue
        called = (each.piece,) if each.piece else (each.parameter, *each.also, *each.tied)
        names = _spelled(called, model, renamings)
        if each.piece:
            whole, span = _spelled([each.parameter], model, renamings), (each.start, each.start + each.shape[0])
            found[each.name] = (*names, *(Stored(name, (span,), each.rows) for name in whole))
        elif not each.transposed and (rows_of := _whole(spec, each, converters)) is not None:
            (source, span, rows) = rows_of
            all_of = _spelled([source], model, renamings)
            found[each.name] = (*names, *(Stored(name, (span,), rows) for name in all_of))
        else:
            names |= dict.fromkeys(inner for name in names for inner in _inside(name))
            columns = each.shape[1] if each.transposed else 0
            turned = (Stored(name, ((0, columns),), columns, each.shape[::-1], True) for name in names)
            found[each.name] = tuple(turned if each.transposed else names)
    return found


def _spelled(names: Iterable[str], model: PreTrainedModel, renamings: list[WeightRenaming]) -> dict[str, None]:
    """The names that tensors may have which modules call `names`: as they are saved, as modules call them, and both
    without the name of the model inside."""
    both = [name for one in dict.fromkeys(names) for name in (*_saved(one, renamings), one)]
    return dict.fromkeys([*both, *(name.removeprefix(f"{model.base_model_prefix}.") for name in both)])


def pieces(model: PreTrainedModel) -> dict[str, tuple[tuple[str, int], ...]]:
    """The parameters of which checkpoints keep each of several pieces as a tensor of its own: the names that modules
    would have for the pieces, and the rows of each, one behind another."""
    found = dict[str, tuple[tuple[str, int], ...]]()
    converters = [each for each in get_model_conversion_mapping(model, add_legacy=False) or () if _joins(each)]
    for name, tensor in model.named_parameters() if converters else ():
        for converter in converters:
            sources, target = converter._original_source_patterns, f".{converter._original_target_patterns[0]}"
            if name.endswith(target):
                parts = [f"{name.removesuffix(target)}.{source}" for source in sources]
                rows = _rows_of(model, parts, name, len(tensor))
                if rows is not None:
                    found[name] = tuple(zip(parts, rows, strict=True))
    return found


def _rows_of(model: PreTrainedModel, parts: list[str], name: str, rows: int) -> list[int] | None:
    """The rows of pieces that make up the `rows` of a parameter: as many as the products have that they follow
    ("q_conv1d" and "q_proj"), or all the same; None where neither can be."""
    inner, modules = name.split(".")[-2], dict(model.named_modules())
    followed = [f"{part.rpartition('.')[0].removesuffix(inner)}proj" for part in parts]
    sizes = [getattr(modules.get(path), "out_features", 0) for path in followed]
    if sum(sizes) == rows and all(sizes):
        return sizes
    return None if rows % len(parts) else [rows // len(parts)] * len(parts)


def _of_rows(converter: object, *kinds: str) -> TypeGuard[WeightConverter]:
    """Whether all that it does is an operation of one of these kinds on rows of tensors that plain words name."""
    if not isinstance(converter, WeightConverter):
        return False
    patterns = (*converter._original_source_patterns, *converter._original_target_patterns)
    rows = [type(each).__name__ in kinds and getattr(each, "dim", None) == 0 for each in converter.operations or []]
    return rows == [True] and all(re.fullmatch(r"[\w.]+", pattern) for pattern in patterns)


def _joins(converter: object) -> TypeGuard[WeightConverter]:
    """Whether it makes one tensor of the rows of several."""
    return _of_rows(converter, "Concatenate") and len(converter._original_source_patterns) > 1


def _splits(converter: object) -> bool:
    """Whether it makes several tensors of the rows of one."""
    return _of_rows(converter, "Chunk", "Split")


def ignored_names(spec: ModuleSpec) -> tuple[str, ...]:
    """Regular expressions, to be searched for, of checkpoint tensors that are not weights and may be skipped."""
    model, renamings, converters = _transforms(spec)
    used = {name for each in spec.tensors.values() for name in (each.parameter, *each.also, *each.tied)}
    unused = [name for name in model.state_dict() if name not in used]
    called = [name for each in unused for name in (each, *_saved(each, renamings))]
    alone = json.loads(spec.config)["model_type"] in TEXT_ONLY
    return (
        *IGNORED,
        *((_TOWERS,) if alone else ()),
        *(model._keys_to_ignore_on_load_unexpected or ()),
        # Of what is not used matrices may be quantised, too.
        *(rf"^{re.escape(name.removesuffix('.weight'))}(\.|$)" for name in dict.fromkeys(called)),
        *_spare(spec, model, converters),
    )


def _spare(spec: ModuleSpec, model: PreTrainedModel, converters: list[WeightConverter]) -> dict[str, None]:
    """Regular expressions of tensors that experts do not use: LongCat-Flash's without weights have some rows."""
    count, found = 0 if spec.arch.experts is None else spec.arch.experts.count, dict[str, None]()
    for each in (each for each in spec.tensors.values() if each.expert == 0):
        more = range(count, _rows_in_all(each, model.get_parameter(each.parameter).shape) // each.rows)
        for converter in converters if more else ():
            if each.parameter.endswith(_plain(converter._original_target_patterns[0])):
                for source in converter._original_source_patterns:
                    name = re.escape(_plain(source).rstrip("$"))
                    found[name.replace(r"\*", f"(?:{'|'.join(map(str, more))})") + "$"] = None
    return found


def _whole(
    spec: ModuleSpec, each: ModuleTensor, converters: list[WeightConverter]
) -> tuple[str, tuple[int, int], int] | None:
    """The tensor that a parameter is rows of in checkpoints: its name, which rows, and how many it has in all."""
    shapes = {other.parameter: other.shape for other in spec.tensors.values()}
    for converter in filter(_splits, converters):
        targets = converter._original_target_patterns
        mine = next((target for target in targets if target in each.parameter), None)
        if mine is None:
            continue
        sizes = [shapes.get(each.parameter.replace(mine, target), (0,))[0] for target in targets]
        if 0 in sizes or (type(converter.operations[0]) is Chunk and len(set(sizes)) > 1):
            raise ModelError(f"{spec.name}: {each.parameter} is part of a tensor of which other parts are not known")
        start, source = sum(sizes[: targets.index(mine)]), converter._original_source_patterns[0]
        return each.parameter.replace(mine, source), (start, start + each.shape[0]), sum(sizes)
    return None


def _of_expert(
    each: ModuleTensor, model: PreTrainedModel, renamings: list[WeightRenaming], converters: list[WeightConverter]
) -> tuple[Stored, ...]:
    """An expert's matrix: of its own, as on the hub, or rows of one tensor for all experts."""
    expert, names = required(each.expert, "the tensor is of no expert"), dict[str, None]()
    for converter in converters:
        target = _plain(converter._original_target_patterns[0])
        if each.parameter.endswith(target) and [type(op) for op in converter.operations] in _MERGED:
            sources = [_plain(source) for source in converter._original_source_patterns]
            source = sources[0 if each.start == 0 else 1] if len(sources) > 1 else sources[0]
            names[each.parameter.removesuffix(target) + source.replace("*", str(expert)).rstrip("$")] = None
    first, shape = expert * each.rows + each.start, tuple(model.get_parameter(each.parameter).shape)
    span = ((first, first + (each.rows if each.transposed else each.shape[0])),)
    joined = [*_spelled([each.parameter], model, renamings), *_inside(each.parameter)]
    all_of = (Stored(name, span, _rows_in_all(each, shape), shape, each.transposed) for name in joined)
    return tuple(dict.fromkeys([*map(Stored, _spelled(names, model, renamings)), *all_of]))


def _rows_in_all(each: ModuleTensor, shape: Sequence[int]) -> int:
    """All rows of the parameter, of this shape, of which an expert's part is some: of a bias, all its numbers."""
    return math.prod(shape if len(each.shape) == 1 else shape[:-1])


def _plain(pattern: str) -> str:
    """A name with a star for a number, of which some dots are escaped."""
    return pattern.replace(r"\.", ".")


_MERGED = ([MergeModulelist], [MergeModulelist, Concatenate])


def _saved(parameter: str, renamings: list[WeightRenaming]) -> list[str]:
    """The names by which transformers saves a parameter, or may have saved it before."""
    found = []
    plain = [each for each in renamings if not isinstance(each, PrefixChange)]
    for some in (plain, renamings):
        name = parameter
        for renaming in reversed(some):
            name = renaming.reverse_transform().rename_source_key(name)[0]
        found.append(name)
    return found


@lru_cache(maxsize=1)  # each model's are asked for twice, and making the modules takes longest
def _transforms(spec: ModuleSpec) -> tuple[PreTrainedModel, list[WeightRenaming], list[WeightConverter]]:
    """The modules, and how their tensors are renamed, or converted of experts or into rows; others are refused."""
    model = build(spec.config, spec.name, alone=bool(spec.alone))
    nn.Module.to(model, "meta")  # of buffers, no numbers stay
    found, converters = list[WeightRenaming](), list[WeightConverter]()
    parameters = {each.parameter for each in spec.tensors.values() if each.expert is None and not each.piece}
    for transform in get_model_conversion_mapping(model, add_legacy=False) or ():
        if isinstance(transform, WeightRenaming):
            found.append(transform)
            continue
        if isinstance(transform, WeightConverter):
            converters.append(transform)
        if isinstance(transform, WeightConverter) and _splits(transform):
            continue
        reverse = transform.reverse_transform()
        if any(reverse.rename_source_key(parameter)[1] is not None for parameter in parameters):
            raise ModelError(
                f"{spec.name}: {type(model).__name__} joins or splits tensors while they are loaded",
                "needed a model whose tensors are read as they are",
            )
    return model, found, converters
