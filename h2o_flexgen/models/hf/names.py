"""What checkpoints call the tensors of transformers' modules."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from h2o_flexgen.config.model.modules import ModuleSpec
from h2o_flexgen.errors import ModelError
from h2o_flexgen.models.hf.build import build
from h2o_flexgen.models.stored import Names, Stored

IGNORED = (r"rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"\.attention\.(masked_)?bias$", r"position_ids$")
"""Regular expressions, to be searched for, of tensors that are in older checkpoints and are not weights."""


def checkpoint_names(spec: ModuleSpec) -> Names:
    """For every canonical tensor the names that it may have: as it is saved today, as the modules call it, and both
    without the name of the model inside. ModelError where tensors are joined or split while they are loaded."""
    model = build(spec.config, spec.name)
    renamings = _renamings(model, spec)
    prefix = f"{model.base_model_prefix}."
    found: Names = {}
    for each in spec.tensors.values():
        saved = each.parameter
        for renaming in reversed(renamings):
            saved = renaming.reverse_transform().rename_source_key(saved)[0]
        names = dict.fromkeys((saved, each.parameter, saved.removeprefix(prefix), each.parameter.removeprefix(prefix)))
        columns = each.shape[1] if each.transposed else 0
        shape = tuple(reversed(each.shape)) if each.transposed else ()
        stored = [Stored(name, ((0, columns),), columns, shape, True) if each.transposed else name for name in names]
        found[each.name] = tuple(stored)
    return found


def ignored_names(spec: ModuleSpec) -> tuple[str, ...]:
    """Regular expressions, to be searched for, of checkpoint tensors that are not weights and may be skipped."""
    model = build(spec.config, spec.name)
    return (*IGNORED, *(model._keys_to_ignore_on_load_unexpected or ()))


def _renamings(model: PreTrainedModel, spec: ModuleSpec) -> list[WeightRenaming]:
    found = []
    parameters = {each.parameter for each in spec.tensors.values()}
    for transform in get_model_conversion_mapping(model) or ():
        if isinstance(transform, WeightRenaming):
            found.append(transform)
            continue
        reverse = transform.reverse_transform()
        if any(reverse.rename_source_key(parameter)[1] is not None for parameter in parameters):
            raise ModelError(
                f"{spec.name}: {type(model).__name__} joins or splits tensors while they are loaded",
                "needed a model whose tensors are read as they are",
            )
    return found
