"""What a run measures of its pipeline, in torchtitan's metrics and in a file per rank."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.metrics import MetricsProcessor

from slimpipe.planner.timeline import Timeline
from slimpipe.runtime.meter import MemoryMeter
from slimpipe.runtime.schedules import ScheduleInterleavedSlimPipe, ScheduleSlimPipe

Schedule = ScheduleSlimPipe | ScheduleInterleavedSlimPipe


class TorchScheduleMeter:
    """Measures one of torch's schedules with the meter of ours: what autograd holds for backward on this rank.

    Activations that torch's stages keep beside autograd are not counted.
    """

    def __init__(self, schedule: Any, model_parts: list[nn.Module]) -> None:
        self._meter = MemoryMeter(model_parts)
        for part in model_parts:
            part.register_forward_hook(lambda *_: self._read())
        # The loss saves tensors of logit size after the last stage's forward.
        loss_fn = schedule._loss_fn

        def measured(*args: Any, **kwargs: Any) -> torch.Tensor:
            loss = loss_fn(*args, **kwargs)
            self._read()
            return loss

        schedule._loss_fn = measured

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Context for one step."""
        self._meter.reset_peak()
        with self._meter.saving():
            yield

    def metrics(self) -> Mapping[str, float]:
        """``peak_live_bytes`` of the last step."""
        return {"peak_live_bytes": self._meter.peak_bytes}

    def _read(self) -> None:
        self._meter.read()


class SlimPipeMetrics(MetricsProcessor):
    """torchtitan's metrics, and those of the pipeline under ``slimpipe/NAME/rank_R``, R the pipeline rank.

    Gathering them is a collective on the pipeline's group at every step that logs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    _source: Schedule | TorchScheduleMeter | None = None
    _group: dist.ProcessGroup | None = None
    _file: Path | None = None

    def watch(
        self, source: Schedule | TorchScheduleMeter | None, *, group: dist.ProcessGroup | None, dump_folder: str
    ) -> None:
        """Report what ``source`` measures from now on.

        Args:
            source: What has ``metrics()``; None without a pipeline or where nothing is measured.
            group: The pipeline's process group; None without a pipeline.
            dump_folder: Folder of the run; ``slimpipe/rankN.json`` in it holds rank N's last figures and, where the
                loss is known, losses and gradient norms of all steps that logged. With
                ``slimpipe.record_times``, ``slimpipe/timeline_rankN.json`` is the last step that logged, of the
                pipeline that begins with rank N.
        """
        self._source, self._group = source, group
        self._file = Path(dump_folder) / "slimpipe" / f"rank{dist.get_rank()}.json"
        self._losses: list[float] = []
        self._grad_norms: list[float] = []

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        extra = dict(extra_metrics or {})
        mine = self._figures()
        if self._source is not None:
            everyone: list[Mapping[str, float] | None] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(everyone, mine, group=self._group)
            for rank, figures in enumerate(everyone):
                extra |= {f"slimpipe/{name}/rank_{rank}": value for name, value in (figures or {}).items()}
        self._losses.append(global_avg_loss)
        self._grad_norms.append(grad_norm)
        self._write(mine)
        if isinstance(self._source, Schedule) and self._source.options.record_times:
            self._write_timeline(self._source.timeline())
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=extra)

    def _figures(self) -> Mapping[str, float]:
        figures: Mapping[str, float] = {} if self._source is None else self._source.metrics()
        if isinstance(self._source, TorchScheduleMeter) or "peak_live_bytes" not in figures:
            return figures
        assert self._source is not None
        program = self._source.program
        # 1F1B on as many ranks holds whole microbatches of the same layers; a unit is one slice of one stage of them.
        num_units = program.num_slices * program.num_stages_per_rank
        whole_microbatch = figures["peak_live_bytes"] / figures["peak_live_units"] * num_units
        live_microbatches = min(program.num_ranks - dist.get_rank(self._group), program.num_microbatches)
        return {**figures, "one_f_one_b_bytes": round(whole_microbatch * live_microbatches)}

    def _write(self, figures: Mapping[str, float]) -> None:
        """Replace this rank's file as a whole: a run that is stopped leaves no half-written one."""
        assert self._file is not None
        record: dict[str, Any] = {"rank": dist.get_rank(), **figures}
        if self._group is None or dist.get_rank(self._group) == dist.get_world_size(self._group) - 1:
            record |= {"losses": self._losses, "grad_norms": self._grad_norms}
        _replace(self._file, json.dumps(record))

    def _write_timeline(self, timeline: Timeline) -> None:
        """On the first rank of each pipeline."""
        assert self._file is not None
        if dist.get_rank(self._group) == 0:
            _replace(self._file.with_name(f"timeline_{self._file.stem}.json"), timeline.to_json())


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, file)
