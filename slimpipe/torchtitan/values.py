"""One value from a TOML file or the command line, checked against the type hint of its field."""

from __future__ import annotations

import difflib
import enum
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli

_SPELLING = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a table"}
_EXAMPLES = {int: ", for example 8", float: ", for example 0.5", str: ', for example "text"'}


class Text(str):
    """A value from the command line: text, read as what its field's type hint wants."""


class ValueMismatch(ValueError):
    """The value does not fit the type hint; the text says what would."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely means; None when nothing is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """The end of an error about a misspelt name: the nearest known name if one is near, and all known names."""
    known = list(known)
    near = nearest(name, known)
    question = f'did you mean "{near}"? ' if near else ""
    return f"; {question}known: {', '.join(known)}"


def without_annotation(hint: Any) -> Any:
    """`Annotated[T, ...]` -> T."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def union_members(hint: Any) -> tuple[Any, ...]:
    """Members of a union, annotations kept; one member for anything else."""
    hint = without_annotation(hint)
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def read_value(value: Any, hint: Any, read_table: Callable[[type, dict[str, Any]], Any]) -> Any:
    """Checks `value` and converts it to what `hint` asks for.

    An integer is taken where a number is wanted, a list where a tuple is wanted, "None" where a field may be None (TOML
    has no null). A bool is not taken as an integer. `Text` is read as TOML would read it, lists also as a,b,c.

    Args:
        value: a TOML value, or `Text`.
        hint: type hint of the field.
        read_table: makes an instance of a dataclass out of a table.

    Raises:
        ValueMismatch: saying what the value must be.
    """
    members = union_members(hint)
    if len(members) > 1:
        return _read_union(value, members, read_table)
    hint, origin = without_annotation(hint), get_origin(hint)
    if isinstance(value, Text):
        value = _read_text(value, hint)
    if hint is Any:
        return value
    if origin is Literal:
        return _read_choice(value, {choice: choice for choice in get_args(hint)})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _read_choice(value, {member.name: member for member in hint} | {m.value: m for m in hint})
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueMismatch(f"must be a table, not {_show(value)}")
        return read_table(typing.cast(type, hint), value)
    if (origin or hint) in (list, tuple):
        return _read_sequence(value, hint, read_table)
    if (origin or hint) is dict:
        if not isinstance(value, dict):
            raise ValueMismatch(f"must be a table, not {_show(value)}")
        item_hint = get_args(hint)[1] if get_args(hint) else Any
        return {key: read_value(item, item_hint, read_table) for key, item in value.items()}
    if hint in _SPELLING:
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is not hint:
            raise ValueMismatch(f"must be {_SPELLING[hint]}{_EXAMPLES.get(hint, '')}, not {_show(value)}")
        return value
    raise ValueMismatch("cannot be set here: it holds Python code; write a config function for it")


def _read_union(value: Any, members: tuple[Any, ...], read_table: Callable[[type, dict[str, Any]], Any]) -> Any:
    if type(None) in members and (value is None or value == "None"):
        return None
    others = [member for member in members if member is not type(None)]
    if not isinstance(value, Text):  # an exact type first: `float | int` keeps an integer an integer
        others.sort(key=lambda member: type(value) is not member)
    else:  # anything is a string, so text is read as one last
        others.sort(key=lambda member: member is str)
    mismatches = []
    for member in others:
        try:
            return read_value(value, member, read_table)
        except ValueMismatch as mismatch:
            mismatches.append(str(mismatch))
    optional = ' (or "None")' if type(None) in members else ""
    raise ValueMismatch(", or ".join(dict.fromkeys(mismatches)) + optional)


def _read_sequence(value: Any, hint: Any, read_table: Callable[[type, dict[str, Any]], Any]) -> Any:
    kind, items = get_origin(hint) or hint, get_args(hint)
    if not isinstance(value, list | tuple):
        raise ValueMismatch(f"must be a list, not {_show(value)}")
    if kind is tuple and items and items[-1] is not Ellipsis:
        if len(value) != len(items):
            raise ValueMismatch(f"must be a list of {len(items)} items, not {_show(value)}")
        hints = items
    else:
        hints = (items[0] if items else Any,) * len(value)
    read = []
    for index, (item, item_hint) in enumerate(zip(value, hints, strict=True)):
        try:
            read.append(read_value(item, item_hint, read_table))
        except ValueMismatch as mismatch:
            raise ValueMismatch(f"item {index} {mismatch}") from None
    return kind(read)


def _read_choice(value: Any, choices: dict[Any, Any]) -> Any:
    for choice, result in choices.items():
        if type(choice) is type(value) and choice == value:
            return result
    known = ", ".join(_show(choice) for choice in choices)
    near = nearest(value, [str(choice) for choice in choices]) if isinstance(value, str) else None
    question = f'; did you mean "{near}"?' if near else ""
    raise ValueMismatch(f"must be one of {known}, not {_show(value)}{question}")


def _read_text(text: Text, hint: Any) -> Any:
    """`text` as the nearest Python value that `hint` could want; the caller checks it."""
    if hint is str:
        return str(text)
    if (get_origin(hint) or hint) in (list, tuple) and not text.startswith("["):
        return [Text(item) for item in text.split(",")] if text else []
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return str(text)
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return {"True": True, "False": False}.get(text, str(text))


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)
