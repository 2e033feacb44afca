"""The program of a step, computed ahead of time by pure Python."""

from slimpipe.program.build import build_program
from slimpipe.program.check import check
from slimpipe.program.ir import Channel, Instruction, Op, Transfer, Unit
from slimpipe.program.program import Program, ProgramError
from slimpipe.program.slots import SlotPlan, plan_slots

__all__ = [
    "Channel",
    "Instruction",
    "Op",
    "Program",
    "ProgramError",
    "SlotPlan",
    "Transfer",
    "Unit",
    "build_program",
    "check",
    "plan_slots",
]
