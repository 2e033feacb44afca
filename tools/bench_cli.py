"""The command line of a benchmark: one option per field of its setting, and a table to read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any


def setting_parser(
    kind: type, *, description: str, helps: dict[str, str], choices: dict[str, Sequence[str]] | None = None
) -> argparse.ArgumentParser:
    """A parser with an option for every field of the dataclass ``kind``; a tuple takes several values."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    default = kind()
    for field in fields(kind):
        value = getattr(default, field.name)
        many = isinstance(value, tuple)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(value[0] if many else value),
            nargs="+" if many else None,
            default=value,
            choices=(choices or {}).get(field.name),
            help=helps.get(field.name, " "),
        )
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    return parser


def parse_setting(parser: argparse.ArgumentParser, kind: type, argv: list[str] | None) -> tuple[Any, bool]:
    """The setting, and whether figures are wanted as JSON."""
    values = vars(parser.parse_args(argv))
    as_json = values.pop("json")
    return kind(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}), as_json


def check_layers(parser: argparse.ArgumentParser, num_layers: int, num_stages: int) -> None:
    """End with an error where layers do not divide into stages."""
    if num_layers % num_stages:
        nearest = max(1, round(num_layers / num_stages)) * num_stages
        parser.error(f"--num-layers {num_layers} does not divide into {num_stages} stages; nearest: {nearest}")


def aligned(rows: list[tuple[str, ...]]) -> str:
    """Rows as a table, the first one its head; only the first column is text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
