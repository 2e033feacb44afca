"""What every rank's process runs: configuration, torchtitan's trainer, teardown."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from slimpipe.torchtitan.cpu import use_cpu


def train(args: Sequence[str]) -> None:
    """Trains as `args` say, and returns when training ended well.

    Args:
        args: a TOML file and overrides, `CONFIG.toml [--section.key value ...]`, or torchtitan's own `--module M
            --config C [--section.key value ...]`.

    Raises:
        ConfigError: before anything is written or communicated.
    """
    use_cpu()
    from torchtitan.observability import structured_logger
    from torchtitan.tools.logging import init_logger, logger

    from slimpipe.torchtitan.config import check
    from slimpipe.torchtitan.toml import TomlConfigManager

    init_logger()
    config = TomlConfigManager().parse_args(list(args))
    check(config)  # before the logger below makes a folder
    structured_logger.init_structured_logger(
        source="training", output_dir=config.dump_folder, enable=config.debug.enable_structured_logging
    )
    trainer = config.build()
    try:
        if config.checkpoint.create_seed_checkpoint:
            assert int(os.environ["WORLD_SIZE"]) == 1, "a seed checkpoint is made by one process"
            trainer.checkpointer.save(curr_step=0, last_step=True)
        else:
            trainer.train()
    finally:
        trainer.close()
    # Not after an error: other ranks may be waiting in a collective, and the launcher ends them all.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    logger.info("Process group destroyed")
