"""The mean squares of inputs are those that transformers' own layers get."""

from __future__ import annotations

import pytest
import torch

from h2o_flexgen.models.decoder import importance
from tests.models.reference import reference
from tests.tiny import FAMILIES

pytestmark = pytest.mark.usefixtures("no_gradients")


DENSE = [name for name, row in FAMILIES.items() if "num_experts_per_tok" not in row.settings]
"""Without experts."""


@pytest.mark.parametrize("name", DENSE)
def test_means_are_those_of_transformers_inputs(name: str) -> None:
    ref = reference(name)
    twice = torch.stack([ref.tokens, ref.tokens])
    found = importance(ref.spec, lambda group: {each.name: ref._tensor(each.name) for each in group.tensors}, twice)
    tensors = [each for group in ref.spec.weight_groups for each in group.tensors]
    assert found.keys() == {each.name for each in tensors if len(each.shape) == 2 and each.name.startswith("layers.")}
    for matrix, squares in found.items():
        torch.testing.assert_close(squares, ref.inputs[ref.module(matrix)].square().mean(0), rtol=1e-4, atol=1e-7)
