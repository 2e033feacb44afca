"""The `slimpipe` command."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from slimpipe import launcher
from slimpipe.attention.events import AttentionLayer
from slimpipe.attention.kernels import choose_kernel
from slimpipe.options import KERNEL_NAMES, SlimPipeOptions
from slimpipe.runtime.measure import exchange_costs
from slimpipe.summary import rates_text, summarise

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
    train.add_argument("--nproc", type=_positive, metavar="N", help="start N processes instead")
    measure = _add_measure_links(commands)
    argv = sys.argv[1:] if argv is None else argv
    arguments, rest = parser.parse_known_args(argv)
    if rest and arguments.command == "measure-links":
        measure.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if arguments.command == "measure-links":
            return _measure_links(arguments, argv)
        return _train([arguments.config, *rest], arguments.nproc)
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
                "OMP_NUM_THREADS": _threads_per_rank(num_ranks),
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
    command.add_argument("--ranks", type=_positive, metavar="N", help="one per GPU by default, on CPU 2")
    command.add_argument("--device", choices=("cpu", "cuda"), help="cuda by default where there are GPUs")
    command.add_argument("--json", action="store_true", help="print figures as JSON")
    attention = command.add_argument_group("attention, of one rank")
    for flag, default in (("batch", 1), ("slice-len", 4096), ("heads", 32), ("kv-heads", 8), ("head-dim", 128)):
        attention.add_argument(f"--{flag}", type=_positive, default=default, metavar="N", help=f"{default} by default")
    dtypes = ("float32", "bfloat16", "float16")
    attention.add_argument("--dtype", choices=dtypes, help="bfloat16 by default, on CPU float32")
    attention.add_argument("--kernel", choices=KERNEL_NAMES, default="auto")
    command.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # file that rank 0 writes instead of stdout
    return command


def _measure_links(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    is_rank, num_gpus = launcher.under_launcher(), torch.cuda.device_count()
    least = 1 if is_rank else 2
    device = torch.device(arguments.device or ("cuda" if num_gpus >= least else "cpu"))
    on_gpus = device.type == "cuda"
    try:
        if on_gpus and num_gpus < least:
            raise ValueError(f"--device cuda: it needs {least} GPUs, this machine has {num_gpus}; use --device cpu")
        num_ranks = int(os.environ["WORLD_SIZE"]) if is_rank else arguments.ranks or (num_gpus if on_gpus else 2)
        if arguments.ranks not in (None, num_ranks):
            raise ValueError(f"--ranks {arguments.ranks}: {num_ranks} were started; nearest legal value: {num_ranks}")
        if num_ranks < 2:
            raise ValueError("--ranks 1: a link has two ends; nearest legal value: 2")
        if on_gpus and not is_rank and num_ranks > num_gpus:
            raise ValueError(f"--ranks {num_ranks}: each needs a GPU; nearest legal value: {num_gpus}, or --device cpu")
        if is_rank:
            launcher.prepare_rank()
            if on_gpus:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            record(_measure_on_rank)(arguments, device)  # on an error, the traceback also reaches the launcher
            return _OK
        _attention_layer(arguments, device)
    except ValueError as error:
        return _say(error, _USAGE)
    with tempfile.TemporaryDirectory(prefix="slimpipe-") as folder:
        report = Path(folder) / "report"
        launcher.launch(
            [sys.executable, "-m", "slimpipe", *argv, f"--report={report}"],
            num_ranks=num_ranks,
            shown_rank=None,
            log_dir=Path(folder),
            env={"OMP_NUM_THREADS": _threads_per_rank(num_ranks)},
        )
        print(report.read_text(), end="", flush=True)
    return _OK


def _measure_on_rank(arguments: argparse.Namespace, device: torch.device) -> None:
    layer = _attention_layer(arguments, device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    assert dist.group.WORLD is not None
    costs = exchange_costs(layer, options=SlimPipeOptions(), group=dist.group.WORLD, device=device)
    if dist.get_rank() == 0:
        text = rates_text(costs, num_ranks=dist.get_world_size(), device=device.type, as_json=arguments.json) + "\n"
        if arguments.report is None:
            sys.stdout.write(text)
        else:
            arguments.report.write_text(text)
    dist.destroy_process_group()


def _attention_layer(arguments: argparse.Namespace, device: torch.device) -> AttentionLayer:
    """The attention that the flags describe; ValueError where no kernel serves it."""
    heads, kv_heads, dim = arguments.heads, arguments.kv_heads, arguments.head_dim
    if heads % kv_heads:
        divisors = (number for number in range(1, heads + 1) if heads % number == 0)
        nearest = min(divisors, key=lambda number: abs(number - kv_heads))
        raise ValueError(f"--kv-heads {kv_heads}: it must divide --heads {heads}; nearest legal value: {nearest}")
    name = arguments.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    dtype = getattr(torch, name)
    q_BLNH, k_BKGH = (torch.empty(1, 1, count, dim, dtype=dtype, device=device) for count in (heads, kv_heads))
    choose_kernel(arguments.kernel, q_BLNH, k_BKGH, k_BKGH)
    return AttentionLayer(
        batch=arguments.batch,
        slice_len=arguments.slice_len,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        value_head_dim=dim,
        dtype=dtype,
        kernel=arguments.kernel,
        scale=dim**-0.5,
    )


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
    return torch.accelerator.device_count()


def _threads_per_rank(num_ranks: int) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(max(1, cores // num_ranks))


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
