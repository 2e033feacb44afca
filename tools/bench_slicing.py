"""What slicing costs attention: forward and backward of a sequence in slices, over the same in one piece.

    python tools/bench_slicing.py [--num-slices 8 16] [--seq-len 8192] [--rounds 7] [--json]

Both run `slimpipe.SliceAttention`, the slices with everything a pipeline stage does for one attention layer: K,V
copied into the planned store, past and own part merged, dK,dV of earlier slices carried. Rounds alternate; the ratio
is the median of the rounds' own ratios. The ratio of the thread's CPU times beside it holds on a busy machine, too.
Figures are printed only if output and gradients of both agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_attention import AttentionCase, Inputs, random_qkv_and_dout, relative_error

TOLERANCE = 1e-5


def case_of(args: argparse.Namespace) -> AttentionCase:
    names = "batch", "seq_len", "num_heads", "num_kv_heads", "head_dim"
    return AttentionCase(random_qkv_and_dout(**{name: getattr(args, name) for name in names}), kernel=args.kernel)


def seconds(run: Callable[[list], object], inputs: Inputs) -> tuple[float, float]:
    """Wall-clock and CPU time of ``run(inputs)``."""
    wall, cpu = time.perf_counter(), time.thread_time()
    run(inputs)
    return time.perf_counter() - wall, time.thread_time() - cpu


def worst_error(case: AttentionCase, num_slices: int) -> float:
    """Largest relative error of output, dq, dk, dv of the slices, against one piece."""
    return max(map(relative_error, case.results(num_slices), case.results(1)))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds.

    Raises:
        ValueError: Slices and whole do not agree.
    """
    torch.set_num_threads(args.num_threads)
    case = case_of(args)
    for num_slices in args.num_slices:
        error = worst_error(case, num_slices)  # warms up, too
        if not error <= TOLERANCE:
            raise ValueError(
                f"{num_slices} slices differ from the whole by {error:.1e} relative, more than {TOLERANCE}"
            )
    rounds = []
    for _ in range(args.rounds):
        times = {0: seconds(case.whole, case.inputs(1))}
        for num_slices in args.num_slices:
            times[num_slices] = seconds(case.sliced, case.inputs(num_slices))
        rounds.append(times)

    def median(num_slices: int, clock: int, *, relative: bool) -> float:
        return statistics.median(times[num_slices][clock] / (times[0][clock] if relative else 1.0) for times in rounds)

    slicings = [
        {
            "num_slices": n,
            "seconds": median(n, 0, relative=False),
            "ratio": median(n, 0, relative=True),
            "cpu_ratio": median(n, 1, relative=True),
        }
        for n in args.num_slices
    ]
    return {"setting": vars(args), "unsliced_seconds": median(0, 0, relative=False), "slicings": slicings}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare attention in slices with attention in one piece, forward and backward, fp32.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--num-slices", type=int, nargs="+", default=[8], help="several are compared")
    parser.add_argument("--seq-len", type=int, default=8192, help=" ")
    parser.add_argument("--num-heads", type=int, default=8, help=" ")
    parser.add_argument("--num-kv-heads", type=int, default=8, help=" ")
    parser.add_argument("--head-dim", type=int, default=64, help=" ")
    parser.add_argument("--batch", type=int, default=1, help=" ")
    parser.add_argument("--kernel", default="auto", help="see SlimPipeOptions.kernel")
    parser.add_argument("--num-threads", type=int, default=1, help=" ")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    args = parser.parse_args(argv)
    for num_slices in args.num_slices:
        if num_slices < 1 or args.seq_len % num_slices:
            parser.error(f"--seq-len {args.seq_len} does not divide into --num-slices {num_slices}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        report = measure(args)
    except ValueError as error:
        sys.exit(str(error))
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(f"in one piece: {report['unsliced_seconds']:.3f} s")
    for slicing in report["slicings"]:
        print(
            "{num_slices:3} slices: {seconds:.3f} s, ratio {ratio:.3f}, ratio of CPU times {cpu_ratio:.3f}".format_map(
                slicing
            )
        )


if __name__ == "__main__":
    main()
