"""`slimpipe measure-links`: starts ranks, or is one of them, and prints what they measured."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from slimpipe import launcher
from slimpipe.attention.events import AttentionLayer
from slimpipe.attention.kernels import choose_kernel
from slimpipe.nearest import nearest_divisor
from slimpipe.options import SlimPipeOptions
from slimpipe.runtime.measure import exchange_costs
from slimpipe.summary import rates_text


def run(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    """Run the command; ValueError where it cannot be run as asked."""
    is_rank, num_gpus = launcher.under_launcher(), torch.cuda.device_count()
    least = 1 if is_rank else 2
    device = torch.device(arguments.device or ("cuda" if num_gpus >= least else "cpu"))
    on_gpus = device.type == "cuda"
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
        return
    _attention_layer(arguments, device)
    with tempfile.TemporaryDirectory(prefix="slimpipe-") as folder:
        report = Path(folder) / "report"
        launcher.launch(
            [sys.executable, "-m", "slimpipe", *argv, f"--report={report}"],
            num_ranks=num_ranks,
            shown_rank=None,
            log_dir=Path(folder),
            env={"OMP_NUM_THREADS": launcher.threads_per_rank(num_ranks)},
        )
        print(report.read_text(), end="", flush=True)


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
        nearest = nearest_divisor(heads, kv_heads)
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
