"""Memory by the rule and constants of the reference's own planner, to compare with its figures (bf16, Megatron)."""

from __future__ import annotations

from slimpipe.planner.layout import Layout
from slimpipe.planner.memory import PARTS
from slimpipe.planner.models import ModelShape
from slimpipe.planner.slices import peak_live

_WEIGHT_AND_GRADIENT = 6
_OPTIMIZER = 12


def reference_bytes(model: ModelShape, layout: Layout, *, seq_len: int, rank: int) -> dict[str, float]:
    """Bytes on one pipeline rank, by part; parts that the rule does not know are 0.

    Its K,V are among its activations. Where layers are recomputed, one layer of a unit is added as working memory: its
    planned 22.9 GiB of the fully recomputed 13B run needs it. Baselines have no output part, for the same reason.
    """
    t, c, p, n, v = layout.tensor, layout.context, layout.pipeline, layout.num_slices, layout.stages_per_rank
    tokens = seq_len / (c * t)
    layers_per_stage = model.num_layers / layout.num_stages
    live = _live_microbatches(layout, rank)
    parts: dict[str, float] = dict.fromkeys(PARTS, 0)
    parts["parameters"] = _WEIGHT_AND_GRADIENT * model.parameters / (t * p)
    parts["optimizer"] = _OPTIMIZER * model.parameters / layout.num_gpus
    parts["activations"] = live * layers_per_stage * tokens * _token_layer(model, layout.recompute)
    if layout.recompute == "full":
        parts["working"] = tokens / n * _token_layer(model, "none")
    if layout.schedule == "SlimPipe":
        kv_of_layer = 2 * 2 * model.query_dim * tokens
        parts["dK,dV"] = kv_of_layer * layers_per_stage * (2 * (n - 1) / n + (v - 1) * (n - p) / n)
        parts["output"] = 4 * tokens * model.vocab_size / p
    return parts


def _live_microbatches(layout: Layout, rank: int) -> float:
    """Most live microbatches of one stage each; of an interleaved schedule also where there are not so many."""
    if layout.schedule == "Interleaved1F1B":
        return (layout.stages_per_rank - 1) * layout.pipeline + 2 * (layout.pipeline - 1 - rank) + 1
    return peak_live(layout, rank) / layout.num_slices


def _token_layer(model: ModelShape, recompute: str) -> float:
    h, kv = model.dim, 4 * model.num_kv_heads / model.num_heads
    if recompute == "full":
        return 2 * h
    if recompute == "selective":  # the feed-forward's first product and SwiGLU
        return (8 + kv) * h
    return (12 + kv + 6 * model.experts_per_token * model.ffn_dim / h) * h
