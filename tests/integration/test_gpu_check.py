"""`tools/gpu_check.py` runs on a CPU with small sizes, finds errors, and says so by its exit status."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from slimpipe.attention.kernels.torch_cpu_flash import TorchCpuFlashKernel
from slimpipe.options import KERNEL_NAMES

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

Tool = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, no_numpy: dict[str, str]) -> tuple[dict, str]:
    """The file and the output of a run from another folder."""
    folder = tmp_path_factory.mktemp("gpu_check")
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--tiny", "--device=cpu", "--parts", "a", "b", "e"]
    result = subprocess.run(
        [*command, "--out", "found"], cwd=folder, env=no_numpy, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0 and "NumPy" not in result.stderr, result.stdout + result.stderr
    return json.loads((folder / "found/gpu_check.json").read_text()), result.stdout


def test_file(found: tuple[dict, str]) -> None:
    content, _ = found
    assert content["complete"] and content["ok"]
    assert {figure["part"] for figure in content["figures"]} == {"a", "b", "e"}
    for figure in content["figures"]:
        assert figure["value"] > 0 and figure["ok"], figure
    limited = [figure for figure in content["figures"] if figure["limit"] is not None]
    assert {figure["part"] for figure in limited} == {"a", "e"}, "small sizes do not tell what slicing costs"
    setting = content["setting"]
    assert setting["tiny"] and setting["device"].startswith("CPU") and setting["versions"]["torch"] == torch.__version__
    assert set(content["seconds"]) == {"a torch_cpu_flash", "a reference", "b torch_cpu_flash", "e vocabulary"}


def test_every_kernel_is_checked_or_refuses(found: tuple[dict, str]) -> None:
    content, _ = found
    for kernel in set(KERNEL_NAMES) - {"auto"}:
        names = [figure["name"] for figure in content["figures"] if figure["name"].startswith(f"{kernel}, error")]
        notes = [note for note in content["notes"] if note["part"] == "a" and note["name"].startswith(f"{kernel}, ")]
        for head_dim in ("64", "96", "128", "256", "192/128"):
            checked = [name for name in names if f"H={head_dim} " in name]
            refused = [note for note in notes if head_dim in note["name"].partition("head dim ")[2].split(", ")]
            assert bool(checked) != bool(refused), (kernel, head_dim)
            if checked:
                for what in (
                    "causal",
                    "past",
                    "documents past",
                    "long window past",
                    "large scores",
                    "4/4 heads",
                    "n=4",
                    "LSE",
                    "dq",
                    "dv",
                ):
                    assert any(what in name for name in checked), (kernel, head_dim, what)


def test_table(found: tuple[dict, str], tool: Tool, tmp_path: Path) -> None:
    content, output = found
    assert "torch_cpu_flash, error: worst of 550: H=" in output
    assert "(a) torch_cudnn, head dim 64, 96, 128, 256, 192/128: torch_cudnn needs tensors on a GPU" in output
    rows = [line for line in output.splitlines() if line.startswith(("a  ", "b  ", "e  "))]
    assert rows == sorted(rows, key=lambda row: row[0])
    path = tmp_path / "again.json"
    path.write_text(json.dumps(content))
    report = tool("gpu_report").Report.read(path)
    assert report.table(markdown=False) in output
    head, _, *rows = report.table(markdown=True).splitlines()
    assert content["setting"]["date"] in head and "--parts a b e" in head
    assert rows[:2] == ["| part | figure | value | limit |  |", "| --- | --- | ---: | ---: | --- |"]
    report.write(path)
    assert json.loads(path.read_text()) == content


@pytest.mark.parametrize("value", [1.06, math.nan, math.inf])
def test_a_missed_limit_fails(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, value: float
) -> None:
    gpu_check, figure = tool("gpu_check"), tool("gpu_figures").Figure
    arguments = ["--tiny", "--device=cpu", "--out", str(tmp_path)]
    monkeypatch.setenv("PYTHONPATH", "")  # restored afterwards
    good = figure("b", "ratio: n=8", 1.04, "x", 1.05)
    monkeypatch.setattr(gpu_check, "jobs", lambda *_, **__: [good])
    assert gpu_check.main(arguments) == 0
    assert "FAILED" not in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "jobs", lambda *_, **__: [good, figure("b", "ratio: n=32", value, "x", 1.05)])
    assert gpu_check.main(arguments) == 1
    assert "FAILED: (b) ratio: n=32" in capsys.readouterr().out
    assert gpu_check.main(["--read", str(tmp_path / "gpu_check.json"), "--markdown"]) == 1


def test_a_failed_job_fails_and_the_others_run(tool: Tool, tmp_path: Path) -> None:
    gpu_check, figure = tool("gpu_check"), tool("gpu_figures").Figure
    report = tool("gpu_report").Report({})
    todo = [
        gpu_check.Job("a", "dies", partial(os._exit, 3)),
        gpu_check.Job("b", "raises", partial(int, "no number")),
        gpu_check.Job("e", "works", partial(list, [figure("e", "time", 1.0, "ms")])),
    ]
    gpu_check.check(report, tmp_path / "file.json", todo, CPU, minutes=6.0)
    dead, raised, good = report.figures
    assert not dead.ok and dead.name == "dies raised JobError: its process ended with exit code 3"
    assert not raised.ok and "ValueError: invalid literal" in raised.name
    assert "Traceback" in report.notes[0].text
    assert good.ok and not report.ok
    assert len(json.loads((tmp_path / "file.json").read_text())["figures"]) == 3


def test_a_job_that_hangs_is_ended(tool: Tool) -> None:
    jobs = tool("gpu_jobs")
    start = time.monotonic()
    with pytest.raises(jobs.JobError, match="ended after 1 s"):
        list(jobs.run_job(partial(time.sleep, 100), seconds=1.0))
    assert time.monotonic() - start < 50


def _ends_well(path: Path) -> Iterator[str]:
    try:
        yield "started"
        time.sleep(100)
    finally:
        path.touch()


def test_a_job_that_is_ended_can_end_what_it_has_started(tool: Tool, tmp_path: Path) -> None:
    job = tool("gpu_jobs").run_job(partial(_ends_well, tmp_path / "ended"), seconds=100.0)
    assert next(job) == "started"
    job.close()
    assert (tmp_path / "ended").exists()


def test_the_tool_that_is_ended_leaves_its_file(tmp_path: Path, no_numpy: dict[str, str]) -> None:
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), "--tiny", "--device=cpu", "--parts", "e", "c"]
    with subprocess.Popen([*command, "--out", str(tmp_path)], env=no_numpy, stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        read = ""
        while "(c)" not in read:
            read += tool.stdout.read(1)
        tool.terminate()
        assert tool.wait(60) == 1
    content = json.loads((tmp_path / "gpu_check.json").read_text())
    assert content["figures"] and not content["complete"]


def test_what_builds_plans_comes_last_and_has_few_shapes(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check, kernels, slicing = tool("gpu_check"), tool("gpu_kernels"), tool("gpu_slicing")
    name, shapes = TorchCpuFlashKernel.name, set()
    for module in (kernels, slicing):
        monkeypatch.setattr(module, "BUILDS_PLANS", (name,))
    jobs = [job for job in gpu_check.jobs([*"abcde"], CPU, tiny=True, minutes=6.0) if isinstance(job, gpu_check.Job)]
    assert [(job.part, job.name) for job in jobs] == [
        ("a", "reference"), ("e", "vocabulary"), ("c", "pipeline"), ("a", name), ("b", name),
    ]  # fmt: skip

    def forward(self, q, k, v, *how):
        shapes.add((*(x.shape for x in (q, k, v)), *(x.stride() for x in (q, k, v)), how[0]))
        return real(self, q, k, v, *how)

    def refusals(*_: torch.Tensor, window: bool = False) -> dict[str, str | None]:
        return {name: "has no sliding windows" if window else None}

    real = TorchCpuFlashKernel._forward
    monkeypatch.setattr(TorchCpuFlashKernel, "_forward", forward)
    monkeypatch.setattr(kernels, "refusals", refusals)
    names = [item.name for item in kernels.check(CPU, kernel=name, head_dims=["64", "96", "128"], tiny=True)]
    assert len(shapes) <= 20, "about one second each"
    for what in ("H=96 4/2 heads, past", "H=128 4/2 heads, large scores past", "documents past", "n=4", "most shapes"):
        assert any(what in name for name in names), what
    shapes.clear()
    notes_and_figures = list(slicing.run(CPU, kernel=name, tiny=True, deadline=time.monotonic() + 100))
    assert len(shapes) == 1 + 4 + 8  # in one piece, in slices, the pieces in as many as at full size
    assert {"n=4", "unsliced"} <= {item.name.partition(":")[0].split()[-1] for item in notes_and_figures}


def test_a_part_that_cannot_start_fails(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu_check = tool("gpu_check")
    monkeypatch.setitem(sys.modules, "gpu_vocabulary", None)  # importing it fails
    (failed,) = gpu_check.jobs(["e"], CPU, tiny=True, minutes=6.0)
    assert not failed.ok and "gpu_vocabulary" in failed.name


def test_what_there_is_no_time_for_is_listed(tool: Tool, tmp_path: Path) -> None:
    notes = list(tool("gpu_slicing").run(CPU, kernel="torch_cpu_flash", tiny=True, deadline=time.monotonic() - 1))
    assert [note.name for note in notes] == ["torch_cpu_flash S=256", "torch_cpu_flash S=512"]
    assert all(note.text.startswith("skipped: ") for note in notes)
    report, gpu_check = tool("gpu_report").Report({}), tool("gpu_check")
    gpu_check.check(report, tmp_path / "file.json", [gpu_check.Job("b", "late", list)], CPU, minutes=-1.0)
    assert [note.text for note in report.notes] == ["skipped: -1 minutes are over"]


class Wrong(TorchCpuFlashKernel):
    """LSE to base 2, and too large a dv."""

    def _forward(self, *args):
        out, lse = super()._forward(*args)
        return out, lse / math.log(2)

    def _backward(self, dout, q, k, v, out, lse, *how):
        dq, dk, dv = super()._backward(dout, q, k, v, out, lse * math.log(2), *how)
        return dq, dk, dv * 1.02


def test_errors_of_a_kernel_are_found(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = tool("gpu_kernels")
    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: Wrong())
    figures = list(kernels.check(CPU, kernel="torch_cpu_flash", head_dims=["64"], tiny=True))
    alone = [figure for figure in figures if figure.name.startswith("torch_cpu_flash, error: ")]
    assert len(alone) == 110
    for figure in alone:
        merged = any(f" {view} past " in figure.name for view in ("documents", "long window"))
        wrong = figure.name.endswith((" LSE", " dv")) or merged
        assert wrong or figure.ok, figure
        assert not (figure.name.endswith((" LSE", " dv")) and figure.ok), figure


def test_a_ratio_needs_both_of_its_figures(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = tool("gpu_vocabulary")

    def measure(loss: Callable, *_: object) -> tuple[float, int]:
        if loss is vocabulary.plain:
            raise RuntimeError("out of memory")
        return 1.0, 1

    monkeypatch.setattr(vocabulary, "_measure", measure)
    items = list(vocabulary.run(CPU, tiny=True))
    (failed,) = (item for item in items if getattr(item, "ok", True) is False)
    assert failed.name == "T=64 V=1000, plain cross entropy in float32 raised RuntimeError: out of memory"
    assert "T=64 V=1000, VocabularyHead: time" in {item.name for item in items}
    assert not any("over plain" in item.name for item in items)


def test_full_sizes_need_a_gpu(tool: Tool, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        tool("gpu_check").main(["--device", "cpu"])
    assert exit_.value.code == 2
    assert "nearest legal choice: --tiny" in capsys.readouterr().err
