"""A layout as a TOML file that `slimpipe train` runs."""

from __future__ import annotations

from slimpipe.planner.layout import Layout
from slimpipe.planner.models import MODELS, ModelShape


def to_toml(model: ModelShape, layout: Layout, *, seq_len: int, command: str) -> str:
    """The text of the file.

    Raises:
        ValueError: torchtitan has no such model.
    """
    if model.titan is None:
        known = ", ".join(shape.name for shape in MODELS.values() if shape.titan and not shape.tied)
        raise ValueError(f"--write: torchtitan has no model {model.name}, so no file can run it; nearest: {known}")
    name, flavor = model.titan
    is_ours = layout.schedule == "SlimPipe"
    schedule = "InterleavedSlimPipe" if is_ours and layout.stages_per_rank > 1 else layout.schedule
    slimpipe = [
        f"num_slices = {layout.num_slices}  # {seq_len // layout.num_slices} tokens each",
        f'context_exchange = "{"auto" if layout.exchange else "off"}"',
    ]
    if layout.stages_per_rank > 1:
        slimpipe.append(f"stages_per_rank = {layout.stages_per_rank}")
    if layout.vocab_parallel != "none":
        slimpipe.append(f'vocab_parallel = "{layout.vocab_parallel}"')
    parallelism = [
        f"tensor_parallel_degree = {layout.tensor}",
        f"pipeline_parallel_degree = {layout.pipeline}",
        f"data_parallel_shard_degree = {layout.data}",
        f'pipeline_parallel_schedule = "{schedule}"',
        "pipeline_parallel_first_stage_less_layers = 0",
        "pipeline_parallel_last_stage_less_layers = 0",
    ]
    if not is_ours and layout.stages_per_rank > 2:  # 2 is torchtitan's default
        layers = -(-model.num_layers // layout.num_stages)
        parallelism.append(f"pipeline_parallel_layers_per_stage = {layers}")
    sections = {
        "model": [f'name = "{name}"', f'flavor = "{flavor}"'],
        "slimpipe": slimpipe if is_ours else [],
        "parallelism": parallelism,
        "training": [
            f"seq_len = {seq_len}",
            f"local_batch_size = {layout.num_microbatches}  # microbatches of one sequence",
            "disable_cuda_graphs = true  # torchtitan cannot capture pipelines",
        ],
        "dataloader": ['dataset = "c4"'],
        "activation_checkpoint": [f'mode = "{layout.recompute}"'],
    }
    lines = [
        f"# {layout.num_gpus} GPUs; written by: {command}",
        "# Set hf_assets_path, the data and the optimizer before a run.",
        "",
        'hf_assets_path = "./assets/hf"',
    ]
    for title, keys in sections.items():
        if keys:
            lines += ["", f"[{title}]", *keys]
    return "\n".join(lines) + "\n"
