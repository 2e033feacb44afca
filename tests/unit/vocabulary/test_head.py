"""The head on one rank equals a Linear and torch's cross entropy; what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slimpipe.vocabulary import VocabularyHead
from tests.model import IGNORED, relative_error

DIM = 5


def make(vocab_size: int = 7, num_tokens: int = 6, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(vocab_size + num_tokens)
    linear = nn.Linear(DIM, vocab_size, bias=False, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(vocab_size, DIM, generator=generator))
    hidden_TD = torch.randn(num_tokens, DIM, generator=generator).to(dtype).requires_grad_()
    return linear, hidden_TD, torch.randint(0, vocab_size, (num_tokens,), generator=generator)


def plain_loss(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor) -> Tensor:
    logits_TV = hidden_TD @ weight_VD.T
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return F.cross_entropy(logits_TV.to(wide), labels_T, ignore_index=IGNORED, reduction="sum")


@settings(deadline=None, max_examples=40)
@given(
    vocab_size=st.integers(1, 40),
    num_tokens=st.integers(0, 12),
    block_size=st.integers(1, 14),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_equals_linear_and_cross_entropy(vocab_size, num_tokens, block_size, ignored, offset) -> None:
    linear, hidden_TD, labels_T = make(vocab_size, num_tokens)
    with torch.no_grad():
        linear.weight[:, 0] += offset  # logits far from zero
    labels_T[torch.rand(num_tokens, generator=torch.Generator().manual_seed(0)) < ignored] = IGNORED
    head = VocabularyHead.from_linear(linear, block_size=block_size)
    expected = F.cross_entropy(linear(hidden_TD), labels_T, reduction="sum") / 3
    expected_grads = torch.autograd.grad(expected, (hidden_TD, linear.weight))
    loss = head(hidden_TD, labels_T, denominator=3)
    grads = torch.autograd.grad(loss, (hidden_TD, head.weight))
    for ours, theirs in zip((loss, *grads), (expected, *expected_grads)):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    if (labels_T == IGNORED).all():
        assert loss == 0 and not any(grad.any() for grad in grads)


def test_takes_any_leading_shape_denominator_and_upstream_gradient() -> None:
    linear, hidden_TD, labels_T = make()
    head = VocabularyHead.from_linear(linear, block_size=4)
    expected = torch.autograd.grad(2 * plain_loss(hidden_TD, linear.weight, labels_T) / 7, hidden_TD)[0]
    for denominator in (7, 7.0, torch.tensor(7), torch.tensor(7.0, dtype=torch.float64)):
        loss = head(hidden_TD.reshape(2, 3, DIM), labels_T.reshape(2, 3).int(), denominator=denominator)
        assert loss.dtype == torch.float64 and loss.shape == ()
        (grad,) = torch.autograd.grad(2 * loss, hidden_TD)
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=0)


def test_without_gradients_returns_the_raw_sum() -> None:
    linear, hidden_TD, labels_T = make()
    head = VocabularyHead.from_linear(linear)
    with torch.no_grad():
        loss = head(hidden_TD, labels_T)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain_loss(hidden_TD, linear.weight, labels_T))


def test_an_ignore_index_inside_the_vocabulary() -> None:
    linear, hidden_TD, labels_T = make()
    head = VocabularyHead.from_linear(linear, ignore_index=3)
    labels_T[:2] = 3
    expected = F.cross_entropy(linear(hidden_TD), labels_T, ignore_index=3, reduction="sum")
    torch.testing.assert_close(head(hidden_TD, labels_T), expected)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_second_backward_is_refused(retain_graph: bool) -> None:
    linear, hidden_TD, labels_T = make()
    loss = VocabularyHead.from_linear(linear)(hidden_TD, labels_T)
    loss.backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match=r"second time|inplace"):
        loss.backward()


def test_bfloat16_is_about_as_exact_as_a_plain_head_and_keeps_statistics_in_float32() -> None:
    linear, hidden_TD, labels_T = make(300, 64, torch.bfloat16)
    head = VocabularyHead.from_linear(linear, block_size=24)
    truth_of = [x.detach().double().requires_grad_() for x in (hidden_TD, linear.weight)]
    true_loss = F.cross_entropy(truth_of[0] @ truth_of[1].T, labels_T, reduction="sum")
    truth = (true_loss, *torch.autograd.grad(true_loss, truth_of))
    plain = plain_loss(hidden_TD, linear.weight, labels_T)
    plain = (plain, *torch.autograd.grad(plain, (hidden_TD, linear.weight)))
    loss = head(hidden_TD, labels_T)
    ours = (loss, *torch.autograd.grad(loss, (hidden_TD, head.weight)))
    assert [x.dtype for x in ours] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for mine, theirs, true in zip(ours, plain, truth):
        assert relative_error(mine.double(), true) <= 1.5 * relative_error(theirs.double(), true)


def test_autocast_runs_products_in_its_dtype_and_returns_gradients_in_theirs() -> None:
    linear, hidden_TD, labels_T = make(dtype=torch.float32)
    head = VocabularyHead.from_linear(linear)
    narrow = VocabularyHead.from_linear(linear.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head(hidden_TD, labels_T)
    grads = torch.autograd.grad(loss, (hidden_TD, head.weight))
    assert [x.dtype for x in (loss, *grads)] == [torch.float32] * 3
    torch.testing.assert_close(loss, narrow(hidden_TD.bfloat16(), labels_T), rtol=0, atol=0)


def test_from_linear_keeps_device_dtype_and_requires_grad() -> None:
    linear = nn.Linear(DIM, 7, bias=False, device="meta", dtype=torch.bfloat16).requires_grad_(False)
    head = VocabularyHead.from_linear(linear)
    assert (head.weight.device.type, head.weight.dtype, head.weight.requires_grad) == ("meta", torch.bfloat16, False)
    assert list(head.state_dict()) == ["weight"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size = 0: it must be at least one token; nearest legal value: 1"),
        ({"reduce_to": 1}, r"reduce_to = 1: it must be a rank of the group, 0 .. 0; nearest legal value: 0"),
        ({"reduce_to": "last"}, "reduce_to = 'last': .* nearest legal value: 'all'"),
    ],
)
def test_refuses_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VocabularyHead.from_linear(make()[0], **settings)


def test_refuses_weights() -> None:
    with pytest.raises(ValueError, match="has a bias"):
        VocabularyHead.from_linear(nn.Linear(DIM, 7))
    with pytest.raises(ValueError, match=r"weight has shape \(7, 5\): .*; nearest legal shape: \(8, 5\)"):
        VocabularyHead(make()[0].weight, vocab_size=8)


def test_refuses_inputs() -> None:
    linear, hidden_TD, labels_T = make()
    head = VocabularyHead.from_linear(linear)
    with pytest.raises(ValueError, match=r"labels have shape \(5,\): .* nearest legal shape: \(6,\)"):
        head(hidden_TD, labels_T[1:])
    with pytest.raises(ValueError, match=r"hidden states have shape \(6, 4\): .* nearest legal value: 5"):
        head(hidden_TD[:, 1:], labels_T)
    with pytest.raises(TypeError, match=r"hidden states have dtype torch.float32, but weight has torch.float64"):
        head(hidden_TD.float(), labels_T)
    with pytest.raises(TypeError, match=r"labels has dtype torch.float32"):
        head(hidden_TD, labels_T.float())
    for wrong, nearest in ((7, 6), (-1, 0)):
        labels = torch.where(torch.arange(6) == 4, wrong, labels_T)
        with pytest.raises(ValueError, match=rf"labels holds {wrong}: .* -100 to be ignored; .* value: {nearest}"):
            head(hidden_TD, labels)
    with pytest.raises(ValueError, match="denominator = 0: it must be positive"):
        head(hidden_TD, labels_T, denominator=0)
    with pytest.raises(ValueError, match=r"denominator has shape \(1,\); nearest legal shape: \(\)"):
        head(hidden_TD, labels_T, denominator=torch.ones(1))
    with pytest.raises(TypeError, match=r"denominator has dtype torch.bfloat16, .* an integer tensor"):
        head(hidden_TD, labels_T, denominator=torch.tensor(7.0, dtype=torch.bfloat16))
