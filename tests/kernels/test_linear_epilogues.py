"""Products that end with ReLU, or are added to a residual, in the GPU's way: on a CPU, where torch can do them, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.kernels import layers
from tests.seeds import moved


class Operations(TorchDispatchMode):
    """The names of what is computed, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in ("t", "view", "detach"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def done(options: dict[str, Any], *, fused: bool, dtype: torch.dtype) -> tuple[torch.Tensor, list[str]]:
    torch.manual_seed(moved(0))
    x, weight, bias, onto = (torch.randn(*size).to(dtype) for size in ((5, 24), (16, 24), (16,), (9, 16)))
    given = {"bias": bias, "onto": onto[2:7], "relu": True}
    arguments = {name: given[name] for name in options}
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), Operations() as operations:
        patch.setattr(layers, "library", lambda: None)
        patch.setattr(layers, "_has_epilogues", lambda x: fused)
        y = layers.linear(x, weight, **arguments)
    if "onto" in options:
        assert y.data_ptr() == onto[2:7].data_ptr(), "in place"
    return y, operations.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "operations"),
    [
        (("onto",), ["addmm_"]),
        (("bias", "relu"), ["_addmm_activation"]),
        (("bias", "onto"), ["linear", "add_"]),
        (("bias",), ["linear"]),
        (("relu",), ["linear", "relu_"]),
        ((), ["linear"]),
    ],
    ids=str,
)
def test_one_operation_does_it_all(options: tuple[str, ...], operations: list[str], dtype: torch.dtype) -> None:
    y, names = done(options, fused=True, dtype=dtype)
    plain, _ = done(options, fused=False, dtype=dtype)
    assert names == operations
    # One rounding less: of a product up to 8, of which what it is added to may leave little.
    exact = dtype is torch.float32
    torch.testing.assert_close(y, plain, rtol=1.3e-6 if exact else 2**-6, atol=1e-5 if exact else 2**-5)


def test_on_a_cpu_nothing_changes() -> None:
    assert done(("bias", "relu"), fused=layers._has_epilogues(torch.empty(1)), dtype=torch.float32)[1] == [
        "linear",
        "relu_",
    ]
