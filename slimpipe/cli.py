"""The `slimpipe` command. Imports torch only for what needs it, so that the rest answers at once."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimpipe import check_cli, launcher, plan_cli, show_cli
from slimpipe.arguments import positive, require_torchtitan
from slimpipe.options import KERNEL_NAMES
from slimpipe.summary import summarise

_OK, _FAILED, _USAGE, _STOPPED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 (a rank failed), 2 (wrong usage or configuration) or 130 (stopped)."""
    parser = argparse.ArgumentParser(prog="slimpipe", description="Slice-level pipeline parallelism in PyTorch.")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
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
    train.add_argument("--nproc", type=positive, metavar="N", help="start N processes instead")
    parsers = {
        "plan": plan_cli.add_parser(commands),
        "show": show_cli.add_parser(commands),
        "check": check_cli.add_parser(commands),
        "measure-links": _add_measure_links(commands),
    }
    argv = sys.argv[1:] if argv is None else argv
    arguments, rest = parser.parse_known_args(argv)
    name = arguments.command
    takes_overrides = name in ("train", "check") or (name == "show" and str(arguments.config).endswith(".toml"))
    if rest and not takes_overrides:
        parsers[name].error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if name == "train":
            return _train([arguments.config, *rest], arguments.nproc)
        return _answer(arguments, rest, argv)
    except launcher.RanksFailed as error:
        return _say(f"{error.failure.details}\nslimpipe: {error}; all ranks have ended", _FAILED, prefix="")
    except launcher.Stopped as stopped:
        return _say(stopped, _STOPPED)
    except KeyboardInterrupt:
        return _say("stopped by SIGINT", _STOPPED)


def _answer(arguments: argparse.Namespace, rest: list[str], argv: Sequence[str]) -> int:
    """Run a command other than train. What it raises as ValueError or OSError is the user's, in one line."""
    try:
        code = _run(arguments, rest, argv)
        sys.stdout.flush()  # here a full disk or a closed pipe shows
        return code
    except ValueError as error:
        return _say(error, _USAGE)
    except OSError as error:
        if error.filename is not None:
            return _say(f"{error.filename}: {error.strerror}", _USAGE)
        # What is left to print must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _OK if isinstance(error, BrokenPipeError) else _say(f"output: {error.strerror or error}", _USAGE)


def _run(arguments: argparse.Namespace, rest: list[str], argv: Sequence[str]) -> int:
    if arguments.command == "plan":
        return plan_cli.run(arguments)
    if arguments.command == "show":
        return show_cli.run(arguments, rest)
    if arguments.command == "check":
        return check_cli.run(arguments, rest)
    from slimpipe import measure_cli

    measure_cli.run(arguments, argv)
    return _OK


def _train(argv: list[str], num_ranks: int | None) -> int:
    try:
        require_torchtitan("training")
    except ValueError as error:
        return _say(error, _USAGE)
    if launcher.under_launcher():
        launcher.prepare_rank()
        return _run_rank(argv)
    from slimpipe.torchtitan.config import check
    from slimpipe.torchtitan.cpu import use_cpu
    from slimpipe.torchtitan.degrees import check_num_ranks, product_of_degrees
    from slimpipe.torchtitan.toml import load_toml

    on_cpu = use_cpu()
    try:
        config = load_toml(argv[0], argv[1:])
        check(config)
        num_ranks = num_ranks or (product_of_degrees(config.parallelism) if on_cpu else _num_accelerators())
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
                "OMP_NUM_THREADS": launcher.threads_per_rank(num_ranks),
                "LOG_RANK": str(shown_rank),  # torchtitan warns if it thinks that the loss is not seen
            },
        )
    except BaseException:
        _remove_unfinished_checkpoints(dump_folder / config.checkpoint.folder, since=started)
        raise
    print(summarise(dump_folder, since=started), flush=True)
    return _OK


def _add_measure_links(commands: Any) -> argparse.ArgumentParser:
    command = commands.add_parser(
        "measure-links",
        allow_abbrev=False,
        help="measure the rates that decide whether attention should move between ranks",
        description="Measure bandwidth and latency between neighbouring ranks and the FLOP rate of one slice's "
        "attention, and print them as lines for a TOML file. Starts its ranks on this machine; started by torchrun, it "
        "is one rank of that run.",
    )
    command.add_argument("--ranks", type=positive, metavar="N", help="one per GPU by default, on CPU 2")
    command.add_argument("--device", choices=("cpu", "cuda"), help="cuda by default where there are GPUs")
    command.add_argument("--json", action="store_true", help="print figures as JSON")
    attention = command.add_argument_group("attention, of one rank")
    for flag, default in (("batch", 1), ("slice-len", 4096), ("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        attention.add_argument(f"--{flag}", type=positive, default=default, metavar="N", help=f"{default} by default")
    dtypes = ("float32", "bfloat16", "float16")
    attention.add_argument("--dtype", choices=dtypes, help="bfloat16 by default, on CPU float32")
    attention.add_argument("--kernel", choices=KERNEL_NAMES, default="auto")
    command.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # file that rank 0 writes instead of stdout
    return command


def _num_accelerators() -> int:
    import torch

    return torch.accelerator.device_count()


def _remove_unfinished_checkpoints(folder: Path, *, since: float) -> None:
    """Remove checkpoints that this run began and did not finish: torch writes one of these two files last."""
    for step in folder.glob("step-*"):
        finished = any((step / name).exists() for name in (".metadata", "model.safetensors.index.json"))
        if step.stat().st_mtime >= since and not finished:
            shutil.rmtree(step, ignore_errors=True)
            print(f"slimpipe: removed unfinished checkpoint {step}", file=sys.stderr)


def _say(message: object, exit_code: int, *, prefix: str = "slimpipe: ") -> int:
    print(f"{prefix}{message}", file=sys.stderr, flush=True)
    return exit_code
