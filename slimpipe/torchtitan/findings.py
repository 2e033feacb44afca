"""What can be known about a run from its configuration, on a machine like this one, before anything starts."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from slimpipe.attention.kernels.choose import choose_kernel, refusals
from slimpipe.planner.shown import with_exchange
from slimpipe.program import ProgramError
from slimpipe.program import check as prove
from slimpipe.torchtitan.config import ConfigError, SlimPipeTrainerConfig
from slimpipe.torchtitan.cpu import use_cpu
from slimpipe.torchtitan.degrees import check_num_ranks, product_of_degrees
from slimpipe.torchtitan.model_rules import layers_of, rotary_warning, window_of
from slimpipe.torchtitan.rules import broken_cpu_rule, broken_rules, runs_slimpipe
from slimpipe.torchtitan.shown import setting_of_config, slice_shape
from slimpipe.torchtitan.toml import load_toml

_TESTED_TORCHTITAN = "0.3.0"
_LEAST_TORCH = (2, 14)
_PACKAGES = ("slimpipe", "torch", "torchtitan", "flash-attn", "flash-attn-4")


@dataclass
class Findings:
    """What `slimpipe check` says."""

    config: str
    versions: dict[str, str | None] = field(default_factory=dict)
    """None for what is not installed."""
    device: str = ""
    num_ranks: int | None = None
    """Ranks that the run needs at least."""
    kernels: dict[str, str | None] = field(default_factory=dict)
    """For each attention kernel why it cannot serve this model here; None where it can."""
    kernel: str | None = None
    """The one that would run."""
    schedule: str = ""
    program: str = ""
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": not self.errors, **asdict(self)}

    def lines(self) -> list[str]:
        """For people."""
        versions = ", ".join(f"{name} {version or 'is not installed'}" for name, version in self.versions.items())
        lines = [f"versions   {versions}", f"device     {self.device}"]
        for index, (name, reason) in enumerate(self.kernels.items()):
            chosen = " (will run)" if name == self.kernel else ""
            lines.append(f"{'' if index else 'kernels':11}{name}{chosen}: {reason or 'serves this model here'}")
        lines += [f"schedule   {self.schedule}"] * bool(self.schedule) + [f"program    {self.program}"] * bool(
            self.program
        )
        for title, found in (("warning", self.warnings), ("error", self.errors)):
            lines += [f"{title:11}{text}" for text in found]
        verdict = "this run cannot start" if self.errors else "this run can start"
        return [*lines, f"{self.config}: {verdict}"]


def find(path: str, overrides: Sequence[str] = ()) -> Findings:
    """Look at a configuration. Starts, writes and communicates nothing."""
    findings = Findings(path)
    _look_at_versions(findings)
    on_cpu = use_cpu()
    device = torch.device("cpu" if on_cpu else "cuda")
    num_devices = 0 if on_cpu else torch.accelerator.device_count()
    findings.device = "CPU" if on_cpu else f"{num_devices} x {torch.cuda.get_device_name()}"
    try:
        config = load_toml(path, overrides)
    except ConfigError as error:
        findings.errors += error.errors
        return findings
    findings.errors += broken_rules(config)
    if on_cpu and (rule := broken_cpu_rule(config)):
        findings.errors.append(f"on this machine: {rule}")
    if warning := rotary_warning(config):
        findings.warnings.append(warning)
    _look_at_ranks(findings, config, num_devices)
    _look_at_kernels(findings, config, device)
    _look_at_files(findings, config)
    if runs_slimpipe(config) and not findings.errors:
        _look_at_program(findings, config)
    return findings


def _look_at_versions(findings: Findings) -> None:
    findings.versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            findings.versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            findings.versions[name] = None
    torch_release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if torch_release < _LEAST_TORCH:
        least = ".".join(map(str, _LEAST_TORCH))
        findings.errors.append(f"torch {torch.__version__}: torchtitan needs at least {least}; nearest legal: {least}")
    if (version := findings.versions["torchtitan"]) != _TESTED_TORCHTITAN:
        findings.warnings.append(f"torchtitan {version}: tested with {_TESTED_TORCHTITAN} only")


def _look_at_ranks(findings: Findings, config: SlimPipeTrainerConfig, num_devices: int) -> None:
    parallelism = config.parallelism
    findings.num_ranks = product_of_degrees(parallelism)
    schedule, num_pipeline_ranks = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    findings.schedule = f"{schedule} on {num_pipeline_ranks} pipeline ranks, {findings.num_ranks} ranks in all"
    if num_pipeline_ranks == 1:
        findings.schedule = f"no pipeline, {findings.num_ranks} ranks"
    if num_devices:
        try:
            check_num_ranks(parallelism, num_devices)
        except ValueError as error:
            findings.warnings.append(f"on this machine alone: {error}")


def _look_at_kernels(findings: Findings, config: SlimPipeTrainerConfig, device: torch.device) -> None:
    shape = slice_shape(config)
    if shape is None:
        return
    dtype = getattr(torch, config.training.mixed_precision_param, torch.bfloat16)
    q_BLNH = torch.empty(1, 1, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
    k_BKGH = torch.empty(1, 1, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    v_BKGH = torch.empty(1, 1, shape.num_kv_heads, shape.value_head_dim, dtype=dtype, device=device)
    layers = layers_of(config.model_spec and config.model_spec.model)
    window = any(window_of(layer.attention.inner_attention) for layer in layers)
    findings.kernels = refusals(q_BLNH, k_BKGH, v_BKGH, window=window)
    try:
        findings.kernel = choose_kernel(config.slimpipe.kernel, q_BLNH, k_BKGH, v_BKGH, window=window).name
    except ValueError as error:
        findings.errors.append(f"slimpipe.{error}")


def _look_at_files(findings: Findings, config: SlimPipeTrainerConfig) -> None:
    """Files may lie on the machines of the run only, so that a missing one is no error."""
    places = {
        "hf_assets_path": config.hf_assets_path,
        "dataloader.dataset_path": getattr(config.dataloader, "dataset_path", None),
        "checkpoint.initial_load_path": config.checkpoint.initial_load_path if config.checkpoint.enable else None,
    }
    for name, place in places.items():
        if place and "://" not in place and not Path(place).exists():
            findings.warnings.append(f"{name} = {place!r}: there is no such file or folder here")


def _look_at_program(findings: Findings, config: SlimPipeTrainerConfig) -> None:
    setting = setting_of_config(config)
    schedule = config.parallelism.pipeline_parallel_schedule
    program = setting.program(schedule)
    findings.program = (
        f"{program.num_ranks} ranks x {program.num_stages_per_rank} stages, {program.num_microbatches} microbatches x "
        f"{program.num_slices} slices of {program.slice_len} tokens: "
        f"{sum(map(len, program.instructions))} instructions"
    )
    programs = [program]
    if setting.options.context_exchange == "auto" and setting.exchange_costs is None:
        findings.program += " without exchange (auto: decided in the run)"
        programs.append(with_exchange(setting, "on").program(schedule))
    try:
        for each in programs:
            prove(each)
    except ProgramError as error:
        findings.errors.append(f"the program is not sound: {error}")
        return
    findings.program += ", proven" + ", and proven with exchange" * (len(programs) > 1)
