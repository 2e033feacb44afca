"""Runs against Python's sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slimpipe.program.runs import Runs, first_rows, intersect, join, num_rows, subtract, union

tokens = st.sets(st.integers(0, 30))


def runs_of(tokens: set[int]) -> Runs:
    starts = sorted(token for token in tokens if token - 1 not in tokens)
    stops = sorted(token + 1 for token in tokens if token + 1 not in tokens)
    return tuple(zip(starts, stops))


@given(tokens, tokens)
def test_runs_are_sets_in_their_only_form(a: set[int], b: set[int]) -> None:
    assert num_rows(runs_of(a)) == len(a)
    assert union(runs_of(a), runs_of(b)) == runs_of(a | b)
    assert intersect(runs_of(a), runs_of(b)) == runs_of(a & b)
    assert subtract(runs_of(a), runs_of(b)) == runs_of(a - b)


@given(st.lists(tokens))
def test_union_of_many(sets: list[set[int]]) -> None:
    assert union(*map(runs_of, sets)) == runs_of(set().union(*sets))


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5))))
def test_any_runs_are_joined(pairs: list[tuple[int, int]]) -> None:
    runs = [(start, start + length) for start, length in pairs]
    assert join(runs) == runs_of({token for run in runs for token in range(*run)})


@given(tokens, st.integers(-1, 40))
def test_first_rows(a: set[int], count: int) -> None:
    assert first_rows(runs_of(a), count) == runs_of(set(sorted(a)[: max(0, count)]))
