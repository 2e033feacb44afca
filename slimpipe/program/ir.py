"""What a program is made of: units of work and the instructions that say what a rank does with them.

A program is computed once, ahead of time, by pure Python. Everything else reads it: the checker proves it, a simulator
times it, a drawer shows it, the executor runs it. Ticks number the lock-step slots of the schedule, one forward and one
backward per rank and tick; they say *when* an instruction is meant to run, the order of a rank's list says what it runs
next.

Messages travel on one channel per directed pair of ranks and direction of the pass, (source, destination, forward or
backward). A channel is first-in first-out.

A tick has two *phases*, in which all ranks run forward and all run backward. In each, ranks with long contexts may hand
part of their attention to ranks with short ones or with no unit at all: a `Transfer` says what.

Where the ranks share the vocabulary, all of them work together on the output layer and loss of the unit that the last
stage has just run forward, and on the embedding of the unit that the first stage is about to. See `vocabulary`.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from slimpipe.program.runs import Runs, num_rows

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
    HELP_FORWARD = "HF"
    """Without a unit of its own to run forward at this tick, the rank helps others with theirs, ``unit`` among them."""
    HELP_BACKWARD = "HB"
    """The same for backward."""
    EMBED = "E"
    """With all other ranks: embed the tokens of ``unit``, of the first stage; the result goes to the first rank."""
    VOCABULARY = "V"
    """With all other ranks: output layer and loss of ``unit``, of the last stage, and their gradients."""
    EMBED_BACKWARD = "EB"
    """With all other ranks: backward of `EMBED`, with the gradient that the first rank has for ``unit``."""

    @property
    def phase(self) -> Op | None:
        """`FORWARD` or `BACKWARD` for what computes in that phase, units and help; None for all else."""
        if self in (Op.FORWARD, Op.HELP_FORWARD):
            return Op.FORWARD
        return Op.BACKWARD if self in (Op.BACKWARD, Op.HELP_BACKWARD) else None

    @property
    def place(self) -> int | None:
        """Which place in a tick it has: embedding, forward, vocabulary, backward, backward of the embedding; None for
        messages, which stand beside what computes."""
        if self.phase is not None:
            return 1 if self.phase is Op.FORWARD else 3
        return {Op.EMBED: 0, Op.VOCABULARY: 2, Op.EMBED_BACKWARD: 4}.get(self)

    @property
    def is_message(self) -> bool:
        """Whether it posts a receive or starts a send."""
        return self.place is None

    @property
    def is_shared(self) -> bool:
        """Whether all ranks run it together: work on the vocabulary."""
        return self.place is not None and self.phase is None


RECEIVE_OF = {Op.FORWARD: Op.RECEIVE_FORWARD, Op.BACKWARD: Op.RECEIVE_BACKWARD}
"""Of what runs a unit: the receive that it may need."""
SEND_OF = {Op.FORWARD: Op.SEND_FORWARD, Op.BACKWARD: Op.SEND_BACKWARD}
"""Of what runs a unit: the send that may follow it."""
COMPUTE_OF = {message: compute for messages in (RECEIVE_OF, SEND_OF) for compute, message in messages.items()}
"""Of a message: what runs its unit."""


class Unit(NamedTuple):
    """One slice of one microbatch on one stage: the smallest thing that is scheduled."""

    microbatch: int
    stage: int
    """Global stage index: local stage j of rank r is stage j * num_ranks + r."""
    slice: int

    def __str__(self) -> str:
        return f"microbatch {self.microbatch}, stage {self.stage}, slice {self.slice}"


class Transfer(NamedTuple):
    """Part of the attention of one unit that another rank computes, in every attention layer of the unit's stage.

    The owner of the unit sends its queries (in backward also the gradient of the output, the output and the LSE) and
    those K,V rows that the helper does not hold; the helper returns output and LSE (in backward the gradient of the
    queries, and those of the K,V rows that it lets go). Token indices count from the start of the microbatch.
    """

    tick: int
    phase: Op
    """`Op.FORWARD` or `Op.BACKWARD`: in which phase of the tick."""
    unit: Unit
    helper: int
    rows: Runs
    """Past tokens on which the helper computes."""
    sent: Runs
    """Those of them whose K,V the owner sends; the helper holds the others from an earlier transfer of the phase."""
    dropped: Runs
    """Those of them whose K,V the helper lets go afterwards; in backward it returns their dK,dV, added up."""

    def __str__(self) -> str:
        return (
            f"transfer of {num_rows(self.rows)} rows of {self.unit} to rank {self.helper} "
            f"({self.phase.name.lower()}, tick {self.tick})"
        )


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
    """Pipeline rank at the other end of a message; None for all else."""

    def channel(self, rank: int) -> Channel:
        """The channel of a message, of which ``rank`` is told this instruction."""
        assert self.peer is not None
        direction = "forward" if self.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD) else "backward"
        sends = self.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD)
        return Channel(rank, self.peer, direction) if sends else Channel(self.peer, rank, direction)

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.op.name.lower()}{peer} ({self.unit}; tick {self.tick})"
