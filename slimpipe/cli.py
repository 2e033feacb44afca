"""The `slimpipe` command."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimpipe import launcher
from slimpipe.summary import summarise

_OK, _FAILED, _USAGE, _STOPPED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 (a rank failed), 2 (wrong usage or configuration) or 130 (stopped)."""
    parser = argparse.ArgumentParser(prog="slimpipe", description="Slice-level pipeline parallelism in PyTorch.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    train = commands.add_parser(
        "train",
        allow_abbrev=False,
        usage="slimpipe train [-h] [--nproc N] CONFIG.toml [--section.key value ...]",
        help="train in torchtitan from a TOML file",
        description="Train in torchtitan from a TOML file. Starts one process per GPU of this machine, or on CPU as "
        "many as the file's parallel degrees ask for. Started by torchrun, it is one rank of that run.",
        epilog="--section.key value sets any key of the file, as in --training.steps 5, and wins over it.",
    )
    train.add_argument("config", metavar="CONFIG.toml", help="configuration file")
    train.add_argument("--nproc", type=_positive, metavar="N", help="start N processes instead")
    arguments, overrides = parser.parse_known_args(argv)
    try:
        return _train([arguments.config, *overrides], arguments.nproc)
    except launcher.RanksFailed as error:
        return _say(f"{error.failure.details}\nslimpipe: {error}; all ranks have ended", _FAILED, prefix="")
    except launcher.Stopped as stopped:
        return _say(stopped, _STOPPED)
    except KeyboardInterrupt:
        return _say("stopped by SIGINT", _STOPPED)


def _train(argv: list[str], num_ranks: int | None) -> int:
    if importlib.util.find_spec("torchtitan") is None:
        return _say("training needs torchtitan; install it with: pip install 'slimpipe[torchtitan]'", _USAGE)
    if launcher.under_launcher():
        launcher.prepare_rank()
        return _run_rank(argv)
    from slimpipe.torchtitan.config import check
    from slimpipe.torchtitan.cpu import use_cpu
    from slimpipe.torchtitan.toml import load_toml

    on_cpu = use_cpu()
    try:
        config = load_toml(argv[0], argv[1:])
        check(config)
        num_ranks = num_ranks or (_product_of_degrees(config.parallelism) if on_cpu else _num_accelerators())
        check_num_ranks(config.parallelism, num_ranks)
    except ValueError as error:  # ConfigError included
        return _say(error, _USAGE)
    return _launch(argv, config, num_ranks)


def _run_rank(argv: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.errors import record

    from slimpipe.torchtitan.config import ConfigError
    from slimpipe.torchtitan.train import train

    try:
        record(train)(argv)  # on an error, the traceback also reaches the launcher
    except ConfigError as error:
        return _say(error, _USAGE)
    return _OK


def _launch(argv: list[str], config: Any, num_ranks: int) -> int:
    started = time.time() - 1  # file systems may keep coarser times
    dump_folder = Path(config.dump_folder)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_pipeline_ranks = config.parallelism.pipeline_parallel_degree
    # torchtitan logs its metrics from the first rank of the last stage.
    shown_rank = num_ranks // num_pipeline_ranks * (num_pipeline_ranks - 1)
    print(f"slimpipe: starting {num_ranks} ranks", flush=True)
    try:
        launcher.launch(
            [sys.executable, "-m", "slimpipe", "train", *argv],
            num_ranks=num_ranks,
            shown_rank=shown_rank,
            log_dir=dump_folder / "slimpipe" / "logs",
            env={
                "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
                "LOG_RANK": str(shown_rank),  # torchtitan warns if it thinks that the loss is not seen
            },
        )
    except BaseException:
        _remove_unfinished_checkpoints(dump_folder / config.checkpoint.folder, since=started)
        raise
    print(summarise(dump_folder, since=started), flush=True)
    return _OK


def check_num_ranks(parallelism: Any, num_ranks: int) -> None:
    """Check that the parallel degrees fit `num_ranks`.

    Raises:
        ValueError: they do not; the message names a number that fits.
    """
    product = _product_of_degrees(parallelism)
    if parallelism.data_parallel_shard_degree == -1:
        fits, rule = num_ranks % product == 0, f"a multiple of {product}"
        nearest = max(1, round(num_ranks / product)) * product
    else:
        fits, rule, nearest = num_ranks == product, str(product), product
    if not fits:
        raise ValueError(
            f"{num_ranks} ranks: their number must be {rule}, the product of the degrees in [parallelism]; "
            f"use --nproc {nearest}, or change a degree"
        )


def _num_accelerators() -> int:
    import torch

    return torch.accelerator.device_count()


def _product_of_degrees(parallelism: Any) -> int:
    return (
        parallelism.data_parallel_replicate_degree
        * max(1, parallelism.data_parallel_shard_degree)  # -1 takes the ranks that the others leave
        * parallelism.context_parallel_degree
        * parallelism.tensor_parallel_degree
        * parallelism.pipeline_parallel_degree
    )


def _remove_unfinished_checkpoints(folder: Path, *, since: float) -> None:
    """Remove checkpoints that this run began and did not finish: torch writes one of these two files last."""
    for step in folder.glob("step-*"):
        finished = any((step / name).exists() for name in (".metadata", "model.safetensors.index.json"))
        if step.stat().st_mtime >= since and not finished:
            shutil.rmtree(step, ignore_errors=True)
            print(f"slimpipe: removed unfinished checkpoint {step}", file=sys.stderr)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1; nearest legal value: 1")
    return int(text)


def _say(message: object, exit_code: int, *, prefix: str = "slimpipe: ") -> int:
    print(f"{prefix}{message}", file=sys.stderr, flush=True)
    return exit_code
