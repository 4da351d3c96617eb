"""What stands in for several steps of transformers' modules computes the same, and only what is known is replaced."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.kernels import layers, torch_attention
from h2o_flexgen.kernels.native import why_not
from h2o_flexgen.models.hf import decoder
from h2o_flexgen.models.hf.build import Matrix, take_products
from h2o_flexgen.models.hf.decoder import ModuleDecoder
from h2o_flexgen.models.hf.fused import GatedMlp, Joint, _Rotation, take_gates, take_norms, take_rotations
from h2o_flexgen.models.hf.shrink import random_model, shrunk
from tests.engine.test_modules import tiny


class Mlp(nn.Module):
    """`limit`: what the activated gate is clamped to."""

    def __init__(self, activation: Any, limit: float | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.last, self.act = nn.Linear(12, 8), activation
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        activated = self.act(self.second(x))
        return self.last(self.first(x) * (activated if self.limit is None else activated.clamp(max=self.limit)))


def joint_of(mlp: Mlp) -> Joint:
    """Of its first two products, whose matrices are put side by side."""
    both = torch.cat([mlp.first.weight, mlp.second.weight]).detach()
    mlp.first.weight, mlp.second.weight = (nn.Parameter(half, requires_grad=False) for half in both.split(12))
    joint = Joint([mlp.first, mlp.second])
    joint.joined = joint.look()
    assert joint.joined is not None
    return joint


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(approximate="tanh"), nn.GELU(), nn.ReLU()])
def test_a_gated_mlp_is_known_by_what_it_computes(activation: nn.Module) -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(activation).eval(), torch.randn(1, 5, 8)
    with torch.inference_mode():
        wanted = mlp(x)
        take_products(mlp, None)
        take_gates(mlp, [joint_of(mlp)], [])
        assert isinstance(mlp.forward, GatedMlp)
        assert mlp(x) == pytest.approx(wanted, abs=1e-6)
        assert mlp.forward._gate is mlp.second
        mlp.forward._joint.joined = None  # type: ignore[union-attr]
        assert mlp(x) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("mlp", [Mlp(nn.SiLU(), limit=7.0), Mlp(nn.Tanh()), Mlp(nn.Identity())])
def test_another_mlp_is_left_alone(mlp: Mlp) -> None:
    take_gates(mlp, [], [])
    assert "forward" not in vars(mlp)


def test_joined_products_are_those_of_each() -> None:
    """In the order that was seen; forwards that come between each other get their own."""
    torch.manual_seed(0)
    mlp = Mlp(nn.SiLU())
    joint_of(mlp)
    first, second = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    weights = mlp.first.weight, mlp.second.weight
    for order in ([(0, first), (1, first)], [(0, first), (0, second), (1, first), (1, second)], [(1, second)]):
        for number, x in order:
            found = (mlp.first, mlp.second)[number](x)
            assert found == pytest.approx(x @ weights[number].T, abs=1e-6)


@pytest.mark.parametrize("size", [48, 256])
@pytest.mark.parametrize(
    "norm", [LlamaRMSNorm, Olmo2RMSNorm, Gemma2RMSNorm, nn.LayerNorm, lambda n, eps: nn.RMSNorm(n, eps=eps)]
)
def test_norms_are_known_by_what_they_compute(norm: Any, size: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(norm(size, eps=1e-5)).to(torch.bfloat16)
    x = torch.randn(1, 3, 2, size).to(torch.bfloat16)
    with torch.inference_mode():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(size))
        wanted = module(x).float()
        take_norms(module)
        found = module(x)
    assert "forward" in vars(module[0])
    assert found.shape == x.shape
    assert found.float() == pytest.approx(wanted, rel=1e-2, abs=1e-3)


def test_a_norm_of_another_kind_is_left_alone() -> None:
    class Halved(LlamaRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    module = nn.Sequential(Halved(64, eps=1e-5), nn.GroupNorm(4, 64), nn.Linear(64, 1))
    take_norms(module)
    assert not any("forward" in vars(each) for each in module)


@pytest.mark.parametrize(("kind", "joined"), [("llama", 3), ("gemma2", 3), ("olmo2", 3), ("deepseek_v3", 2)])
def test_products_of_one_tensor_are_one(kind: str, joined: int, tmp_path: Path) -> None:
    """Their matrices lie side by side in memory, wherever checkpoints have them."""
    tiny(kind).save_pretrained(tmp_path)
    with Engine(str(tmp_path), dtype="bfloat16", model_impl="transformers") as llm:
        llm.generate([[3, 5, 9]], max_new_tokens=2, ignore_eos=True)
        decoder, weights = llm._decoder, llm._loaded.stages[0].weights  # type: ignore[union-attr]
        assert isinstance(decoder, ModuleDecoder)
        (joint,) = decoder._joints[1]
        assert len(joint.modules) == joined
        with decoder.bound(1, weights.get(decoder.spec.units[1].weights)):
            assert joint.joined is not None
        assert joint.joined is None
        mlps = [each for each in decoder._model.modules() if isinstance(vars(each).get("forward"), GatedMlp)]
        assert len(mlps) == decoder.spec.num_layers


NATIVE = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class Rotates(nn.Module):
    """Asks transformers' function of a type, as its attention does."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        places = {"rotated": function}
        forward = FunctionType(Rotates.forward.__code__, places, "forward")
        self.forward = MethodType(forward, self)

    def forward(self, *given: Any, **others: Any) -> Any:
        return rotated(*given, **others)  # type: ignore[name-defined]  # noqa: F821


def rotation_of(kind: str) -> Callable[..., Any]:
    found: Callable[..., Any] = import_module(f"transformers.models.{kind}.modeling_{kind}").apply_rotary_pos_emb
    return found


@NATIVE
@pytest.mark.parametrize(
    ("kind", "some"),
    [
        *[
            ("llama", False),
            ("olmo2", False),
            ("stablelm", False),
            ("gpt_neox", True),
            ("phi3", True),
            ("gemma4", False),
        ],
        *[("modernbert_decoder", False), ("glm4_moe", True), ("gemma2", False), ("qwen3_moe", False)],
    ],
)
def test_rotations_are_known_by_what_they_compute(kind: str, some: bool) -> None:
    """Bit for bit where products are rounded; what the kernel does not take is transformers'."""
    torch.manual_seed(0)
    function, alone = rotation_of(kind), kind == "gemma4"
    module = Rotates(function)
    take_rotations(module)
    ours = module.forward.__func__.__globals__["rotated"]
    assert isinstance(ours, _Rotation)
    assert ours._some is some
    for dim in (32, 16) if some else (32,):
        for dtype in (torch.bfloat16, torch.float32):
            heads = [torch.randn(1, 7, count, 32).to(dtype).transpose(1, 2) for count in ((4,) if alone else (4, 2))]
            angles = [torch.randn(1, 7, dim).to(dtype) for _ in range(2)]
            for order, more in ((1, {}), (2, {"unsqueeze_dim": 2})):
                given = [each.transpose(1, 2) if order == 2 else each for each in heads]
                theirs, made = function(*given, *angles, **more), module(*given, *angles, **more)
                assert (ours.turned(given, *angles, order) is not None) == (dtype is torch.bfloat16)
                pairs = [(theirs, made)] if alone else list(zip(theirs, made, strict=True))
                for one, other in pairs:
                    assert other.dtype is one.dtype
                    assert other.shape == one.shape
                    assert (other == one).float().mean() > (0.98 if kind == "modernbert_decoder" else 0.9999)
                    torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-5)
    with pytest.raises((RuntimeError, TypeError)):
        module(*heads, torch.zeros(1, 7, 24), torch.zeros(1, 7, 20))


@pytest.mark.parametrize("kind", ["cohere2", "glm4", "gptj"])
def test_other_rotations_are_left_alone(kind: str) -> None:
    """Neighbours are turned together, or the arguments are others."""
    module = Rotates(rotation_of(kind))
    before = module.forward
    take_rotations(module)
    assert module.forward is before


class Left(TorchDispatchMode):
    """The products of bfloat16 numbers that are left to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[str]()

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if name in {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"} and args[0].dtype is torch.bfloat16:
            self.found.add(f"{name} of {[tuple(each.shape) for each in args if torch.is_tensor(each)]}")
        return function(*args, **(kwargs or {}))


@pytest.mark.skipif(why_not() is not None, reason=f"no native kernels: {why_not()}")
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "llama4_text", "qwen3_next"])
def test_no_product_of_bfloat16_numbers_is_left_to_torch_where_it_is_slow(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers and latents included: as processors without AVX-512 do."""
    for module in (decoder, layers, torch_attention):
        monkeypatch.setattr(module, "torch_widens", lambda: True)
    random_model(shrunk({"model_type": kind})).to(torch.bfloat16).save_pretrained(tmp_path)
    how: dict[str, Any] = {"dtype": "bfloat16", "model_impl": "transformers", "offload_dir": tmp_path}
    with Engine(str(tmp_path), **how) as engine, Left() as left:
        engine.generate([[5, 6, 7, 8, 9], [10, 11]], max_new_tokens=3, ignore_eos=True)
    assert left.found == set()


def test_a_routers_matrix_multiplies_however_linear_is_called() -> None:
    x, w, bias = (torch.randn(shape).bfloat16() for shape in ((3, 8), (5, 8), (5,)))
    matrix, linear = w.as_subclass(Matrix), nn.functional.linear
    for found in (linear(x, matrix, bias), linear(x, matrix, bias=bias), linear(input=x, weight=matrix, bias=bias)):
        torch.testing.assert_close(found, linear(x, w, bias), rtol=2**-7, atol=2**-7)
        assert type(found) is Tensor
