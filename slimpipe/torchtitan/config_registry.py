"""Configurations for torchtitan's stock entry point.

torchrun --nproc-per-node 4 -m torchtitan.train --module slimpipe.torchtitan --config llama3_debug
"""

from __future__ import annotations

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry

from slimpipe.torchtitan.config import SlimPipeSection, SlimPipeTrainerConfig


def llama3_debug() -> SlimPipeTrainerConfig:
    """torchtitan's llama3 debug model on 2 pipeline ranks x 2 FSDP ranks; for CPUs. Reads what `make demo` makes."""
    spec = model_registry("debugmodel")
    return SlimPipeTrainerConfig(
        model_spec=spec,
        hf_assets_path="build/demo/tokenizer",
        dump_folder="build/demo/outputs",
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        # c4_test is torchtitan's name for a local folder of files with a "text" column.
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path="build/demo/corpus"),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        metrics=MetricsProcessor.Config(log_freq=1, enable_wandb=True),
        training=TrainingConfig(
            local_batch_size=4, seq_len=2048, steps=10, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=2, pipeline_parallel_schedule="SlimPipe", data_parallel_shard_degree=2
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=42),
        slimpipe=SlimPipeSection(num_slices=8, measure_memory=True),
    )


def llama3_8b_128k() -> SlimPipeTrainerConfig:
    """Llama 3 8B on sequences of 131072 tokens, 8 pipeline ranks, the rest FSDP; for GPUs."""
    spec = model_registry("8B")
    return SlimPipeTrainerConfig(
        model_spec=spec,
        hf_assets_path="./assets/hf/Llama-3.1-8B",
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=4, seq_len=131072, steps=1000, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(pipeline_parallel_degree=8, pipeline_parallel_schedule="SlimPipe"),
        activation_checkpoint=FullAC.Config(),
        slimpipe=SlimPipeSection(num_slices=64, vocab_parallel="output"),
    )
