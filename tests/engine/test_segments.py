"""The order of prompts and their segments: every token exactly once per distinct prefix, whatever the prompts are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_flexgen.engine.batching.prefix_tree import MIN_SHARED, chunks_of, segments_of, shared_first

HEADERS = st.sampled_from([[1] * 5, [2] * 20, [1, 2] * 20, [3] * 40])
PROMPT = st.builds(
    lambda headers, tail: [token for header in headers for token in header] + tail,
    st.lists(HEADERS, max_size=3),
    st.lists(st.integers(0, 5), min_size=1, max_size=30),
)
PROMPTS = st.lists(PROMPT, min_size=1, max_size=12)


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.integers(1, 12), st.sampled_from([16, 33, 2048]), st.booleans())
def test_segments_hold_every_prompt(prompts: list[list[int]], size: int, chunk: int, share: bool) -> None:
    prompts = [prompts[i] for i in shared_first(prompts, share)]
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    path: list[list[int]] = []
    for batch, segments in zip(batches, segments_of(batches, chunk, share), strict=True):
        at, done = 0, []
        for segment in segments:
            assert segment.start == at
            at = segment.stop
            path = path[: segment.depth]
            before = [token for part in path for token in part]
            assert len(before) == segment.past
            assert 1 <= segment.length <= chunk
            for row in segment.rows:
                assert batch[row][: segment.past] == before
                assert len(batch[row]) == segment.past + segment.length
                done.append(row)
            if not segment.rows:
                assert batch[segment.rows.start][: segment.past] == before
                path.append(batch[segment.rows.start][segment.past : segment.past + segment.length])
        assert done == list(range(len(batch)))
        assert [s for part in chunks_of(segments, chunk) for s in part.segments] == segments


@given(PROMPTS, st.booleans())
def test_the_order_is_a_permutation(prompts: list[list[int]], share: bool) -> None:
    order = shared_first(prompts, share)
    assert sorted(order) == list(range(len(prompts)))
    if not share:
        assert order == sorted(order)


def test_nothing_in_common_stays_in_order() -> None:
    prompts = [[i] * length for i, length in enumerate((3, 40, 17, 40, 8))]
    assert shared_first(prompts) == [0, 1, 2, 3, 4]


def test_a_group_comes_where_its_first_member_would() -> None:
    header, other = [9] * 30, [8] * 30
    prompts = [[1] * 50, [*header, 1], [*other, 2], [2] * 20, [*header, 3], [*other, 4]]
    assert shared_first(prompts) == [0, 1, 4, 2, 5, 3]


def test_a_header_is_computed_once_for_a_whole_block() -> None:
    header = list(range(2000))
    prompts = [[*header, i, i + 1, i + 2] for i in range(64)]
    first, second = segments_of([prompts[:32], prompts[32:]], 2048)
    assert [(s.length, s.past, s.rows) for s in first] == [(2000, 0, range(0)), (3, 2000, range(32))]
    assert [(s.length, s.past, s.rows) for s in second] == [(3, 2000, range(32))]


def test_questions_under_a_header_are_computed_once_each() -> None:
    header, questions = [9] * 100, [[q] * 30 for q in range(3)]
    prompts = [header + question + [7, answer] for question in questions for answer in range(4)]
    order = shared_first([prompts[i] for i in (5, 0, 8, 3, 11, 1, 6, 2, 10, 4, 9, 7)])
    assert len(order) == 12
    (segments,) = segments_of([prompts], 2048)
    assert sum(s.stop - s.start for s in segments) == 100 + 3 * 31 + 12  # the 7 is common too
    assert max(s.depth for s in segments) == 2


def test_equal_prompts_still_compute_their_last_token_each() -> None:
    (segments,) = segments_of([[[5] * 50] * 3], 2048)
    assert [(s.length, len(s.rows)) for s in segments] == [(49, 0), (1, 3)]


def test_short_prefixes_are_not_worth_a_segment() -> None:
    prompts = [[5] * (MIN_SHARED - 1) + [i] * 3 for i in range(3)]
    (segments,) = segments_of([prompts], 2048)
    assert [(s.length, len(s.rows)) for s in segments] == [(MIN_SHARED + 2, 3)]


def test_a_long_prompt_is_computed_in_parts() -> None:
    (segments,) = segments_of([[list(range(100))]], 40)
    assert [(s.length, s.past, s.depth, len(s.rows)) for s in segments] == [
        (40, 0, 0, 0),
        (40, 40, 1, 0),
        (20, 80, 2, 1),
    ]
