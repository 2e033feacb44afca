"""A vocabulary shared by ranks: exact, tied and untied, with uneven and empty shards; its memory; FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimpipe.vocabulary import VocabularyEmbedding, VocabularyHead, shard_rows
from tests.model import IGNORED, relative_error

TOLERANCE = 1e-10
DIM = 6
SHAPE_BL = (2, 5)  # of a slice
NUM_SLICES = 3


def make_weights(vocab_size: int, tied: bool) -> tuple[nn.Embedding, nn.Linear]:
    torch.manual_seed(vocab_size)
    embedding = nn.Embedding(vocab_size, DIM, dtype=torch.float64)
    linear = nn.Linear(DIM, vocab_size, bias=False, dtype=torch.float64)
    if tied:
        linear.weight = embedding.weight
    return embedding, linear


def make_slices(vocab_size: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Ids and labels of three slices: some labels ignored, all ignored, none ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, vocab_size, (NUM_SLICES, *SHAPE_BL), generator=generator) for _ in range(2))
    labels[0][torch.rand(SHAPE_BL, generator=generator) < 0.4] = IGNORED
    labels[1] = IGNORED
    return list(zip(ids, labels))


def plain_loss(hidden_BLD: Tensor, linear: nn.Linear, labels_BL: Tensor, denominator: float = 1) -> Tensor:
    return F.cross_entropy(linear(hidden_BLD).flatten(0, -2), labels_BL.flatten(), reduction="sum") / denominator


# Exactness -----------------------------------------------------------------------------------------------------------


def parity(vocab_size: int, tied: bool, reduce_to: int | str | None, block_size: int) -> list[tuple[str, float]]:
    """Errors of this rank after three slices: ids -> embedding on rank 0 -> tanh -> head -> gradient back to rank 0."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    whole_embedding, whole_linear = make_weights(vocab_size, tied)
    head = VocabularyHead.from_linear(whole_linear, group=group, block_size=block_size, reduce_to=reduce_to)
    embedding = VocabularyEmbedding.from_embedding(whole_embedding, group=group)
    if tied:
        embedding = VocabularyEmbedding(head.weight, vocab_size=vocab_size, group=group)
    errors = []
    for ids_BL, labels_BL in make_slices(vocab_size):
        expected_hidden = whole_embedding(ids_BL).tanh()
        expected_hidden.retain_grad()
        expected = plain_loss(expected_hidden, whole_linear, labels_BL, denominator=7)
        expected.backward()

        embedded = embedding(ids_BL)
        hidden = embedded.tanh()
        received = hidden.detach().clone()
        dist.broadcast(received, group_src=0)
        received.requires_grad_()
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            loss = head(received, labels_BL, denominator=7)
        num_blocks = -(-labels_BL.numel() // block_size)
        assert all_reduce.call_count == (size > 1) * (2 * num_blocks + (reduce_to == "all"))
        loss.backward()
        with torch.no_grad():
            errors.append(("raw sum", relative_error(head(received, labels_BL), expected * 7)))
        errors.append(("loss", relative_error(loss, expected)))
        if reduce_to is None:
            dist.all_reduce(received.grad)
        elif reduce_to not in ("all", rank):
            assert received.grad is None
            received.grad = torch.empty_like(received)
        dist.broadcast(received.grad, group_src=reduce_to if isinstance(reduce_to, int) else 0)
        errors.append(("hidden", relative_error(received.grad, expected_hidden.grad)))
        if rank == 0:
            hidden.backward(received.grad)
        else:
            assert not embedded.any() and embedded.untyped_storage().nbytes() == 8
            embedded.backward(torch.full_like(received, torch.nan))
        if (labels_BL == IGNORED).all():
            assert loss == 0 and not received.grad.any()
    rows = slice(head.rows.start, head.rows.stop)
    for name, shared, whole in (("head", head, whole_linear), ("embedding", embedding, whole_embedding)):
        assert shared.weight.shape == shared.weight.grad.shape == (len(head.rows), DIM)
        errors.append((name, relative_error(shared.weight.grad, whole.weight.grad[rows])))
    return errors


def wrong(results: list[list[tuple[str, float]]]) -> list[tuple[int, str, float]]:
    """Rank, name and error wherever the error is too large."""
    assert all(results)
    return [
        (rank, name, error)
        for rank, errors in enumerate(results)
        for name, error in errors
        if not error <= TOLERANCE  # NaN is wrong, too
    ]


@pytest.mark.parametrize("vocab_size", [10, 9, 1, 257, 50257])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_loss_and_gradients_equal_the_plain_model(rank_pool, num_ranks: int, vocab_size: int) -> None:
    for tied, reduce_to, block_size in ((False, num_ranks - 1, 4), (True, "all", 10), (True, None, 3)):
        assert not wrong(rank_pool(num_ranks).run(parity, vocab_size, tied, reduce_to, block_size))


def test_nine_rows_over_eight_ranks(rank_pool) -> None:
    for tied in (False, True):
        assert not wrong(rank_pool(8).run(parity, 9, tied, 7, 4))


def bfloat16() -> list[tuple[str, float, float]]:
    """Loss and both gradients: this rank's error, and that of a plain bfloat16 head."""
    torch.manual_seed(0)
    vocab_size, dim, num_tokens = 1000, 64, 64
    linear = nn.Linear(dim, vocab_size, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(linear.weight, std=0.2)
    hidden_TD = torch.randn(num_tokens, dim, dtype=torch.bfloat16)
    labels_T = torch.randint(0, vocab_size, (num_tokens,))

    def run(loss_of, weight, hidden_TD) -> tuple[Tensor, ...]:
        loss = loss_of(hidden_TD.requires_grad_())
        return loss, *torch.autograd.grad(loss, (hidden_TD, weight))

    exact = nn.Linear(dim, vocab_size, bias=False, dtype=torch.float64)
    exact.load_state_dict(linear.state_dict())
    truth = run(lambda x: plain_loss(x, exact, labels_T), exact.weight, hidden_TD.double())
    plain = run(
        lambda x: F.cross_entropy(linear(x).float(), labels_T, reduction="sum"), linear.weight, hidden_TD.clone()
    )
    head = VocabularyHead.from_linear(linear, group=dist.group.WORLD, block_size=16)
    ours = run(lambda x: head(x, labels_T), head.weight, hidden_TD)
    rows = slice(head.rows.start, head.rows.stop)
    truth, plain = ((*results[:2], results[2][rows]) for results in (truth, plain))
    names = ("loss", "hidden", "weight")
    return [(n, relative_error(a, t), relative_error(b, t)) for n, a, b, t in zip(names, ours, plain, truth)]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bfloat16_is_about_as_exact_as_a_plain_head(rank_pool, num_ranks: int) -> None:
    for errors in rank_pool(num_ranks).run(bfloat16):
        for name, ours, plain in errors:
            assert ours <= 1.5 * plain, f"{name} is off by {ours:.2e}, in a plain head by {plain:.2e}"


# Memory --------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages made inside that are still alive: now, and at most after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for x in tree_leaves(outputs):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in known:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.now)
        return outputs

    @property
    def now(self) -> int:
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        return sum(num_bytes for _, num_bytes in self._storages.values())


def logit_memory(vocab_size: int, dtype: torch.dtype, with_gradients: bool) -> tuple[int, int, int, int]:
    """Bytes of one forward of the head: most alive, left after it; of one block's logits, of all that is no logits."""
    dim, num_tokens, block_size = 4, 100, 32
    linear = nn.Linear(dim, vocab_size, bias=False, dtype=dtype)
    head = VocabularyHead.from_linear(linear, group=dist.group.WORLD, block_size=block_size, reduce_to=0)
    hidden_TD = torch.randn(num_tokens, dim, dtype=dtype).requires_grad_()
    labels_T = torch.randint(0, vocab_size, (num_tokens,))
    itemsize = max(dtype.itemsize, 4)
    num_rows = -(-vocab_size // dist.get_world_size())
    grads = 2 * (num_tokens + num_rows) * dim * (itemsize + dtype.itemsize)  # wide and narrow, products and sums
    vectors = 20 * num_tokens * 8  # labels, rows, scales, statistics
    with LiveBytes() as live, torch.set_grad_enabled(with_gradients):
        loss = head(hidden_TD, labels_T)
        left = live.now
    assert loss.isfinite()
    return live.most, left, block_size * num_rows * itemsize, grads + vectors


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logits_and_softmax_take_two_blocks_at_most_and_die(rank_pool, dtype: torch.dtype, with_gradients) -> None:
    for num_ranks in (2, 4):
        for most, left, logits, others in rank_pool(num_ranks).run(logit_memory, 8001, dtype, with_gradients):
            assert logits / 2 < most <= 2 * logits + others  # the last rank has fewer rows
            assert left <= others < logits


# FSDP2 ---------------------------------------------------------------------------------------------------------------


def fsdp(vocab_size: int, reshard: bool) -> list[tuple[str, float]]:
    """Errors of head and embedding over pp = 2, their rows sharded once more over dp = 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    whole_embedding, whole_linear = make_weights(vocab_size, tied=False)
    head = VocabularyHead.from_linear(whole_linear, group=mesh["pp"], block_size=4, reduce_to=1)
    embedding = VocabularyEmbedding.from_embedding(whole_embedding, group=mesh["pp"])
    units = [module for module in (head, embedding) if len(module.rows) > 0]
    for module in units:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    hidden_grads, losses = {}, {}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for index, (ids_BL, labels_BL) in enumerate(make_slices(vocab_size, mesh.get_coordinate()[0])):
            last = index == NUM_SLICES - 1
            for module in units:
                module.set_is_last_backward(last)
                module.set_reshard_after_backward(last)
                module.set_requires_gradient_sync(last)
            embedded = embedding(ids_BL)
            hidden = embedded.detach().clone()
            dist.broadcast(hidden, group=mesh["pp"].get_group(), group_src=0)
            hidden.requires_grad_()
            loss = head(hidden, labels_BL, denominator=7)
            loss.backward()
            embedded.backward(torch.ones_like(embedded) if mesh["pp"].get_local_rank() == 0 else embedded)
            losses[index], hidden_grads[index] = loss.detach(), hidden.grad
    num_reductions = sum(event.name == "c10d::_reduce_scatter_base_" for event in profiler.events())
    assert num_reductions == len(units)

    errors = []
    for dp_rank in range(2):
        for index, (ids_BL, labels_BL) in enumerate(make_slices(vocab_size, dp_rank)):
            embedded = whole_embedding(ids_BL)
            hidden = embedded.detach().requires_grad_()
            loss = plain_loss(hidden, whole_linear, labels_BL, denominator=7)
            loss.backward()
            embedded.backward(torch.ones_like(embedded))
            if dp_rank == mesh["dp"].get_local_rank():
                errors.append((f"loss {index}", relative_error(losses[index], loss)))
                if mesh["pp"].get_local_rank() == 1:
                    errors.append((f"hidden {index}", relative_error(hidden_grads[index], hidden.grad)))
    rows = shard_rows(vocab_size, num_ranks=2, rank=mesh["pp"].get_local_rank())
    for name, shared, whole in (("head", head, whole_linear), ("embedding", embedding, whole_embedding)):
        grad = shared.weight.grad.full_tensor() if shared in units else shared.weight.grad
        errors.append((name, relative_error(grad, whole.weight.grad[rows.start : rows.stop])))
    return errors


@pytest.mark.parametrize(("vocab_size", "reshard"), [(10, False), (9, True), (1, False)])
def test_fsdp_over_an_orthogonal_axis(rank_pool, vocab_size: int, reshard: bool) -> None:
    assert not wrong(rank_pool(4).run(fsdp, vocab_size, reshard))


# Refusals ------------------------------------------------------------------------------------------------------------


def message(call: Callable[[], object]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    linear = make_weights(9, tied=False)[1]
    others = dist.new_group([1]), dist.new_group([0])
    head = VocabularyHead.from_linear(linear, group=mesh["pp"])
    sharded = fully_shard(make_weights(9, tied=False)[1], mesh=mesh["pp"])
    hidden_TD = torch.randn(3, DIM, dtype=torch.float64)
    return [
        message(lambda: VocabularyHead.from_linear(linear, group=mesh)),
        message(lambda: VocabularyHead.from_linear(linear, group=mesh["pp"], reduce_to=2)),
        message(lambda: VocabularyHead.from_linear(linear, group=others[dist.get_rank()])),
        message(lambda: VocabularyHead.from_linear(sharded, group=mesh["pp"])),
        message(lambda: head(hidden_TD, torch.tensor([1, 9, IGNORED]))),  # on every rank, so nobody waits for others
    ]


def test_refusals(rank_pool) -> None:
    for rank, messages in enumerate(rank_pool(2).run(refusals)):
        expected = (
            "group is a DeviceMesh of shape (2, 1): it must have one axis; nearest legal value: one axis of it",
            "reduce_to = 2: it must be a rank of the group, 0 .. 1; nearest legal value: 1",
            f"group holds ranks [{1 - rank}], but this is rank {rank}: only members may build the module",
            "the weight is a DTensor: share the vocabulary first",
            "labels holds 9: it must be 0 .. 8, or -100 to be ignored; nearest legal value: 8",
        )
        for part, whole in zip(expected, messages, strict=True):
            assert part in whole
