"""Messages of the context exchange: what is packed is unpacked, in order; sends wait for nobody and are let go of."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from slimpipe.mailbox import Mail, Mailbox
from slimpipe.runtime import PipelineError
from slimpipe.transport import TensorMeta
from tests.harness import run_ranks_outcomes

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float64, torch.float32, torch.float16)
SHAPES = ((3,), (1, 5, 2), (), (2, 0, 4), (7, 1))


def metas_of(tensors: list[torch.Tensor]) -> list[TensorMeta]:
    return [TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def message(number: int) -> list[torch.Tensor]:
    """Tensors of mixed dtypes and shapes, one of them not contiguous."""
    generator = torch.Generator().manual_seed(number)
    made = [
        torch.randn(shape, generator=generator).to(DTYPES[(number + i) % len(DTYPES)]) for i, shape in enumerate(SHAPES)
    ]
    return [*made, torch.randn(4, 6, generator=generator).T]


def talk() -> None:
    """Runs on three ranks: every rank writes to every other before any of them reads."""
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    mailbox = Mailbox(dist.group.WORLD, device=CPU, timeout=timedelta(seconds=20))
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    mailbox.connect(pairs)
    mailbox.connect(pairs[:1])  # connected already
    for kind in (Mail.KV, Mail.REQUEST):
        for source, destination in pairs:
            for number in range(3):
                if source == rank:
                    mailbox.send(kind, destination, message(10 * source + number))
    sent = sum(-(-tensor.nbytes // 16) * 16 for number in range(3) for tensor in message(10 * rank + number))
    assert mailbox.sent_bytes == 2 * 2 * sent
    for kind in (Mail.REQUEST, Mail.KV):  # the other way round: each kind has an order of its own
        letters = [
            (source, number, mailbox.post(kind, source, metas_of(message(10 * source + number))))
            for source in ranks
            if source != rank
            for number in range(3)
        ]
        for source, number, letter in letters:
            for mine, expected in zip(letter.wait(), message(10 * source + number), strict=True):
                assert mine.dtype == expected.dtype
                assert torch.equal(mine, expected)
    for peer in ranks:
        mailbox.settle(peer)
    assert not mailbox._sends
    mailbox.finish()
    mailbox.close()


def test_every_rank_writes_to_every_other(rank_pool) -> None:
    assert rank_pool(3).run(talk) == [None] * 3  # ranks assert


def send_copies() -> None:
    """What is sent is what the tensor was, not what becomes of it."""
    mailbox = Mailbox(dist.group.WORLD, device=CPU, timeout=timedelta(seconds=20))
    x = torch.ones(4)
    if dist.get_rank() == 0:
        mailbox.send(Mail.KV, 1, [x])
        x.zero_()
        dist.barrier()
    else:
        dist.barrier()  # only now does it listen
        (got,) = mailbox.post(Mail.KV, 0, metas_of([x])).wait()
        assert torch.equal(got, torch.ones(4))
    mailbox.finish()
    mailbox.close()


def test_sends_are_copies(rank_pool) -> None:
    assert rank_pool(2).run(send_copies) == [None] * 2  # ranks assert


def nobody_listens() -> str:
    mailbox = Mailbox(dist.group.WORLD, device=CPU, timeout=timedelta(seconds=1))
    text = ""
    if dist.get_rank() == 0:
        mailbox.send(Mail.REPLY, 1, [torch.ones(4)])
        with pytest.raises(PipelineError) as caught:
            mailbox.finish()
        text = str(caught.value)
        mailbox.drop()
        mailbox.finish()
    dist.barrier()
    return text


def test_a_send_that_nobody_receives() -> None:
    outcomes = run_ranks_outcomes(nobody_listens, 2, timeout=30)
    assert outcomes[0].ok, outcomes[0]
    assert outcomes[0].value.startswith("pipeline rank 0 lost rank 1, to which it was sending: rank 1 failed, died or")
