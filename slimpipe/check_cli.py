"""`slimpipe check`: everything that can be known about a run before it starts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from slimpipe.arguments import require_torchtitan


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The command's arguments."""
    command = commands.add_parser(
        "check",
        allow_abbrev=False,
        usage="slimpipe check CONFIG.toml [--section.key value ...] [--json]",
        help="check a configuration against every rule that its run would meet",
        description="Check versions, attention kernels and every rule that a run would meet, and prove its program. "
        "Starts and writes nothing. The exit code is 0 if the run can start on a machine like this one, else 2.",
        epilog="--section.key value sets any key of the file and wins over it, as in slimpipe train.",
    )
    command.add_argument("config", metavar="CONFIG.toml", help="configuration file")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    return command


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the command; the exit code.

    Raises:
        ValueError: torchtitan is missing.
    """
    require_torchtitan("checking a run")
    from slimpipe.torchtitan.findings import find

    findings = find(arguments.config, overrides)
    print(json.dumps(findings.figures()) if arguments.json else "\n".join(findings.lines()), flush=True)
    return 2 if findings.errors else 0
