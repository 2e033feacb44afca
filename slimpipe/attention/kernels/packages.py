"""Kernels of packages that may be installed, in one of several releases.

A release is known by the parameters of its functions: each is called by name, and what it lacks is told.
"""

from __future__ import annotations

import importlib
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any, ClassVar

import torch

from slimpipe.attention.kernels.cuda_flash import CudaFlashKernel
from slimpipe.torch_private import parameters_of


class PackageKernel(CudaFlashKernel):
    """The package is imported when this kernel is first asked, and only for tensors that it could serve.

    Args:
        functions: Looked up instead of the package's module.
    """

    module: ClassVar[str]
    needs: ClassVar[str]
    """The release that is needed, and how to get it."""

    def __init__(self, *, functions: Any = None) -> None:
        self._functions = functions

    def _refusal(self, capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
        reason = self._refuse_hardware(capability, head_dim, head_dim_v)
        if reason is not None:
            return reason
        functions = self._interface()
        if isinstance(functions, str):
            return f"needs {self.needs}; importing {self.module} failed: {functions}"
        for name, given in self._calls(functions).items():
            misfit = _misfit(getattr(functions, name, None), tuple(given))
            if misfit is not None:
                return f"needs {self.needs}; of the installed one, {name} {misfit}"
        return self._refuse_release(functions)

    @abstractmethod
    def _refuse_hardware(self, capability: tuple[int, int], head_dim: int, head_dim_v: int) -> str | None:
        """`refusal` by the GPU's compute capability and the head dims of Q and V."""

    @abstractmethod
    def _calls(self, functions: Any) -> dict[str, Iterable[str]]:
        """The functions that are called, each with the names of the arguments that it is given."""

    def _refuse_release(self, functions: Any) -> str | None:
        """`refusal` by what the parameters of functions do not show."""
        return None

    def _interface(self) -> Any:
        return load(self.module) if self._functions is None else self._functions


@cache
def load(module: str) -> ModuleType | str:
    """The module or, where it cannot be imported, why. What is installed does not change while a process runs."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages of another PyTorch, CUDA or compiler fail in many ways
        return f"{type(error).__name__}: {error}"


@cache
def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@cache
def _misfit(function: Callable | None, given: tuple[str, ...]) -> str | None:
    """Why a function cannot be called with arguments of these names and no others."""
    if function is None:
        return "is missing"
    parameters = parameters_of(function)
    for name in given:
        if name not in parameters:
            return f"has no parameter {name!r}"
    for name, is_required in parameters.items():
        if is_required and name not in given:
            return f"needs a parameter {name!r} that slimpipe does not know"
    return None


def parse_version(version: str) -> tuple[float, ...]:
    """The numbers of a version; the third is followed by that of a beta, if it is one, otherwise by infinity."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:b(\d+))?", version)
    if found is None:
        return (0.0,)
    major, minor, micro, beta = found.groups()
    return int(major), int(minor), int(micro or 0), float("inf") if beta is None else int(beta)


def deterministic() -> bool:
    """Whether the user asked for results that do not change from run to run."""
    return torch.are_deterministic_algorithms_enabled()
