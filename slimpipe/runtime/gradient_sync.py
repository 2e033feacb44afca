"""When FSDP2 reduces gradients: once per unit and step, in the last backward."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from slimpipe.torch_private import forget_failed_step


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

    def rest(self) -> None:
        """Be as outside of steps. Weights that a forward without backward has gathered are let go: the next step would
        take them for the newest ones."""
        self.set(last=True)
        for module in self._fsdp:
            module.reshard()

    def forget(self) -> None:
        """The same after a step that failed: FSDP2 forgets it, and the gradients that it had yet to reduce."""
        for module in self._fsdp:
            forget_failed_step(module)
        self.rest()
