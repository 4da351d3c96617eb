"""Tiny checkpoints, made once per session, a model and an engine of one, and what caches keep while engines run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from h2o_flexgen.cache.heads_apart import HeadsApart
from h2o_flexgen.cache.kv_cache import KVCache
from h2o_flexgen.engine.engine import Engine
from h2o_flexgen.engine.state import kv_store
from h2o_flexgen.schedule import footprint
from tests.engine.compare import History
from tests.tiny import make_model, save

Checkpoint = tuple[PreTrainedModel, str]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """`checkpoint("llama-gqa")`: the model by transformers and the folder it was saved to."""
    made: dict[str, Checkpoint] = {}

    def make(name: str = "opt") -> Checkpoint:
        if name not in made:
            model = make_model(name)
            made[name] = model, str(save(model, tmp_path_factory.mktemp(name)))
        return made[name]

    return make


@pytest.fixture(scope="module")
def model(checkpoint) -> PreTrainedModel:
    return checkpoint("opt")[0]


@pytest.fixture(scope="module")
def llm(checkpoint) -> Iterator[Engine]:
    with Engine(checkpoint("opt")[1], dtype="float32") as engine:
        yield engine


@pytest.fixture
def rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moving caches are written home in full every 6 steps instead of 16, so that short runs see that too."""
    for module in (footprint, kv_store):
        monkeypatch.setattr(module, "REWRITE_EVERY", 6)


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> History:
    """(layer, row id) -> kept positions per head, after the prompt and after every decode step."""
    record: History = defaultdict(list)
    noting = False  # parts of a cache are not noted by themselves

    def recorded(kind: type[KVCache]) -> type[KVCache]:
        class Recorded(kind):  # type: ignore[misc, valid-type]
            def attend(self, *args, **kwargs) -> Tensor:
                nonlocal noting
                if noting:
                    return super().attend(*args, **kwargs)
                for row, row_id in enumerate(self.row_ids):
                    if not record[self._layer, row_id]:
                        self._note(row)  # what the prompt left
                noting = True
                try:
                    out = super().attend(*args, **kwargs)
                finally:
                    noting = False
                for row in range(self.shape.batch):
                    self._note(row)
                return out

            def _note(self, row: int) -> None:
                heads = range(self.shape.kv_heads)
                record[self._layer, self.row_ids[row]].append([set(self.kept(row, head)) for head in heads])

        return Recorded

    for kind in (KVCache, HeadsApart):
        monkeypatch.setattr(kv_store, kind.__name__, recorded(kind))
    return record
