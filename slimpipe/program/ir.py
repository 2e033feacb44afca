"""What a program is made of: units of work and the instructions that say what a rank does with them.

A program is computed once, ahead of time, by pure Python. Everything else reads it: the checker proves it, a simulator
times it, a drawer shows it, the executor runs it. Ticks number the lock-step slots of the schedule, one forward and one
backward per rank and tick; they say *when* an instruction is meant to run, the order of a rank's list says what it runs
next.

Messages travel on one channel per directed pair of ranks and direction of the pass, (source, destination, forward or
backward). A channel is first-in first-out.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

MAX_UNMATCHED_SENDS = 2
"""Sends of one channel that may be under way before their receives are posted; the next send waits. Every program can
be run under this limit (see `check`)."""


class Op(Enum):
    """The closed set of things a rank can be told to do.

    ``RECEIVE_*`` posts a receive and returns at once; the compute instruction that needs the tensor waits for it.
    ``SEND_*`` starts a send and returns at once, except that it may wait for `MAX_UNMATCHED_SENDS`. It need not follow
    its unit's compute instruction directly: where the peer has no use for the tensor yet, it stands later in the list.
    """

    RECEIVE_FORWARD = "RF"
    """Post the receive of the activation that enters ``unit`` (sent by the rank of the stage before)."""
    FORWARD = "F"
    """Run ``unit`` forward."""
    SEND_FORWARD = "SF"
    """Send the output of ``unit`` to the rank of the stage after."""
    RECEIVE_BACKWARD = "RB"
    """Post the receive of the gradient of ``unit``'s output (sent by the rank of the stage after)."""
    BACKWARD = "B"
    """Run ``unit`` backward."""
    SEND_BACKWARD = "SB"
    """Send the gradient of ``unit``'s input to the rank of the stage before."""


class Unit(NamedTuple):
    """One slice of one microbatch on one stage: the smallest thing that is scheduled."""

    microbatch: int
    stage: int
    """Global stage index: local stage j of rank r is stage j * num_ranks + r."""
    slice: int

    def __str__(self) -> str:
        return f"microbatch {self.microbatch}, stage {self.stage}, slice {self.slice}"


class Channel(NamedTuple):
    """A directed edge of the pipeline for one direction of the schedule. It carries its messages first-in first-out."""

    source: int
    destination: int
    direction: str
    """"forward" or "backward"."""

    def __str__(self) -> str:
        return f"the {self.direction} channel from rank {self.source} to rank {self.destination}"


class Instruction(NamedTuple):
    """One entry of a rank's list."""

    tick: int
    """Tick of the compute instruction that it is or stands beside: a receive before it, a send after it."""
    op: Op
    unit: Unit
    peer: int | None = None
    """Pipeline rank at the other end of a message; None for compute."""

    def channel(self, rank: int) -> Channel:
        """The channel of a message, of which ``rank`` is told this instruction."""
        assert self.peer is not None
        direction = "forward" if self.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD) else "backward"
        sends = self.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD)
        return Channel(rank, self.peer, direction) if sends else Channel(self.peer, rank, direction)

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.op.name.lower()}{peer} ({self.unit}; tick {self.tick})"
