"""When FSDP2 reduces gradients: once per unit and step, in the last backward."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


class GradientSync:
    """The FSDP2 switches of some modules.

    Args:
        modules: Modules that may be, or hold, FSDP2 modules.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._fsdp = [part for module in modules for part in module.modules() if isinstance(part, FSDPModule)]

    def set(self, *, last: bool) -> None:
        """Say whether the backwards that follow are the step's last: only those reduce gradients, and free weights."""
        for module in self._fsdp:
            module.set_is_last_backward(last)
            module.set_reshard_after_backward(last, recurse=False)
            module.set_requires_gradient_sync(last, recurse=False)
