"""One value against one type hint: what is taken, what is refused and in which words."""

import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from slimpipe.torchtitan.values import Text, ValueMismatch, read_value


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int


def read(value, hint):
    return read_value(value, hint, lambda cls, table: cls(**table))


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (3, float | int, 3),
        (2.5, float | int, 2.5),
        (True, bool, True),
        ("a", str, "a"),
        ("a", str | None, "a"),
        ("None", str | None, None),
        ("None", int | None, None),
        ("None", str, "None"),
        ("b", Literal["a", "b"], "b"),
        ([1, 2], list[int], [1, 2]),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([["a"], ["b", "c"]], list[list[str]] | None, [["a"], ["b", "c"]]),
        (["m.f", ["m.g", {"k": 1}]], list[str | tuple[str, dict[str, Any]]], ["m.f", ("m.g", {"k": 1})]),
        ({"a": 1}, dict[str, int], {"a": 1}),
        ("RED", Colour, Colour.RED),
        ("red", Colour, Colour.RED),
        ([{"x": 1}], list[Point], [Point(1)]),
        (1, Annotated[int, "note"], 1),
        (Text("3"), int, 3),
        (Text("1e-3"), float, 1e-3),
        (Text("-1"), int | None, -1),
        (Text("None"), int | None, None),
        (Text("7"), str, "7"),
        (Text("7"), str | None, "7"),
        (Text("true"), bool, True),
        (Text("False"), bool, False),
        (Text("a,b"), list[str], ["a", "b"]),
        (Text(""), list[str], []),
        (Text("[1, 2]"), list[int], [1, 2]),
        (Text("[['a'], ['b']]"), list[list[str]] | None, [["a"], ["b"]]),
        (Text("0.5"), Any, 0.5),
        (Text("b"), Literal["a", "b"], "b"),
    ],
)
def test_taken(value, hint, expected):
    result = read(value, hint)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "must be an integer, for example 8, not true"),
        (1, bool, "must be true or false, not 1"),
        (1.5, int, "must be an integer, for example 8, not 1.5"),
        (True, float, "must be a number, for example 0.5, not true"),
        (1, str, 'must be a string, for example "text", not 1'),
        ("x", int | None, 'must be an integer, for example 8, not "x" (or "None")'),
        (
            "bfloat",
            Literal["bfloat16", "float32"],
            'must be one of "bfloat16", "float32", not "bfloat"; did you mean "bfloat16"?',
        ),
        (1, Literal[True], "must be one of true, not 1"),
        ("a", list[str], 'must be a list, not "a"'),
        (["a", 1], list[str], 'item 1 must be a string, for example "text", not 1'),
        ([1], tuple[int, int], "must be a list of 2 items, not [1]"),
        (1, dict[str, int], "must be a table, not 1"),
        ({"a": "b"}, dict[str, int], 'must be an integer, for example 8, not "b"'),
        ("blue", Colour, 'must be one of "RED", "red", not "blue"'),
        ("x", Point, 'must be a table, not "x"'),
        (Text("2.5"), int, 'must be an integer, for example 8, not "2.5"'),
        (Text("yes"), bool, 'must be true or false, not "yes"'),
        (1, type(len), "cannot be set here: it holds Python code; write a config function for it"),
    ],
)
def test_refused(value, hint, message):
    with pytest.raises(ValueMismatch) as caught:
        read(value, hint)
    assert str(caught.value) == message
