"""Planned memory is what ranks hold, within 5 % in every part (`tools/bench_memory.py`, tiny)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ["--json", "--seq-len=128", "--num-layers=4", "--dim=64"]


def test_planned_is_held() -> None:
    done = subprocess.run(
        [sys.executable, "tools/bench_memory.py", *TINY],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 26
    for row in rows:
        for part, error in row["errors"].items():
            # A quick peer leaves fewer messages under way than there may be, which are planned.
            assert -0.05 <= error <= (0.05 if part != "buffers" else 1.0), row
