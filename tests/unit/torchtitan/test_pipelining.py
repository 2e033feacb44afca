"""How layers are spread over stages."""

import pytest

from slimpipe.torchtitan.pipelining import stage_modules


def layers_per_stage(num_layers, num_stages, first_less=1, last_less=1, **settings):
    stages = stage_modules(num_layers, num_stages=num_stages, first_less=first_less, last_less=last_less, **settings)
    layers = [name for stage in stages for name in stage if name.startswith("layers.")]
    assert layers == [f"layers.{index}" for index in range(num_layers)]
    return [sum(name.startswith("layers.") for name in stage) for stage in stages]


def test_names():
    assert stage_modules(3, num_stages=2, first_less=0, last_less=0) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm", "lm_head"],
    ]
    assert stage_modules(3, num_stages=2, first_less=0, last_less=0, vocab_parallel="output") == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm"],
    ]
    assert stage_modules(3, num_stages=3, first_less=0, last_less=0, vocab_parallel="both") == [
        ["layers.0"],
        ["layers.1"],
        ["layers.2", "norm"],
    ]


@pytest.mark.parametrize(
    ("vocab_parallel", "sizes"), [("none", [7, 8, 8, 7]), ("output", [7, 8, 8, 7]), ("both", [8, 8, 7, 7])]
)
def test_a_shared_matrix_counts_for_no_layer(vocab_parallel, sizes):
    assert layers_per_stage(30, 4, vocab_parallel=vocab_parallel) == sizes


def test_layers_are_even_where_all_is_shared():
    assert layers_per_stage(32, 4) == [8, 9, 8, 7]
    assert layers_per_stage(32, 4, vocab_parallel="output") == [8, 8, 8, 8]
    assert layers_per_stage(32, 4, vocab_parallel="both") == [8, 8, 8, 8]


def test_other_values_than_the_default_stay():
    assert layers_per_stage(32, 4, last_less=4, vocab_parallel="output") == [9, 9, 9, 5]
    assert layers_per_stage(30, 4, first_less=2, last_less=0, vocab_parallel="both") == [6, 8, 8, 8]


@pytest.mark.parametrize("less", [0, 1, 2, 5])
def test_no_stage_is_empty(less):
    for num_layers in range(4, 12):
        sizes = layers_per_stage(num_layers, 4, first_less=less, last_less=less, vocab_parallel="both")
        assert min(sizes[:-1]) >= 1  # the last one has the norm
        assert sum(layers_per_stage(num_layers, 4, first_less=less, last_less=less)) == num_layers
