"""Settings of the tests of what is shown."""

from slimpipe.options import SlimPipeOptions
from slimpipe.planner.shown import Setting


def setting(*, p: int, n: int, v: int | None = None, m: int = 2, exchange: str = "off", **others: object) -> Setting:
    """Slices of 64 tokens."""
    return Setting(
        num_ranks=p,
        num_slices=n,
        num_stages_per_rank=v,
        num_microbatches=m,
        slice_len=64,
        options=SlimPipeOptions(context_exchange=exchange, exchange_granularity=8),
        **others,
    )
