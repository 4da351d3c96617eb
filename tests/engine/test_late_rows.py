"""Sequences that come while others run: they join blocks where they fit, and change nothing of any result."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.sampling import SamplingParams
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.requests.reader import Request
from h2o_flexgen.engine.requests.sequence import RequestOutput, Sequence
from h2o_flexgen.errors import PlanError
from tests.engine.ragged import run as _run
from tests.tiny import prompts_of

LATE = 1000


class Visitors:
    """Late rows: each is there once `after` results of any kind have come."""

    def __init__(self, rows: dict[int, Sequence], results: list[int]) -> None:
        self._coming, self._results = deque(sorted(rows.items())), results
        self._here: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self.outputs: dict[int, RequestOutput] = {}
        self.failed: list[str] = []
        self.fitted = 0

    @property
    def left(self) -> bool:
        return bool(self._here)

    def take(self, most: int, fits: Callable[[Sequence], bool]) -> list[Sequence]:
        while self._coming and self._coming[0][0] <= len(self._results):
            self._here.append(self._coming.popleft()[1])
        taken = [row for row in self._here if fits(row)][:most]
        self.fitted += most < LATE and len(taken)
        self._here = [row for row in self._here if row not in taken]
        self.running |= {row.row_id: row for row in taken}
        return taken

    def finished(self, row: Sequence, output: RequestOutput) -> bool:
        self._results.append(row.row_id)
        if self.running.pop(row.row_id, None) is None:
            return False
        self.outputs[row.row_id] = output
        return True

    def fail(self, rows: Iterable[Sequence], message: str, code: str) -> None:
        for row in rows:
            del self.running[row.row_id]
            self.failed.append(message)

    def again(self, rows: Iterable[Sequence] | None = None) -> None:
        for row in list(self.running.values() if rows is None else rows):
            if self.running.pop(row.row_id, None) is not None:
                self._here.append(row)


def _rows(llm: Engine, first: int, lengths: list[int], new: list[int]) -> list[Sequence]:
    rows = []
    for number, (prompt, count) in enumerate(zip(prompts_of(lengths), new, strict=True)):
        params = SamplingParams(max_new_tokens=count, ignore_eos=True, do_sample=number % 2 == 1, seed=number)
        rows += llm.read(Request(prompt, params, first + number))
    return rows


@pytest.mark.parametrize(("tier", "eviction"), [("cpu", EvictionConfig()), ("disk", EvictionConfig("h2o", ratio=0.4))])
def test_late_rows_join_and_change_nothing(tier: str, eviction: EvictionConfig, checkpoint: Any) -> None:
    """Short ones at the next change, one that is too long by itself once the block has come to its end."""
    lengths, new = [20, 12, 17, 9, 14, 20, 11, 8, 13, 16], [9, 4, 7, 3, 9, 2, 6, 8, 5, 9]
    late, late_new = [10, 40, 18, 7], [5, 12, 9, 3]
    with _run(checkpoint("opt")[1], eviction, (2, 1), tier) as llm:
        alone = {row.row_id: output.token_ids for row, output in llm.run(_rows(llm, 0, lengths, new))}
        alone |= {row.row_id: output.token_ids for row, output in llm.run(_rows(llm, LATE, late, late_new))}
        results: list[int] = []
        coming = dict(zip((1, 2, 4, 8), _rows(llm, LATE, late, late_new), strict=True))
        llm.late = visitors = Visitors(coming, results)
        found = {row.row_id: output.token_ids for row, output in llm.run(_rows(llm, 0, lengths, new))}
        order = [number >> 16 for number in results]
        found |= {row_id: output.token_ids for row_id, output in visitors.outputs.items()}
        assert found == alone
        assert visitors.fitted == 2, "the last one found the block at its end"
        own = [number for number in order if number < LATE]
        assert sorted(own) == list(range(10))
        assert order[-1] < LATE, "they do not wait for the end"
        assert order.index(LATE) < order.index(LATE + 1) < order.index(LATE + 3)


APART = EvictionConfig("h2o", ratio=0.4, far_layers=((0, 1), (2, 0)))


@pytest.mark.parametrize("bits", [16, (4, 8)])
@pytest.mark.parametrize("eviction", [EvictionConfig(), APART], ids=["full", "apart"])
def test_late_rows_take_places_that_were_given_up(bits: Any, eviction: EvictionConfig, checkpoint: Any) -> None:
    """Caches that move between tiers have become smaller by then: they grow again."""
    lengths, new, late, late_new = [20, 12, 17, 9], [3, 3, 12, 14], [10, 18], [5, 9]
    with _run(checkpoint("llama-gqa")[1], eviction, (4, 1), "disk", cache_bits=bits) as llm:
        rows = [*_rows(llm, 0, lengths, new), *_rows(llm, LATE, late, late_new)]
        alone = {row.row_id: output.token_ids for each in rows for row, output in llm.run([each])}
        results: list[int] = []
        coming = dict(zip((2.5, 3), _rows(llm, LATE, late, late_new), strict=True))
        llm.late = visitors = Visitors(coming, results)  # type: ignore[arg-type]
        found = {row.row_id: output.token_ids for row, output in llm.run(_rows(llm, 0, lengths, new))}
        found |= {row_id: output.token_ids for row_id, output in visitors.outputs.items()}
        assert found == alone


def test_late_rows_that_are_too_large_for_memory_fail_alone(checkpoint: Any) -> None:
    """The others of their call go on; what was stopped in the middle waits again."""
    with _run(checkpoint("opt")[1], EvictionConfig(), (2, 1)) as llm:
        planner = llm.planner

        def small(request: Any) -> Any:
            if request.workload.prompt_len > 30:
                raise PlanError("a prompt is too long:")
            return planner(request)

        llm.planner = small
        results: list[int] = []
        late = dict(zip((1, 1.5), _rows(llm, LATE, [40, 9], [3, 5]), strict=True))
        llm.late = visitors = Visitors(late, results)  # type: ignore[arg-type]
        assert len(list(llm.run(_rows(llm, 0, [20, 12, 17, 9], [6, 4, 7, 3])))) == 4
        assert visitors.failed == ["a prompt is too long"]
        assert [len(output.token_ids) for output in visitors.outputs.values()] == [5]
        results.clear()
        (row,) = _rows(llm, LATE + 9, [9], [9])
        llm.late = visitors = Visitors({0: row}, results)
        running = llm.run(_rows(llm, 0, [12, 12, 12, 12], [9, 9, 4, 4]))
        assert sum(1 for _ in zip(range(3), running, strict=False)) == 3
        assert row.row_id in visitors.running
        running.close()
        assert visitors.left
        assert not visitors.running
