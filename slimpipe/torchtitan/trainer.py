"""torchtitan's trainer, with the pipeline's figures among its metrics."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torchtitan.trainer import Trainer

from slimpipe.torchtitan.config import SlimPipeTrainerConfig
from slimpipe.torchtitan.metrics import SlimPipeMetrics, TorchScheduleMeter
from slimpipe.torchtitan.rules import runs_slimpipe


class SlimPipeTrainer(Trainer):
    """torchtitan's `Trainer`; adds figures of the pipeline to its metrics and changes nothing else."""

    Config = SlimPipeTrainerConfig

    def __init__(self, config: SlimPipeTrainerConfig) -> None:
        super().__init__(config)
        source, group = None, None
        self._torch_meter: TorchScheduleMeter | None = None
        if self.parallel_dims.pp_enabled:
            group = self.parallel_dims.get_mesh("pp").get_group()
            if runs_slimpipe(config):
                source = self.pp_schedule
            elif config.slimpipe.measure_memory:
                source = self._torch_meter = TorchScheduleMeter(self.pp_schedule, self.model_parts)
        assert isinstance(self.metrics_processor, SlimPipeMetrics)
        self.metrics_processor.watch(source, group=group, dump_folder=config.dump_folder)

    def pp_forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        with contextlib.nullcontext() if self._torch_meter is None else self._torch_meter.measure():
            return super().pp_forward_backward_step(**kwargs)
