"""What torchtitan's optimizers make of a model part that holds nothing but vocabulary."""

import pytest
import torch
from torch import nn
from torchtitan.components.optimizer import ParamGroupConfig

from slimpipe.torchtitan.optimizer import SlimPipeOptimizers, with_shared_vocabulary
from slimpipe.torchtitan.vocabulary import SharedVocabulary, TitanVocabularyHead
from slimpipe.vocabulary import VocabularyEmbedding


def vocabulary():
    head = TitanVocabularyHead.from_linear(nn.Linear(4, 9, bias=False), reduce_to=None)
    embedding = VocabularyEmbedding.from_embedding(nn.Embedding(9, 4), reduce_to=None)
    return SharedVocabulary(None, lm_head=head, tok_embeddings=embedding, inits={})


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wo = nn.RMSNorm(4), nn.Linear(4, 4, bias=False)


def group(pattern, lr):
    return ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": lr})


def learning_rates(*groups, parts):
    optimizers = SlimPipeOptimizers.Config(param_groups=list(groups), implementation="for-loop").build(
        model_parts=parts
    )
    return [
        {name: found["lr"] for found in optimizer.param_groups for name in found["param_names"]}
        for optimizer in optimizers
    ]


def test_head_takes_the_keyword_of_torchtitan():
    head, whole = vocabulary().lm_head, torch.randn(2, 3, 4)
    labels = torch.randint(9, (2, 3))
    torch.testing.assert_close(head(whole, labels, global_valid_tokens=torch.tensor(5)), head(whole, labels) / 5)


def test_patterns_that_match_no_vocabulary_are_left_out_for_it():
    stage, shared = learning_rates(group("norm", 1.0), group("", 2.0), parts=[Stage(), vocabulary()])
    assert stage == {"norm.weight": 1.0, "wo.weight": 2.0}
    assert shared == {"lm_head.weight": 2.0, "tok_embeddings.weight": 2.0}
    (shared,) = learning_rates(group("norm", 1.0), group("tok_emb", 2.0), group("", 3.0), parts=[vocabulary()])
    assert shared == {"lm_head.weight": 3.0, "tok_embeddings.weight": 2.0}


def test_patterns_must_match_in_stages_as_ever():
    with pytest.raises(ValueError, match="'lm_head' matched no parameters"):
        learning_rates(group("lm_head", 1.0), group("", 2.0), parts=[Stage(), vocabulary()])


def test_what_a_model_does_after_its_optimizers_were_built_sees_stages_only():
    seen = []

    def build(optimizers, model_parts, parallel_dims):
        seen.append((optimizers, model_parts, parallel_dims))

    stage, shared, optimizers = Stage(), vocabulary(), []
    with_shared_vocabulary(build)(optimizers, [stage, shared], "dims")
    with_shared_vocabulary(None)(optimizers, [stage, shared], "dims")
    assert seen == [(optimizers, [stage], "dims")]
