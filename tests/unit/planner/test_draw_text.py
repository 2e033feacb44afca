"""The grid in a terminal: readable without colours, never wider than asked for, in bands of one time axis."""

import re

import pytest

from slimpipe.planner.draw_text import grid, live_curve, num_bands
from slimpipe.planner.shown import timeline_of
from slimpipe.planner.timeline import Timeline
from tests.unit.planner.settings import setting


def test_a_small_schedule():
    timeline = timeline_of("SlimPipe", setting(p=2, n=2, m=2, attention_share=0.0))
    assert grid(timeline, columns=68, colour=False) == [
        "        |0                     |2.875                 |5.75",
        "rank 0  a0--a1--b0--b1--    a1'=====    a0'=====    b1'=====b0'=====",
        "rank 1      a0--a1--a1'=====b0--a0'=====b1--b1'=====b0'=====",
    ]


@pytest.mark.parametrize(("columns", "p", "n", "v", "m"), [(100, 4, 8, 1, 2), (60, 2, 4, 2, 4), (100, 8, 64, 4, 4)])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_asked_for(columns, p, n, v, m, colour):
    timeline = timeline_of("InterleavedSlimPipe", setting(p=p, n=n, v=v, m=m))
    lines = grid(timeline, columns=columns, colour=colour)
    assert len(lines) == num_bands(timeline, columns=columns) * (p + 1)
    bare = [re.sub("\033\\[[0-9;]*m", "", line) for line in lines]
    assert max(map(len, bare)) <= columns
    if not colour:
        assert lines == bare


def test_every_unit_can_be_read_at_100_columns():
    lines = grid(timeline_of("SlimPipe", setting(p=4, n=8, m=2, attention_share=0.0)), columns=100, colour=False)
    for rank in range(4):
        row = "".join(line.removeprefix(f"rank {rank}  ") for line in lines if line.startswith(f"rank {rank}"))
        assert all(f"{microbatch}{index}-" in row for microbatch in "ab" for index in range(8))
        assert len(re.findall("'", row)) >= 15  # one may be cut by the end of a band


def test_help_and_vocabulary_are_marked_and_shades_tell_contexts():
    timeline = timeline_of("SlimPipe", setting(p=4, n=4, exchange="on", vocab_parallel="both", head=0.2))
    text = "\n".join(grid(timeline, columns=100, colour=False))
    assert "+" in text and "$" in text
    coloured = "\n".join(grid(timeline, columns=100, colour=True))
    assert len(set(re.findall("48;5;([0-9]+)m", coloured))) >= 6
    assert coloured.count("\033[0m") >= 4


def test_one_axis_for_several():
    short, long = (timeline_of("SlimPipe", setting(p=2, n=2, m=m)) for m in (1, 2))
    lines = grid(short, columns=100, colour=False, seconds=long.seconds, bands=1)
    assert lines[0] == grid(long, columns=100, colour=False, bands=1)[0][: len(lines[0])]
    assert max(map(len, lines[1:])) < 70


def test_live_activations():
    timeline = timeline_of("SlimPipe", setting(p=2, n=4, m=2))
    lines = live_curve(timeline, columns=100)
    assert [line.partition("  peak ")[2] for line in lines] == ["6 = 0.750", "4 = 0.500"]
    assert max(map(len, lines)) <= 100
    assert "█" in lines[0] and "▆" in lines[1] and "█" not in lines[1]
    half = live_curve(timeline, columns=100, highest=1.5)
    assert "▄" in half[0] and "▅" not in half[0]


def test_nothing_to_draw():
    empty = Timeline("", 2, 1, 1, ())
    assert [line.strip() for line in grid(empty, columns=40, colour=False)][1:] == ["rank 0", "rank 1"]
    assert len(live_curve(empty, columns=40)) == 2
