"""What a schedule measures reaches torchtitan's loggers and the rank's file, integers and other numbers alike."""

import json

import pytest
import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor

from slimpipe import ScheduleSlimPipe, SlimPipeOptions
from slimpipe.planner.timeline import Span, Timeline
from slimpipe.torchtitan.metrics import SlimPipeMetrics

FIGURES = {"num_slices": 8, "exchange_bytes": 1 << 40, "exchange_wait_seconds": 0.125, "exchange_held_bytes": 0}


class Schedule:
    def metrics(self):
        return FIGURES


@pytest.fixture
def logged(monkeypatch):
    """Extra metrics of each call of torchtitan's own `log`; this process is rank 1 of a pipeline of two."""
    calls = []

    def gather(everyone, mine, group):
        everyone[:] = [{"exchange_wait_seconds": 0.5}, mine]

    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(MetricsProcessor, "log", lambda self, *args, extra_metrics: calls.append(extra_metrics))
    return calls


def test_numbers_reach_loggers_and_file(logged, tmp_path):
    metrics = object.__new__(SlimPipeMetrics)  # the loggers of torchtitan are not needed
    metrics.watch(Schedule(), group=None, dump_folder=str(tmp_path))
    metrics.log(1, 4.5, 5.0, 0.25, extra_metrics={"lr": 1e-3})
    assert logged == [
        {
            "lr": 1e-3,
            "slimpipe/exchange_wait_seconds/rank_0": 0.5,
            **{f"slimpipe/{name}/rank_1": value for name, value in FIGURES.items()},
        }
    ]
    record = json.loads((tmp_path / "slimpipe" / "rank1.json").read_text())
    assert record == {"rank": 1, **FIGURES, "losses": [4.5], "grad_norms": [0.25]}


@pytest.mark.parametrize(("record_times", "rank"), [(True, 0), (True, 1), (False, 0)])
def test_the_first_rank_writes_what_all_recorded(logged, monkeypatch, tmp_path, record_times, rank):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    timeline = Timeline("SlimPipe", 1, 4, 1, (Span(0, "F", 0.0, 1.0),))
    schedule = object.__new__(ScheduleSlimPipe)
    schedule.options = SlimPipeOptions(record_times=record_times)
    schedule.metrics, schedule.timeline = lambda: FIGURES, lambda: timeline
    metrics = object.__new__(SlimPipeMetrics)
    metrics.watch(schedule, group=None, dump_folder=str(tmp_path))
    metrics.log(1, 4.5, 5.0, 0.25)
    files = {file.name: file.read_text() for file in (tmp_path / "slimpipe").glob("timeline*")}
    if record_times and rank == 0:
        assert Timeline.from_json(files.pop("timeline_rank0.json")) == timeline
    assert files == {}
