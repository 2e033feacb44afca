"""FSDP2 around stages: exact, one gradient reduction per unit and step; and activation checkpointing of every kind."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from slimpipe import ScheduleInterleavedSlimPipe, ScheduleSlimPipe, SlimPipeOptions
from tests.distributed.parity import TOLERANCE, Case, make_batch, make_schedule, run_step, unsliced
from tests.model import Decoder, relative_error, stage_layers, sum_loss

DP = PP = 2


def fsdp(v: int, m: int, reshard: bool, recompute: bool, exchange: str) -> list[tuple[str, float]]:
    """Runs on four ranks, dp = 2 x pp = 2: errors of this rank's gradients."""
    mesh = init_device_mesh("cpu", (DP, PP), mesh_dim_names=("dp", "pp"))
    dp_rank, pp_rank = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    num_layers, num_stages = 2 * PP, PP * v
    whole_case = Case(p=PP, v=v, n=4, m=m * DP, num_layers=num_layers)
    case = Case(p=PP, v=v, n=4, m=m, num_layers=num_layers)
    torch.manual_seed(0)
    whole = Decoder(layers=range(num_layers)).state_dict()
    parts = []
    for index in range(pp_rank, num_stages, PP):
        part = Decoder(
            layers=stage_layers(num_layers, num_stages)[index],
            is_first=index == 0,
            is_last=index == num_stages - 1,
            recompute=recompute,
        )
        part.load_state_dict({name: whole[name] for name in part.state_dict()})
        for block in part.blocks.values():
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshard)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)  # the loss is divided by the tokens of the global batch
        parts.append(part)
    stages = [
        PipelineStage(part, pp_rank + j * PP, num_stages, torch.device("cpu"), group=mesh["pp"].get_group())
        for j, part in enumerate(parts)
    ]
    options = SlimPipeOptions(measure_memory=True, context_exchange=exchange, exchange_granularity=1)
    settings = {"loss_fn": sum_loss, "num_slices": case.n, "options": options}
    if v == 1:
        schedule = ScheduleSlimPipe(stages[0], m, **settings)
    else:
        schedule = ScheduleInterleavedSlimPipe(stages, m, **settings)
    batches = [make_batch(whole_case, seed) for seed in (1, 2)]
    num_units = sum(isinstance(module, FSDPModule) for part in parts for module in part.modules())
    # A root whose own parameters are none (a middle stage) has nothing to reduce.
    num_units -= sum(part.embedding is None and part.head is None for part in parts)

    def step(batch, evaluate=False) -> Counter[str]:
        tokens, labels, _ = (None if x is None else x.chunk(DP)[dp_rank] for x in batch)
        run = schedule.eval if evaluate else schedule.step
        kwargs = {} if evaluate else {"loss_kwargs": {"num_tokens": batch[0].numel()}}
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run(
                *((tokens,) if pp_rank == 0 else ()),
                target=labels if pp_rank == PP - 1 else None,
                return_outputs=False,
                **kwargs,
            )
        # profiler.events() would make a tree of them, which takes longer than the step.
        return Counter(event.name() for event in profiler.profiler.kineto_results.events())

    for evaluate, batch in ((False, batches[0]), (True, batches[1]), (False, batches[1])):
        counts = step(batch, evaluate)
        # Gathered ones would be taken for the newest after the optimizer's next step.
        assert all(isinstance(parameter, DTensor) for part in parts for parameter in part.parameters()), "gathered"
        assert counts["c10d::_reduce_scatter_base_"] == (0 if evaluate else num_units), (evaluate, counts)
    assert bool(schedule.program.transfers) == (exchange == "on")
    schedule.close()
    expected, _ = unsliced(whole_case, batches)
    return [
        (name, relative_error(parameter.grad.full_tensor(), expected[name]))
        for part in parts
        for name, parameter in part.named_parameters()
    ]


@pytest.mark.parametrize(
    ("v", "m", "reshard", "recompute", "exchange"),
    [
        (1, 2, False, False, "off"),
        (2, 2, False, True, "off"),
        (1, 1, True, False, "off"),
        (2, 3, True, True, "off"),
        (2, 2, True, True, "on"),
    ],
)
def test_fsdp_reduces_once_and_is_exact(
    rank_pool, v: int, m: int, reshard: bool, recompute: bool, exchange: str
) -> None:
    for rank, errors in enumerate(rank_pool(DP * PP).run(fsdp, v, m, reshard, recompute, exchange, timeout=120)):
        assert errors
        for name, error in errors:
            assert error <= TOLERANCE, f"rank {rank}: {name} is off by {error:.1e}"


# Activation checkpointing --------------------------------------------------------------------------------------------


def _save_products(_ctx, op, *_args, **_kwargs):
    keep = (
        torch.ops.aten.mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    )
    return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE


def _selective(block, *args):
    context_fn = functools.partial(create_selective_checkpoint_contexts, _save_products)
    return checkpoint(block, *args, use_reentrant=False, context_fn=context_fn)


def _to_the_end(block, *args):
    return checkpoint(block, *args, use_reentrant=False, early_stop=False)


def _reentrant(block, *args):
    return checkpoint(block, *args, use_reentrant=True)


KINDS = {"selective": _selective, "early_stop off": _to_the_end, "reentrant": _reentrant}


class CheckpointedBlock(nn.Module):
    """A block under a kind of checkpointing; parameter names stay."""

    def __init__(self, block: nn.Module, kind: str) -> None:
        super().__init__()
        self.inside, self.kind = block, kind

    def forward(self, *args):
        return KINDS[self.kind](self.inside, *args)


def checkpointed(kind: str, v: int, keep_output: bool) -> list[tuple[str, float]]:
    case = Case(p=2, v=v, n=4, m=3, num_layers=2 * 2 * v, keep_output=keep_output, documents=(5, 4, 7))
    schedule, parts = make_schedule(case)
    for part in parts:
        for name, block in part.blocks.items():
            part.blocks[name] = CheckpointedBlock(block, kind)
    batches = [make_batch(case, seed) for seed in (1, 2)]
    run_step(schedule, case, batches[0])
    run_step(schedule, case, batches[1], evaluate=True)
    run_step(schedule, case, batches[1])
    schedule.close()
    expected, _ = unsliced(case, batches)
    return [
        (name, relative_error(parameter.grad, expected[name.replace("inside.", "")]))
        for part in parts
        for name, parameter in part.named_parameters()
    ]


@pytest.mark.parametrize("keep_output", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_is_exact(rank_pool, kind: str, keep_output: bool) -> None:
    for v in (1, 2):
        for errors in rank_pool(2).run(checkpointed, kind, v, keep_output):
            for name, error in errors:
                assert error <= TOLERANCE, f"{name} is off by {error:.1e}"
