"""Names of the schedules that a run may choose: ours, and those of torch that torchtitan can run."""

from __future__ import annotations

SLIMPIPE_SCHEDULES = ("SlimPipe", "InterleavedSlimPipe")

TORCH_SCHEDULES = (
    "1F1B",
    "Interleaved1F1B",
    "GPipe",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
ONE_STAGE_PER_RANK = ("1F1B", "GPipe")
TWO_STAGES_PER_RANK = ("ZBVZeroBubble", "DualPipeV")
"""Of torch's, those whose number of stages is fixed; the others have two or more on each rank."""
