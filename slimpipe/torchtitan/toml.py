"""TOML files and `--section.key value` -> a trainer configuration, with all errors at once."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Sequence
from typing import Any

import tomli
import tyro
from torchtitan.config import ConfigManager

from slimpipe.torchtitan.base import base_config
from slimpipe.torchtitan.config import ConfigError, SlimPipeTrainerConfig, with_slimpipe
from slimpipe.torchtitan.legacy import fold_optimizer, put, translate_names
from slimpipe.torchtitan.values import Text, ValueMismatch, read_value, suggest, union_members


def load_toml(path: str, overrides: Sequence[str] = ()) -> SlimPipeTrainerConfig:
    """Reads a TOML file; `overrides` (`--section.key value`, `--section.key=value`, `--section.flag`) win over it.

    Reads the file and writes nothing. Rules between sections are checked by `prepare()`, not here.

    Raises:
        ConfigError: with every error of the file and the overrides.
    """
    try:
        with open(path, "rb") as file:
            tables = tomli.load(file)
    except OSError as error:
        raise ConfigError([f"cannot read the file: {error.strerror}"], source=path) from None
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"not TOML: {error}"], source=path) from None
    given, errors = _parse_overrides(overrides)
    for part in (tables, given):
        errors += translate_names(part)
    _replace_choice(tables.get("model"), given.get("model"))
    _merge(tables, given)
    base, base_errors = base_config(tables.pop("model", {}))
    errors += base_errors
    if base is None:
        raise ConfigError(errors, source=path)
    config = with_slimpipe(base)
    if isinstance(tables.get("optimizer"), dict):
        errors += fold_optimizer(tables["optimizer"], config.optimizer)
    reader = _Reader(config)
    config = reader.change(config, tables, "")
    if errors or reader.errors:
        raise ConfigError(errors + reader.errors, source=path)
    return config


class TomlConfigManager(ConfigManager):
    """torchtitan's configuration manager, whose first argument may be a TOML file instead of --module and --config."""

    def _load_config(self, args: list[str]) -> tuple[SlimPipeTrainerConfig, list[str]]:
        if args and not args[0].startswith("-"):
            help_flags = [arg for arg in args[1:] if arg in ("-h", "--help")]
            return load_toml(args[0], [arg for arg in args[1:] if arg not in help_flags]), help_flags
        config, rest = super()._load_config(args)
        return with_slimpipe(config), rest


class _Reader:
    """Changes a tree of dataclasses by a tree of tables, and remembers every error with its dotted path."""

    def __init__(self, root: Any) -> None:
        self.errors: list[str] = []
        self._root = root

    def change(self, current: Any, table: dict[str, Any], path: str) -> Any:
        """`current` with the values of `table`, rebuilt so that its `__post_init__` runs again."""
        return self._build(type(current), current, table, path)

    def _build(self, cls: type, current: Any, table: dict[str, Any], path: str) -> Any:
        """`current` changed by `table`, or a new `cls` where `current` is None."""
        hints, before = typing.get_type_hints(cls, include_extras=True), len(self.errors)
        known = _settable(cls, hints)
        changes = {}
        for key, value in table.items():
            where = f"{path}.{key}" if path else key
            if key in known:
                changes[key] = self._value(getattr(current, key, None), value, hints[key], where)
            else:
                self.errors.append(f"{where}: {self._unknown(key, path, known)}")
        if len(self.errors) > before:
            return current
        try:
            return dataclasses.replace(current, **changes) if current is not None else cls(**changes)
        except Exception as error:  # whatever a __post_init__ raises is the user's
            named = not path or str(error).startswith(f"{path}.")
            self.errors.append(str(error) if named else f"{path}: {error}")
            return current

    def _value(self, current: Any, value: Any, hint: Any, where: str) -> Any:
        modes = _modes(hint)
        if modes and isinstance(value, dict):
            return self._mode(current, dict(value), modes, where)
        if dataclasses.is_dataclass(current) and isinstance(value, dict):
            cls, value = type(current), dict(value)
            if "type" in value and "type" not in _settable(cls, typing.get_type_hints(cls)):
                cls = self._class(value.pop("type"), hint, where)
                current = current if cls is type(current) else _default(cls)
            return self._build(cls, current, value, where) if cls else current
        if modes or dataclasses.is_dataclass(current):
            self.errors.append(f"{where}: must be a table [{where}], not {value!r}")
            return current
        try:
            return read_value(value, hint, lambda cls, table: self._build(cls, None, table, where))
        except ValueMismatch as mismatch:
            self.errors.append(f"{where}: {mismatch}")
            return current

    def _mode(self, current: Any, table: dict[str, Any], modes: dict[str, Any], where: str) -> Any:
        """A choice between classes, by the name that the command line of torchtitan gives them."""
        if "mode" not in table:
            cls = type(current)
        else:
            mode = str(table.pop("mode")).replace("_", "-")
            if mode not in modes:
                self.errors.append(f'{where}.mode: no mode "{mode}"{suggest(mode, modes)}')
                return current
            cls = modes[mode]
        if cls is type(None):
            if table:
                self.errors.append(f'{where}.{next(iter(table))}: mode "none" takes no settings')
            return None
        return self._build(cls, current if type(current) is cls else _default(cls), table, where)

    def _class(self, name: Any, hint: Any, where: str) -> Any:
        """The configuration class that `type = "module:Class"` names, where it may stand for `hint`."""
        wanted = union_members(hint)[0]
        module, _, attribute = str(name).partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            self.errors.append(f'{where}.type: cannot import "{name}": {error}; write "module:Class"')
            return None
        found = getattr(found, "Config", found)
        if not (isinstance(found, type) and issubclass(found, wanted)):
            self.errors.append(f'{where}.type: "{name}" is not a {wanted.__qualname__.removesuffix(".Config")}')
            return None
        return found

    def _unknown(self, key: str, path: str, known: Sequence[str]) -> str:
        elsewhere = [setting for setting in _paths(self._root) if setting.rpartition(".")[2] == key]
        if elsewhere:
            return f"no such key here; did you mean {elsewhere[0]}?"
        return f"no such {'key' if path else 'table or key'}{suggest(key, known if path else ['model', *known])}"


def _settable(cls: type, hints: dict[str, Any]) -> list[str]:
    hidden = tyro.conf.Suppress  # torchtitan marks fields that only code may set
    return [
        f.name for f in dataclasses.fields(cls) if f.init and hidden not in getattr(hints[f.name], "__metadata__", ())
    ]


def _modes(hint: Any) -> dict[str, Any]:
    """Name -> class of a field that torchtitan's command line sets by subcommand; empty for others."""
    names = {}
    for member in union_members(hint):
        for note in getattr(member, "__metadata__", ()):
            if name := getattr(note, "name", None):
                names[name] = typing.get_args(member)[0]
    return names


def _default(cls: type) -> Any:
    """An instance with default values; None where a value is required."""
    try:
        return cls()
    except Exception:
        return None


def _paths(root: Any, prefix: str = "") -> list[str]:
    """Dotted paths of every setting below `root`."""
    found = []
    for name in _settable(type(root), typing.get_type_hints(type(root), include_extras=True)):
        value = getattr(root, name)
        found += _paths(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else [prefix + name]
    return found


def _parse_overrides(args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """`--a.b value`, `--a.b=value`, `--a.flag`, `--a.no-flag` -> tables, and errors. A later one wins."""
    given: dict[str, Any] = {}
    last = ""
    for arg in args:
        if arg.startswith("--"):
            name, equals, text = arg[2:].partition("=")
            last = name.replace("-", "_")
            given[last] = Text(text) if equals else None
        elif not given:
            return {}, [f'"{arg}": not an option; write --section.key value']
        else:
            given[last] = Text(arg if given[last] is None else f"{given[last]},{arg}")
    tables: dict[str, Any] = {}
    errors = []
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        if value is None and name.startswith("no_"):
            key = ".".join(filter(None, [section, name.removeprefix("no_")]))
            value = False
        if not put(tables, key, True if value is None else value):
            errors.append(f"--{key}: clashes with another option")
    return tables, errors


def _replace_choice(model: Any, over: Any) -> None:
    """Where the command line chooses a flavor or a config function, the file's choice of the other kind goes."""
    if isinstance(model, dict) and isinstance(over, dict) and over.keys() & {"flavor", "config"}:
        model.pop("flavor", None)
        model.pop("config", None)


def _merge(tables: dict[str, Any], over: dict[str, Any]) -> None:
    """Puts `over` into `tables`; what is in both comes from `over`."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(tables.get(key), dict):
            _merge(tables[key], value)
        else:
            tables[key] = value
