"""Names of torchtitan 0.2's TOML files: read where their meaning is unambiguous, answered with what to write otherwise.

Works on parsed tables (nested dicts), before anything is looked up in torchtitan's configuration.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.optimizer import OptimizersContainer

from slimpipe.torchtitan.values import ValueMismatch, read_value, suggest

_MOVED = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.hf_assets_path": "hf_assets_path",
    "model.tokenizer_path": "hf_assets_path",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "training.batch_size": "training.local_batch_size",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.compile": "compile.enable",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "validation.enable": "validator.enable",
    "validation.freq": "validator.freq",
    "validation.steps": "validator.steps",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
    "profiling.enable_profiling": "profiler.enable_profiling",
    "profiling.save_traces_folder": "profiler.save_traces_folder",
    "profiling.profile_freq": "profiler.profile_freq",
    "profiling.enable_memory_snapshot": "profiler.enable_memory_snapshot",
    "profiling.save_memory_snapshot_folder": "profiler.save_memory_snapshot_folder",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        "activation_checkpoint.force_recompute_mm_shapes_by_fqns"
    ),
}

_QUANTIZED = 'quantization is part of the model now: write for example [model] config = "llama3_debugmodel_float8"'

_GONE = {
    "job.description": "it has no effect; remove it",
    "job.config_file": "give the TOML file as an argument: slimpipe train FILE.toml",
    "job.custom_config_module": 'write [model] config = "module:function"',
    "model.converters": _QUANTIZED,
    "model.print_after_conversion": "it is gone; remove it",
    "float8": _QUANTIZED,
    "mx": _QUANTIZED,
    "quantize": _QUANTIZED,
    "memory_estimation": "it is gone; remove it",
    "fault_tolerance": "it is gone; remove it",
    "experimental.custom_import": 'write [override] imports = ["module.function"]',
    "experimental.custom_args_module": 'write [model] config = "module:function"',
    "parallelism.disable_loss_parallel": "loss parallelism follows tensor parallelism now; remove it",
    "parallelism.pipeline_parallel_split_points": "write parallelism.module_fqns_per_model_part",
    "parallelism.context_parallel_rotate_method": "it is gone; remove it",
    "parallelism.expert_tensor_parallel_degree": "it is gone; remove it",
    "optimizer.early_step_in_backward": "it is gone; remove it",
    "activation_checkpoint.early_stop": "recomputing never stops early now; remove it",
    "checkpoint.enable_ft_dataloader_checkpoints": "it is gone; remove it",
    "validation.local_batch_size": "validation takes training.local_batch_size; remove it",
    "validation.seq_len": "validation takes training.seq_len; remove it",
}

_OPTIMIZER_NAMES = ("Adam", "AdamW", "DistMuon")
_OPTIMIZER_KEYS = ("name", "lr", "beta1", "beta2", "eps", "weight_decay")


def translate_names(tables: dict[str, Any]) -> list[str]:
    """Moves old names in `tables` to where torchtitan 0.3 has them, in place.

    Returns:
        One error per name that has no single meaning now, and per setting given under both names.
    """
    errors = []
    checkpointing = tables.get("activation_checkpoint")
    if isinstance(checkpointing, dict) and checkpointing.pop("selective_ac_option", "op") != "op":
        errors.append(
            "activation_checkpoint.selective_ac_option: torchtitan now chooses by operator only; remove it, or write "
            '[activation_checkpoint] mode = "full"'
        )
    for path, advice in _GONE.items():
        if _pop(tables, path) is not None:
            errors.append(f"{path}: a name of torchtitan 0.2; {advice}")
    for old, new in _MOVED.items():
        value = _pop(tables, old)
        if value is not None and not put(tables, new, value):
            errors.append(f"{old}: torchtitan 0.2's name of {new}, which is given too; remove one of them")
    return errors


def fold_optimizer(table: dict[str, Any], current: OptimizersContainer.Config) -> list[str]:
    """Turns 0.2's `[optimizer] name, lr, beta1, beta2, eps, weight_decay` into `param_groups`, in place.

    Returns:
        Errors, also for a value of the wrong type.
    """
    old = {key: table.pop(key) for key in _OPTIMIZER_KEYS if key in table}
    if not old:
        return []
    if "param_groups" in table or len(current.param_groups) != 1 or current.param_groups[0].pattern != ".*":
        return [
            f"optimizer.{next(iter(old))}: there are several parameter groups; write the value into "
            "[[optimizer.param_groups]] optimizer_kwargs"
        ]
    group = current.param_groups[0]
    name, kwargs, errors = group.optimizer_name, dict(group.optimizer_kwargs), []
    betas = list(kwargs.get("betas", (0.9, 0.95)))
    for key, value in old.items():
        try:
            value = read_value(value, str if key == "name" else float, _no_table)
        except ValueMismatch as mismatch:
            errors.append(f"optimizer.{key}: {mismatch}")
            continue
        if key == "name":
            name = value
        elif key in ("beta1", "beta2"):
            betas[key == "beta2"] = value
            kwargs["betas"] = tuple(betas)
        else:
            kwargs[key] = value
    if name not in _OPTIMIZER_NAMES:
        errors.append(f'optimizer.name: no optimizer "{name}"{suggest(name, _OPTIMIZER_NAMES)}')
    table["param_groups"] = [{"pattern": ".*", "optimizer_name": name, "optimizer_kwargs": kwargs}]
    return errors


def put(tables: dict[str, Any], path: str, value: Any) -> bool:
    """Sets `tables[a][b]` for path "a.b", making tables on the way.

    Returns:
        False, with nothing changed, when the place is taken or the way leads through something else than a table.
    """
    *parents, key = path.split(".")
    for parent in parents:
        tables = tables.setdefault(parent, {})
        if not isinstance(tables, dict):
            return False
    if key in tables:
        return False
    tables[key] = value
    return True


def _pop(tables: dict[str, Any], path: str) -> Any:
    """Takes out the value at `path`, and its table when that leaves it empty; None when there is none."""
    head, _, rest = path.partition(".")
    if not rest:
        return tables.pop(head, None)
    inner = tables.get(head)
    if not isinstance(inner, dict):
        return None
    value = _pop(inner, rest)
    if value is not None and not inner:
        del tables[head]
    return value


def _no_table(cls: type, table: dict[str, Any]) -> Any:
    raise ValueMismatch("must not be a table")
