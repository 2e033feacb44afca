"""The configuration a TOML file starts from, as its `[model]` table says."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import _supported_models
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.trainer import Trainer

from slimpipe.torchtitan.values import Text, suggest

_KEYS = ("name", "flavor", "config")


def base_config(model: Any) -> tuple[Trainer.Config | None, list[str]]:
    """Makes the configuration that the rest of the file changes.

    `name` is a model of torchtitan (default "llama3") or the dotted name of a package laid out like one. Then either
    `flavor`: that size of the model with torchtitan's default settings and plain cross-entropy; or `config`: everything
    as a function of the model's `config_registry` has it ("module:function" for one that lies elsewhere).

    Returns:
        The configuration, and the errors; None with errors.
    """
    if not isinstance(model, dict):
        return None, [f'model: must be a table, not {model!r}; for example [model] flavor = "debugmodel"']
    errors = [f"model.{key}: no such key{suggest(key, _KEYS)}" for key in model.keys() - {*_KEYS}]
    errors += [
        f"model.{key}: must be a string, not {model[key]!r}"
        for key in _KEYS
        if type(model.get(key, "")) not in (str, Text)
    ]
    if ("flavor" in model) == ("config" in model):
        errors.append(
            'model: needs either flavor or config, for example flavor = "debugmodel", or config = "llama3_debugmodel"'
        )
    if errors:
        return None, errors
    name = str(model.get("name", "llama3"))
    try:
        package = importlib.import_module(f"torchtitan.models.{name}" if name in _supported_models else name)
    except ImportError as error:
        if name in _supported_models:
            return None, [f'model.name: cannot import model "{name}": {error}']
        return None, [f'model.name: no model "{name}"{suggest(name, sorted(_supported_models))}']
    if "config" in model:
        return _from_function(package, str(model["config"]))
    return _from_flavor(package, str(model["flavor"]))


def _from_function(package: ModuleType, name: str) -> tuple[Trainer.Config | None, list[str]]:
    place, _, function = name.rpartition(":")
    try:
        registry = importlib.import_module(place or f"{package.__name__}.config_registry")
    except ImportError as error:
        return None, [f'model.config: cannot import "{place or package.__name__}": {error}']
    found = {key: value for key, value in vars(registry).items() if inspect.isfunction(value) and key[0].islower()}
    known = [key for key, value in found.items() if value.__module__ == registry.__name__]
    if function not in found:
        return None, [f'model.config: no function "{function}"{suggest(function, known)}']
    config = found[function]()
    if not isinstance(config, Trainer.Config):
        return None, [f'model.config: "{name}" gives a {type(config).__qualname__}, not a Trainer.Config']
    return config, []


def _from_flavor(package: ModuleType, flavor: str) -> tuple[Trainer.Config | None, list[str]]:
    flavors: dict[str, Any] = next((value for key, value in vars(package).items() if key.endswith("_configs")), {})
    if flavor not in flavors:
        return None, [f'model.flavor: no flavor "{flavor}"{suggest(flavor, flavors)}']
    spec = package.model_registry(flavor)
    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        optimizer=default_adamw(),
        dataloader=HuggingFaceTextDataLoader.Config(),
    )
    return config, []
