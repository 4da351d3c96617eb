"""A stand-in for CUDA graphs on the CPU: what a step launches, noted down and done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from h2o_flexgen.engine.execution.cuda_graphs import Read, Result, Run

HOST_WORK = {"lift_fresh", "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal"}
"""Operations that on a GPU send it numbers of the host, or wait for numbers of its own."""

BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Those that wait where an index is a mask, to know how many it picks."""


class NoHostWork(TorchDispatchMode):
    """Refuses operations that make tensors of Python's numbers, or Python's numbers of tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        masks = [x for x in tree_leaves(args[1:]) if isinstance(x, Tensor) and x.dtype is torch.bool]
        if name in HOST_WORK or (name in BY_INDEX and masks):
            raise RuntimeError(f"{func} sends the device something, or waits for it")
        return func(*args, **(kwargs or {}))


class Tape(NoHostWork):
    """Notes torch's operations and Triton's launches. They are done, as there is no other way to know what they return;
    `undo` restores what they wrote to, so that it is as if they had only been noted."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], None]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value, argument in zip([*args, *kwargs.values()], func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        self._keep(kwargs.get("out"))
        made = super().__torch_dispatch__(func, types, args, kwargs)

        def again() -> None:
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)

        self._steps.append(again)
        return made

    def launch(self, run: Callable[[], None], arguments: Any) -> None:
        """A kernel of Triton, which may write to all its arguments."""
        with _disable_current_modes():
            self._keep(*tree_leaves(arguments))
            run()
        self._steps.append(run)

    def undo(self) -> None:
        """Everything that was there before is as it was."""
        for tensor, before in reversed(self._before):
            tensor.copy_(before)

    def play(self) -> None:
        """All of it again, with the numbers that are now in the tensors."""
        for step in self._steps:
            step()

    def _keep(self, *values: Any) -> None:
        self._before.extend((value, value.clone()) for value in values if isinstance(value, Tensor))


@contextmanager
def taping(tape: Tape) -> Iterator[None]:
    """What happens meanwhile, Triton's launches in its interpreter included, goes onto the tape."""
    from triton.runtime.interpreter import InterpretedFunction

    original = InterpretedFunction.run

    def run(kernel: Any, *args: Any, **options: Any) -> None:
        tape.launch(lambda: original(kernel, *args, **options), args)

    InterpretedFunction.run = run
    try:
        with tape:
            yield
    finally:
        InterpretedFunction.run = original


class FakeGraph:
    """A `CudaGraph` by a tape. `log` takes what is done with it."""

    def __init__(self, log: list[str]) -> None:
        self._log, self._tape = log, Tape()

    def warm_up(self, run: Run) -> Result:
        self._log.append("warm up")
        with NoHostWork():
            return run()

    def record(self, run: Run) -> Result:
        self._log.append("record")
        with taping(self._tape):
            result = run()
        self._tape.undo()
        for tensor in result:
            tensor.fill_(torch.nan)
        return result

    def replay(self) -> None:
        self._log.append("replay")
        self._tape.play()

    def fetch(self, numbers: Tensor) -> Read:
        copy = numbers.clone()  # once more is launched, there are others

        def read() -> Tensor:
            self._log.append("read")
            return copy

        return read

    def close(self) -> None:
        self._log.append("close")
