"""Tells a fake device what torch and the threads of the host do, so that its races can be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from h2o_flexgen.engine.execution import host_attention
from h2o_flexgen.kernels import layers
from h2o_flexgen.memory import device_copies
from h2o_flexgen.memory.disk import DirectFile
from h2o_flexgen.memory.transfers import Operation, Ticket, Workers, WorkQueue
from tests.memory.fake_cuda import FakeDevice, extent
from tests.memory.races import Clock


class Computes(TorchDispatchMode):
    """Tells devices of every tensor that torch's operations read and write on this thread."""

    def __init__(self, *devices: FakeDevice) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        roles, made, touched = _roles(func), None, set()
        for name, value in [*zip(roles, args, strict=False), *(kwargs or {}).items()]:
            alias = roles[name]
            for tensor in _tensors(value):
                if alias == VIEWED:
                    made = {_storage(each) for each in _tensors(out)} if made is None else made
                    if _storage(tensor) in made:
                        continue
                owner = next((device for device in self._devices if device.owns(tensor)), None)
                if owner is not None:
                    touched.add(owner.name)
                (owner or self._devices[0]).computed(tensor, alias == WRITTEN, str(func))
        if len(touched) > 1:
            self._devices[0].races.found.append(f"{func} on memory of two devices")
        return out


READ, WRITTEN, VIEWED = range(3)


@cache
def _roles(func: Any) -> dict[str, int]:
    """By the name of an argument: what the operation does to it. VIEWED: the result may lie in its memory."""
    arguments = func._schema.arguments
    return {
        each.name: READ if each.alias_info is None else WRITTEN if each.alias_info.is_write else VIEWED
        for each in arguments
    }


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return ()


def order_threads(device: FakeDevice, patch: pytest.MonkeyPatch) -> None:
    """Teaches the races what threads know of each other: by tickets, and by work that is handed over."""
    races = device.races
    told: dict[int, Clock] = {}  # by what the clock belongs to; nothing that is told of goes before the test ends
    alive: list[object] = []

    def tell(thing: object) -> None:
        alive.append(thing)
        clock = told.setdefault(id(thing), {})
        for actor, step in races.release(races.host()).items():
            clock[actor] = max(step, clock.get(actor, 0))

    def hear(thing: object) -> None:
        races.acquire(races.host(), told.get(id(thing), {}))

    def around(owner: Any, name: str, before: Callable[..., Any] | None, after: Callable[..., Any] | None) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **settings: Any) -> Any:
            if before is not None:
                before(*args, **settings)
            result = inner(*args, **settings)
            if after is not None:
                after(result, *args)
            return result

        patch.setattr(owner, name, call)

    def claimed(claim: tuple[Ticket, Operation] | None, *_: object) -> None:
        if claim is not None:
            ticket, _operation = claim
            for thing in (ticket, *ticket.after):
                hear(thing)

    def settled(_: object, queue: WorkQueue, ticket: Ticket, *rest: object) -> None:
        tell(ticket)

    def resolved(ticket: Ticket, error: Any) -> None:
        tell(ticket)

    def submitted(_: object, queue: str, ticket: Ticket, threads: int = 1) -> None:
        tell(ticket)

    around(Workers, "submit", submitted, None)
    around(Workers, "_claim", None, claimed)
    around(Workers, "_settle", settled, None)
    around(Workers, "_finish", lambda _, ticket: hear(ticket), None)
    around(Workers, "drain", None, lambda *_: races.meet(races.host()))
    around(Workers, "close", None, lambda *_: races.meet(races.host()))
    around(Ticket, "resolve", resolved, None)
    around(Ticket, "wait", None, lambda _, ticket, *rest: hear(ticket))
    around(Ticket, "wait_issued", None, lambda _, ticket: hear(ticket))
    around(Ticket, "issued", None, lambda there, ticket: hear(ticket) if there else None)

    def file(name: str, write: bool) -> None:
        def note(_: object, view: Any, at: int, offset: int, nbytes: int, what: str) -> None:
            races.access(races.host(), view.address + at, nbytes, write, f"{name} of {what}")

        around(DirectFile, name, note, None)

    file("read", True)
    file("write", False)

    def moved(dst: Tensor, src: Tensor) -> None:
        for tensor, write in ((dst, True), (src, False)):
            races.access(races.host(), *extent(tensor), write, "a move on the host")

    around(device_copies, "move", moved, None)

    attend = host_attention._attend

    def attended(attention: Any, parts: list[Tensor], answer: Tensor) -> None:
        for part in parts:  # kernels in C read them unseen
            device.computed(part, False, "attention on the host")
        with Computes(device):
            attend(attention, parts, answer)

    patch.setattr(host_attention, "_attend", attended)
    fill = host_attention._fill

    def filled(*what: Any) -> None:
        with Computes(device):
            fill(*what)

    patch.setattr(host_attention, "_fill", filled)


@contextmanager
def watched(*devices: FakeDevice) -> Iterator[None]:
    """What torch computes on this thread meanwhile is the compute of the device whose memory it is on."""
    with pytest.MonkeyPatch.context() as patch, Computes(*devices):
        patch.setattr(layers, "_WIDE_ROWS", 0)  # what C reads is not seen
        yield
