"""Models and losses that would train wrongly without a sound: each is exact or raises. One rank is enough to see it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate

from slimpipe import ScheduleSlimPipe, SliceAttention, SlimPipeOptions
from slimpipe.runtime.refusals import check_module
from tests.model import IGNORED, Decoder, DenseAttention, relative_error, sum_loss

S, SLICES = 16, 4


def make_schedule(model: nn.Module, loss_fn=sum_loss, *, m: int = 1, **options) -> ScheduleSlimPipe:
    stage = SimpleNamespace(
        submod=model,
        stage_index=0,
        num_stages=1,
        group=None,
        group_rank=0,
        group_size=1,
        is_first=True,
        is_last=True,
        device="cpu",
    )
    return ScheduleSlimPipe(stage, m, loss_fn=loss_fn, num_slices=SLICES, options=SlimPipeOptions(**options))


def make_model(inner: type[nn.Module] = SliceAttention, **settings) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers=range(2), inner=inner, **settings)


def make_batch(m: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, 32, (m, S), generator=generator) for _ in range(2))
    return tokens, labels


def loss_without_graph_where_all_is_ignored(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return sum_loss(output, target) if (target != IGNORED).any() else torch.zeros((), dtype=output.dtype)


@pytest.mark.parametrize("m", [1, 2])
def test_an_ignored_slice_without_graph_still_gives_gradients_to_its_keys(m: int) -> None:
    tokens, labels = make_batch(m)
    labels[:, : S // SLICES] = IGNORED
    model, truth = make_model(), make_model(DenseAttention)
    make_schedule(model, loss_without_graph_where_all_is_ignored, m=m).step(tokens, target=labels)
    sum_loss(truth(tokens, torch.arange(S).expand(m, S)), labels).backward()
    for (name, mine), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert relative_error(mine.grad, theirs.grad) < 1e-10, name


def test_frozen_layers_keep_no_outputs() -> None:
    model = make_model()
    model.embedding.requires_grad_(False)
    model.blocks["0"].requires_grad_(False)
    schedule = make_schedule(model, m=6, measure_memory=True)
    tokens, labels = make_batch(6)
    schedule.step(tokens, target=labels)
    six = schedule.metrics()["peak_live_bytes"]
    model.zero_grad()
    schedule = make_schedule(model, m=2, measure_memory=True)
    schedule.step(tokens[:2], target=labels[:2])
    assert six == schedule.metrics()["peak_live_bytes"]


class DropsMasks(nn.Module):
    """An inner attention whose block forgets to hand the masks on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SliceAttention()

    def forward(self, q, k, v, *, positions, attention_masks=None, enable_gqa=False):
        return self.inner(q, k, v, positions=positions, enable_gqa=enable_gqa)


class Torch(nn.Module):
    def forward(self, q, k, v, *, positions, attention_masks=None, enable_gqa=False):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa).transpose(1, 2)


@pytest.mark.parametrize(
    "inner, message",
    [
        (DropsMasks, "0 of its 2 SliceAttention layers were called with the attention_masks"),
        (Torch, "calls scaled_dot_product_attention, which would see one slice only"),
    ],
)
def test_attention_that_sees_one_slice_only(inner: type[nn.Module], message: str) -> None:
    tokens, labels = make_batch()
    with pytest.raises(ValueError, match=message):
        make_schedule(make_model(inner)).step(tokens, target=labels)


def test_a_loss_that_averages() -> None:
    tokens, labels = make_batch()
    labels[:, : S // SLICES] = IGNORED  # nothing can be seen on the first slice

    def mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten()).nan_to_num()

    with pytest.raises(ValueError, match="it averages, and a schedule that adds up slices needs a sum"):
        make_schedule(make_model(), mean).step(tokens, target=labels)


def test_replicate_is_refused_like_ddp(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make_model()
        replicate(model)
        with pytest.raises(ValueError, match=r"uses DistributedDataParallel .*fully_shard"):
            check_module(model, index=0, has_attention=True)
    finally:
        torch.distributed.destroy_process_group()


def test_the_kernel_option_reaches_every_layer_and_is_checked_first() -> None:
    tokens, labels = make_batch()
    calls = []

    class Counts(Decoder):
        def forward(self, *args, **kwargs):
            calls.append(kwargs["attention_masks"].kernel)
            return super().forward(*args, **kwargs)

    model = Counts(layers=range(1))
    with pytest.raises(ValueError, match="kernel = 'torch_cuda_flash': torch_cuda_flash needs tensors on a GPU"):
        make_schedule(model, kernel="torch_cuda_flash").step(tokens, target=labels)
    assert not calls
    make_schedule(model, kernel="reference").step(tokens, target=labels)
    assert calls == ["reference"] * SLICES
