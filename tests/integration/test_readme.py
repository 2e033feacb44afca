"""What the README shows is what the tools print and what the loader takes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from slimpipe.torchtitan.config import check
from slimpipe.torchtitan.toml import load_toml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_what_is_printed_below_a_command_is_what_it_prints() -> None:
    blocks = re.findall(r"    \$ python (tools/print_[^\n]*)\n((?:    [^\n]+\n)+)", README)
    assert [arguments.split()[0] for arguments, _ in blocks] == ["tools/print_schedule.py", "tools/print_exchange.py"]
    for arguments, shown in blocks:
        command = [sys.executable, *arguments.split()]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert [line.removeprefix("    ") for line in shown.splitlines()] == printed.stdout.splitlines()


def test_the_toml_file_is_a_legal_one(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    file = tmp_path / "run.toml"
    file.write_text(text)
    config = load_toml(str(file))
    check(config)
    assert (config.slimpipe.num_slices, config.training.seq_len) == (64, 131072)


def test_every_file_that_it_names_exists() -> None:
    named = set(re.findall(r"\b((?:tools|torchtitan_configs|tests|docs)/[\w./]+\w)", README))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []
