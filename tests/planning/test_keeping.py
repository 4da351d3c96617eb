"""A plan that a search chose serves later calls, too: while it fits, and while another search finds nothing better."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_flexgen import LLM
from h2o_flexgen.config.eviction import EvictionConfig
from h2o_flexgen.config.workload import Workload
from h2o_flexgen.cost.search import search
from h2o_flexgen.planning import planner
from h2o_flexgen.planning.planner import SearchPlanner
from h2o_flexgen.schedule.request import PlanRequest
from h2o_flexgen.units import GIB, MIB
from tests.cost.machines import profile
from tests.cost.test_search import AMPLE, ask
from tests.tiny import make_opt, prompts_of, save

TIGHT = {"gpu": 8 * MIB, "cpu": 12 * MIB, "disk": GIB}


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """The workloads that were searched for."""
    found: list[Workload] = []

    def count(request: PlanRequest) -> Any:
        found.append(request.workload)
        return search(request)

    monkeypatch.setattr(planner, "search", count)
    return found


def test_calls_that_are_alike_are_planned_by_one_search(searched: list[Workload], tmp_path) -> None:
    folder = str(save(make_opt(), tmp_path))
    with LLM(folder, hardware=profile(dtype="float32")) as llm:
        for lengths, new in (([9, 20, 4], 6), ([30, 5, 7], 12), ([8], 3)):
            llm.generate(prompts_of(lengths), max_new_tokens=new, ignore_eos=True)
            record = llm.last_record
            assert record.policy["chosen"] == "search"
            assert record.policy["gpu_batch_size"] == len(lengths)
            assert record.predicted["generated_tokens"] == new * len(lengths), "what is expected is of this call"
            assert record.peak_bytes["cpu"] <= llm.last_plan.footprint.total("cpu")
        assert len(searched) == 1
        llm.generate(prompts_of([5] * 9), max_new_tokens=3)
        assert len(searched) == 2, "there is more work than was planned for"


LENGTHS = [(24, 8), (90, 30), (4, 2)]
CALLS = {
    "ample-cpu": (AMPLE, "cpu", [*(Workload(*each, 12) for each in LENGTHS), Workload(24, 8, 5)], 1),
    "ample-gpu": (AMPLE, "gpu", [*(Workload(*each, 12) for each in LENGTHS), Workload(30, 9, 1)], 1),
    "tight": (TIGHT, "cpu", [Workload(24, 8, 12), Workload(26, 8, 12), Workload(22, 8, 12), Workload(60, 8, 12)], 2),
}


@pytest.mark.parametrize(("caps", "tier", "works", "searches"), CALLS.values(), ids=CALLS)
def test_a_search_finds_nothing_much_better(
    caps: Any, tier: str, works: Any, searches: int, searched: list[Workload]
) -> None:
    plans = SearchPlanner(profile)
    for work in works:
        request = ask(tier, caps, workload=work, eviction=EvictionConfig("h2o", ratio=0.4), profile=None)
        plan = plans(request)
        kept, best = plan.predicted, search(ask(tier, caps, workload=work, eviction=request.eviction)).best.prediction
        assert plan.request.workload == work
        assert kept["prefill_s"] + kept["decode_s"] <= 1.06 * (best.prefill_s + best.decode_s), work
    assert len(searched) == searches


def test_what_is_searched_for_anew(searched: list[Workload]) -> None:
    plans, other = SearchPlanner(profile), {**TIGHT, "cpu": 2 * TIGHT["cpu"]}
    work = Workload(24, 8, 24)
    requests = [
        ask("cpu", TIGHT, workload=work),
        ask("cpu", other, workload=work),  # much more memory
        ask("cpu", TIGHT, workload=work),  # in which that does not fit
        ask("cpu", TIGHT, workload=work, eviction=EvictionConfig("h2o", ratio=0.4)),
        ask("cpu", TIGHT, workload=work, fixed={"weights": {"disk": 1.0}}),
    ]
    found = [plans(request) for request in requests]
    assert len(searched) == len(requests)
    assert all(plan.shortage() is None for plan in found)
    assert plans(requests[-1]).policy == found[-1].policy
    assert len(searched) == len(requests)
