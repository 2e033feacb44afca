"""The program of a step, computed ahead of time by pure Python."""

from slimpipe.program.build import build_program
from slimpipe.program.check import ProgramError, check
from slimpipe.program.ir import Channel, Instruction, Op, Unit
from slimpipe.program.program import Program
from slimpipe.program.slots import SlotPlan, plan_slots

__all__ = [
    "Channel",
    "Instruction",
    "Op",
    "Program",
    "ProgramError",
    "SlotPlan",
    "Unit",
    "build_program",
    "check",
    "plan_slots",
]
