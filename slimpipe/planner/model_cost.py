"""Seconds and bytes of a model's work on some hardware, under a layout: the costs that the simulator takes."""

from __future__ import annotations

from slimpipe.planner.costs import OpCosts
from slimpipe.planner.hardware import Hardware
from slimpipe.planner.layout import Layout
from slimpipe.planner.memory import parameters
from slimpipe.planner.models import ModelShape
from slimpipe.program.cost import BACKWARD_TO_FORWARD, AttentionShape, ExchangeCosts

VALUE_BYTES = 2
"""bf16."""
_RECOMPUTED = {"none": 0.0, "full": 1.0}


def op_costs(model: ModelShape, layout: Layout, hardware: Hardware, *, seq_len: int) -> OpCosts:
    """Costs of the layout's units, without overlap: products and attention at the hardware's rates, then tensor
    parallelism's messages; everything else a layer does counts as part of the rates' shortfall."""
    t, L = layout.tensor, seq_len // layout.num_slices
    layers = layout.layers_per_stage(model.num_layers)
    product = 2 * L / (t * hardware.peak_flops * hardware.matrix_efficiency)  # seconds per parameter
    layer = product * model.active_layer_parameters
    messages = _tensor_parallel_seconds(model, layout, hardware, L)
    # Every unit's weight gradients (bf16) are added to those of the step (fp32): this is what small slices cost.
    adding = (2 * VALUE_BYTES + 2 * 4) * model.layer_parameters / t / hardware.memory_bandwidth
    pair = 4 * model.query_dim / t / hardware.peak_flops
    head = product * model.matrix_parameters
    is_shared = layout.vocab_parallel != "none"
    again = layer * _recomputed_share(model, layout.recompute) + (messages if layout.recompute == "full" else 0)
    attention_again = 0.0
    if layout.schedule != "SlimPipe" and layout.recompute != "none":  # ours keeps attention's output
        attention_again = pair / hardware.attention_efficiency * L * L / 2
    return OpCosts(
        slice_len=L,
        linear_forward=tuple(count * (layer + messages) for count in layers),
        linear_backward=tuple(count * (2 * layer + messages + adding) for count in layers),
        attention_forward=tuple(count * pair / hardware.attention_efficiency for count in layers),
        attention_backward=tuple(
            count * BACKWARD_TO_FORWARD * pair / hardware.attention_backward_efficiency for count in layers
        ),
        recompute_forward=tuple(count * (again + attention_again) for count in layers),
        head_forward=0.0 if is_shared else head,
        head_backward=0.0 if is_shared else 2 * head,
        vocabulary=3 * head / layout.pipeline if is_shared else 0.0,
        vocabulary_forward=head / layout.pipeline if is_shared else 0.0,
        layers=layers,
        host_seconds=hardware.host_seconds,
        link=hardware.link(layout.num_gpus),
        activation_bytes=L * model.dim * VALUE_BYTES // t,
        attention_shape=attention_shape(model, layout, slice_len=L),
    )


def attention_shape(model: ModelShape, layout: Layout, *, slice_len: int) -> AttentionShape:
    """One attention layer's part on one rank."""
    head_dim = model.kv_dim // model.num_kv_heads
    return AttentionShape(
        slice_len=slice_len,
        num_heads=model.num_heads // layout.tensor,
        num_kv_heads=model.num_kv_heads // layout.tensor,
        head_dim=head_dim,
        value_head_dim=head_dim,
        bytes_per_value=VALUE_BYTES,
    )


def exchange_costs(model: ModelShape, layout: Layout, hardware: Hardware, *, seq_len: int) -> ExchangeCosts:
    """What ``context_exchange = "auto"`` would measure."""
    link = hardware.link(layout.num_gpus)
    return ExchangeCosts(
        shape=attention_shape(model, layout, slice_len=seq_len // layout.num_slices),
        flops_per_second=hardware.peak_flops * hardware.attention_efficiency,
        bytes_per_second=link.bandwidth,
        latency=link.latency,
    )


def data_parallel_seconds(model: ModelShape, layout: Layout, hardware: Hardware) -> float:
    """Gathering weights (bf16) and reducing gradients (fp32) once per step, not hidden behind anything."""
    d = layout.data
    if d == 1:
        return 0.0
    weights = max(parameters(model, layout, rank) for rank in (0, layout.pipeline - 1))
    return weights * (VALUE_BYTES + 4) * (d - 1) / d / hardware.link(layout.num_gpus).bandwidth


def p2p_bytes(model: ModelShape, layout: Layout, *, seq_len: int) -> float:
    """Activations and gradients that all ranks of one pipeline and tensor coordinate send in a step."""
    hops = layout.num_stages - 1 if layout.pipeline > 1 else 0
    return 2.0 * hops * layout.num_microbatches * seq_len * model.dim * VALUE_BYTES / layout.tensor


def mfu(model: ModelShape, layout: Layout, hardware: Hardware, *, seq_len: int, seconds: float, causal: bool) -> float:
    """Model FLOP over what all GPUs could do in a step's seconds; see `ModelShape.flops` for ``causal``."""
    flops = layout.num_microbatches * layout.data * model.flops(seq_len, causal=causal)
    return flops / (seconds * layout.num_gpus * hardware.peak_flops)


def _tensor_parallel_seconds(model: ModelShape, layout: Layout, hardware: Hardware, L: int) -> float:
    """Two gathers and two reduce-scatters of hidden states in a layer; as many in its backward."""
    t = layout.tensor
    num_bytes = L * model.dim * VALUE_BYTES * (t - 1) / t
    return 4 * hardware.node_link.seconds(num_bytes) if t > 1 else 0.0


def _recomputed_share(model: ModelShape, recompute: str) -> float:
    """Of a layer's products; selective recompute runs attention's output product and w3 again."""
    if recompute in _RECOMPUTED:
        return _RECOMPUTED[recompute]
    again = model.dim * (model.query_dim + model.experts_per_token * model.ffn_dim)
    return again / model.active_layer_parameters
