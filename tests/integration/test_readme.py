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


def test_the_picture_is_made_by_the_command_above_it() -> None:
    arguments, picture = re.search(
        r"    \$ python (tools/print_schedule\.py [^\n]*)\n((?:    rank [^\n]*\n)+)", README
    ).groups()
    printed = subprocess.run([sys.executable, *arguments.split()], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.strip() for line in picture.splitlines()] == printed.stdout.splitlines()


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
