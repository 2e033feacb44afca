"""Memory of one rank by part, as torchtitan and our executor hold it. `reference` has another rule.

Every formula counts what a run keeps: tensors that autograd saves in a decoder layer, K,V slots, dK,dV in waiting, and
so on. A part counts at its own peak; `tools/bench_memory.py` compares with what runs hold.

Symbols: t tensor, p pipeline, d data parallel ranks, n slices, v stages per rank; L tokens of a slice; b bytes of a
value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from slimpipe.options import SlimPipeOptions
from slimpipe.planner.layout import Layout
from slimpipe.planner.models import ModelShape
from slimpipe.planner.slices import most_messages, most_slots, peak_live, peak_live_of_stage, waiting_gradients
from slimpipe.program.ir import MAX_UNMATCHED_SENDS, RECEIVE_OF, Channel
from slimpipe.program.program import Program
from slimpipe.program.slots import plan_slots

PARTS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "K,V",
    "dK,dV",
    "output",
    "buffers",
    "exchange",
    "working",
)
"""activations: saved for backward by layers and norms. output: saved by output layer and loss; where they are shared,
hidden states and their gradients that wait. buffers: messages between stages. exchange: held for other ranks. working:
of one unit's backward, recomputed tensors included."""

_VOCABULARY_BLOCK = 1024
"""Tokens whose logits exist at a time where the vocabulary is shared."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Dtypes of a run."""

    value_bytes: int = 2
    """Of activations, K,V and messages."""
    wide_bytes: int = 4
    """Of statistics, dK,dV and gradients in waiting, weights and their optimizer."""
    norm_in_parts: bool = False
    """Whether norms save their normalized input besides, as they do on a CPU."""
    mixed: bool = True
    """Whether FSDP2 keeps a copy of the weights in the narrow dtype."""


def peak_bytes(
    model: ModelShape,
    layout: Layout,
    *,
    seq_len: int,
    rank: int,
    numerics: Numerics = Numerics(),
    program: Program | None = None,
    exchange_max_slices: int = SlimPipeOptions.exchange_max_slices,
) -> dict[str, float]:
    """Bytes on one pipeline rank, by part (see `PARTS`).

    Args:
        model: Its shape.
        layout: How the run is cut.
        seq_len: Tokens per sequence.
        rank: Pipeline rank.
        numerics: Dtypes.
        program: The program of this layout. Slots and held rows are then its own; without it they are the most that a
            run may take.
        exchange_max_slices: See `SlimPipeOptions.exchange_max_slices`.
    """
    b, wide, t = numerics.value_bytes, numerics.wide_bytes, layout.tensor
    is_ours = layout.schedule == "SlimPipe"
    L = seq_len // layout.num_slices
    layers = layout.layers_per_stage(model.num_layers)
    mine = [layers[stage] for stage in range(rank, layout.num_stages, layout.pipeline)]
    widest, is_last = max(mine), rank == layout.pipeline - 1
    weights = parameters(model, layout, rank)
    live = peak_live(layout, rank)
    kv = b * 2 * model.kv_dim / t  # of a token in a layer
    last_live = peak_live_of_stage(layout, rank, layout.stages_per_rank - 1) if is_last else 0
    parts: dict[str, float] = dict.fromkeys(PARTS, 0)
    parts["parameters"] = weights * (wide / layout.data + (b if numerics.mixed else 0))
    parts["gradients"] = weights * wide
    parts["optimizer"] = weights * 2 * wide / layout.data
    per_token = widest * saved_bytes(model, layout, numerics) + 2 * wide * _half_head(model)
    parts["activations"] = live * L * per_token + last_live * L * _norm_bytes(model, layout, numerics)
    if is_ours:
        slots = most_slots(layout, rank) if program is None else _planned_slots(program, rank)
        parts["K,V"] = slots * widest * L * kv
        parts["dK,dV"] = waiting_gradients(layout) * widest * L * kv * wide / b
    elif layout.recompute == "none":
        parts["K,V"] = live * widest * L * kv
    message = L * b * model.dim / t
    if layout.pipeline > 1:
        parts["buffers"] = (most_messages(layout, rank) if program is None else _messages(program, rank)) * message
    parts["output"] = last_live * L * _output_bytes(model, layout, numerics)
    parts["working"] = _working_bytes(model, layout, numerics, L, is_last=is_last)
    if layout.exchange and is_ours and layout.pipeline > 1:
        held = exchange_max_slices * L * layout.stages_per_rank if program is None else program.peak_held_rows(rank)
        parts["exchange"] = held * widest * kv * (1 + wide / b)
    return parts


def worst_rank(parts_by_rank: Mapping[int, Mapping[str, float]]) -> int:
    """The rank that holds most in all."""
    return max(parts_by_rank, key=lambda rank: (sum(parts_by_rank[rank].values()), -rank))


def parameters(model: ModelShape, layout: Layout, rank: int) -> float:
    """Parameters of a rank, before data parallelism shards them."""
    layers = layout.layers_per_stage(model.num_layers)
    count = sum(layers[rank :: layout.pipeline]) * model.layer_parameters
    shared = {"none": 0, "output": 1, "both": 2}[layout.vocab_parallel]
    if rank == 0 and layout.vocab_parallel != "both":
        count += model.matrix_parameters
    if rank == layout.pipeline - 1 and layout.vocab_parallel == "none" and not (model.tied and rank == 0):
        count += model.matrix_parameters
    return (count + shared * model.matrix_parameters / layout.pipeline) / layout.tensor


def saved_bytes(model: ModelShape, layout: Layout, numerics: Numerics) -> float:
    """What one layer keeps of one token until its backward, on one rank, K,V apart.

    The residual stream is cut along the sequence; what enters a matrix product was gathered, and autograd keeps it so.
    """
    b, wide, t, dim = numerics.value_bytes, numerics.wide_bytes, layout.tensor, model.dim
    lse = wide * model.num_heads / t
    query, ffn = b * model.query_dim / t, b * model.experts_per_token * model.ffn_dim / t
    residual = b * dim / t
    keeps_attention = layout.schedule == "SlimPipe"
    if layout.recompute == "full":
        return residual + (query + lse if keeps_attention else 0)
    if layout.recompute == "selective":  # torchtitan keeps every other product: of Q,K,V, of w1, of w2
        products = query + 2 * b * model.kv_dim / t + ffn + b * dim + (2 * residual if t > 1 else 0)
        return residual + products + (query + lse if keeps_attention else 0)
    norms = 2 * wide / t + 2 * b * dim + (2 * b * dim / t if numerics.norm_in_parts else 0)
    dispatched = 2 * b * model.experts_per_token * dim / t if model.num_experts > 1 else 0
    # Residual stream twice; Q, attention's output and LSE; in the feed-forward both halves, SiLU's output, the product.
    return 2 * residual + norms + 2 * query + lse + 4 * ffn + dispatched


def _norm_bytes(model: ModelShape, layout: Layout, numerics: Numerics) -> float:
    """Of the last stage's norm, of a token."""
    b, t, dim = numerics.value_bytes, layout.tensor, model.dim
    return (b * dim * (2 if numerics.norm_in_parts else 1) + numerics.wide_bytes) / t


def _output_bytes(model: ModelShape, layout: Layout, numerics: Numerics) -> float:
    """Of a live token of the last stage: input of the output layer and log-probabilities, or gradients that wait."""
    hidden = numerics.value_bytes * model.dim
    if layout.vocab_parallel != "none":
        return hidden
    return hidden + numerics.wide_bytes * model.vocab_size / layout.tensor


def _working_bytes(model: ModelShape, layout: Layout, numerics: Numerics, L: int, *, is_last: bool) -> float:
    """Most of what lives only during one unit's backward: in a layer, or in the output layer."""
    b, wide, t = numerics.value_bytes, numerics.wide_bytes, layout.tensor
    ffn, largest = L * b * model.experts_per_token * model.ffn_dim / t, model.dim * model.ffn_dim / t
    feed_forward = 4 * ffn + 2 * L * b * model.dim + largest * (b + wide)
    past = (layout.num_slices - 1) * L * 2 * b * model.kv_dim / t
    attention = L * model.query_dim / t * (2 * b + 2 * wide) + past
    layer = max(feed_forward, attention)
    if layout.recompute != "none":
        once = Layout(tensor=t, pipeline=layout.pipeline, data=1, num_slices=layout.num_slices)
        layer += L * saved_bytes(model, once, numerics)
    if layout.vocab_parallel == "none":
        vocabulary = L * model.vocab_size / t * 2 * (b + wide) if is_last else 0
    else:
        rows = model.vocab_size / (t * layout.pipeline)
        vocabulary = 2 * wide * min(L, _VOCABULARY_BLOCK) * rows + rows * model.dim * (b + wide) + 2 * L * b * model.dim
    return max(layer, vocabulary)


def _half_head(model: ModelShape) -> int:
    """Pairs of a head's dimensions: cosine and sine of each are kept for a token of a unit."""
    return model.kv_dim // model.num_kv_heads // 2


def _planned_slots(program: Program, rank: int) -> int:
    return plan_slots(program, range(rank, program.num_stages, program.num_ranks)).num_slots


def _messages(program: Program, rank: int) -> int:
    """Receives posted and not used, and sends that may be under way, of a rank at a time."""
    most, posted, sends = 0, set(), Counter[Channel]()
    for instruction in program.instructions[rank]:
        if instruction.op in RECEIVE_OF:
            posted.discard((RECEIVE_OF[instruction.op], instruction.unit))
        elif instruction.op in RECEIVE_OF.values():
            posted.add((instruction.op, instruction.unit))
        elif instruction.op.is_message:
            sends[instruction.channel(rank)] += 1
        most = max(most, len(posted) + sum(min(count, MAX_UNMATCHED_SENDS) for count in sends.values()))
    return most
