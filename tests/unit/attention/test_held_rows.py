"""Rows held for other ranks, against a plain dictionary of rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimpipe.attention.held_rows import HeldRows
from slimpipe.program.runs import join

NUM_TOKENS = 12
B, G, H, HV = 2, 3, 4, 2


def runs_of(tokens):
    return join((token, token + 1) for token in tokens)


def draw_pair(generator: torch.Generator, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (B, count, G, H), (B, count, G, HV)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def stack(rows: dict[int, tuple[torch.Tensor, torch.Tensor]], tokens) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.stack([rows[token][i] for token in sorted(tokens)], dim=1) for i in (0, 1))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([torch.float64, torch.bfloat16]))
def test_against_a_dictionary(data: st.DataObject, dtype: torch.dtype) -> None:
    """Any order of adding, reading, adding gradients and dropping."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    held, rows, gradients = HeldRows(), {}, {}
    for _ in range(data.draw(st.integers(1, 8))):
        absent = sorted(set(range(NUM_TOKENS)) - set(rows))
        if absent and (new := data.draw(st.sets(st.sampled_from(absent)))):
            pair = draw_pair(generator, len(new), dtype)
            held.add(runs_of(new), *pair)
            rows |= {token: (pair[0][:, i], pair[1][:, i]) for i, token in enumerate(sorted(new))}
        if not rows:
            continue
        used = data.draw(st.sets(st.sampled_from(sorted(rows)), min_size=1))
        for mine, expected in zip(held.rows(runs_of(used)), stack(rows, used), strict=True):
            assert torch.equal(mine, expected)
        pair = draw_pair(generator, len(used), dtype)
        held.add_gradient(runs_of(used), *pair)
        for i, token in enumerate(sorted(used)):
            before = gradients.get(token, (0, 0))
            gradients[token] = tuple(total + x[:, i].to(wide) for total, x in zip(before, pair, strict=True))
        if dropped := data.draw(st.sets(st.sampled_from(sorted(used)))):
            for mine, expected in zip(held.drop(runs_of(dropped)), stack(gradients, dropped), strict=True):
                assert mine.dtype == wide
                assert torch.equal(mine, expected)
            for token in dropped:
                del rows[token], gradients[token]
        assert bool(held) == bool(rows)
        assert held.num_bytes >= len(rows) * B * G * (H + HV) * dtype.itemsize
    if rows:
        held.drop(runs_of(rows))
    assert not held and held.num_bytes == 0


def test_without_gradients_nothing_comes_back() -> None:
    held = HeldRows()
    held.add(((2, 5),), *draw_pair(torch.Generator(), 3, torch.float32))
    assert held.drop(((2, 4),)) is None
    assert held.num_bytes == B * 1 * G * (H + HV) * 4


def test_what_is_dropped_lets_memory_go() -> None:
    held = HeldRows()
    k, v = draw_pair(torch.Generator(), 8, torch.float32)
    held.add(((0, 8),), k, v)
    held.drop(((1, 8),))
    left_k, _ = held.rows(((0, 1),))
    assert left_k.untyped_storage().nbytes() == left_k.nbytes < k.nbytes


def test_rows_that_are_not_held() -> None:
    held = HeldRows()
    held.add(((0, 2), (3, 5)), *draw_pair(torch.Generator(), 4, torch.float32))
    with pytest.raises(AssertionError, match=r"tokens 2 .. 2 are not held"):
        held.rows(((1, 4),))
    with pytest.raises(AssertionError, match=r"tokens 5 .. 6 are not held"):
        held.drop(((4, 7),))
    with pytest.raises(AssertionError, match="4 rows for runs of 3"):
        held.add(((6, 9),), *draw_pair(torch.Generator(), 4, torch.float32))
