"""The embedding on one rank equals nn.Embedding; what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slimpipe.vocabulary import VocabularyEmbedding


def test_equals_nn_embedding() -> None:
    plain = nn.Embedding(9, 4, dtype=torch.float64)
    shared = VocabularyEmbedding.from_embedding(plain)
    ids_BL = torch.tensor([[0, 8, 8], [3, 0, 8]], dtype=torch.int32)
    grad_BLD = torch.randn(2, 3, 4, dtype=torch.float64)
    outputs = plain(ids_BL), shared(ids_BL)
    for output in outputs:
        output.backward(grad_BLD)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(plain.weight.grad, shared.weight.grad, rtol=1e-14, atol=1e-14)


def test_a_frequent_id_adds_up_in_float32() -> None:
    shared = VocabularyEmbedding.from_embedding(nn.Embedding(2, 1, dtype=torch.bfloat16))
    shared(torch.zeros(1000, dtype=torch.int64)).backward(torch.ones(1000, 1, dtype=torch.bfloat16))
    assert shared.weight.grad is not None and shared.weight.grad.dtype == torch.bfloat16
    assert shared.weight.grad[0].item() == 1000  # bfloat16 sums would stop at 256


def test_refusals() -> None:
    embedding = nn.Embedding(9, 4)
    for ids, nearest in ((torch.tensor([9]), 8), (torch.tensor([2, -1]), 0)):
        with pytest.raises(
            ValueError, match=rf"ids holds {ids[-1]}: it must be 0 .. 8; nearest legal value: {nearest}"
        ):
            VocabularyEmbedding.from_embedding(embedding)(ids)
    with pytest.raises(TypeError, match=r"ids has dtype torch.float32"):
        VocabularyEmbedding.from_embedding(embedding)(torch.ones(2))
    with pytest.raises(ValueError, match=r"reduce_to = -1: .* nearest legal value: 0"):
        VocabularyEmbedding.from_embedding(embedding, reduce_to=-1)
    with pytest.raises(ValueError, match=r"the embedding has padding_idx = 0, .* nearest legal value: None"):
        VocabularyEmbedding.from_embedding(nn.Embedding(9, 4, padding_idx=0))
