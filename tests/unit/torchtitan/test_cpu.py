"""The CPU device module, and that every torchtitan module sees it whenever it was imported."""

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from slimpipe.torchtitan.cpu import CpuDevice, with_gloo_reductions

EARLY_AND_LATE = """
import torch
{first}
torch.accelerator.current_accelerator = lambda check_available=False: {accelerator}
from slimpipe.torchtitan.cpu import use_cpu
answers = use_cpu(), use_cpu()
import torchtitan.components.metrics as metrics
import torchtitan.distributed.utils as dist_utils
import torchtitan.distributed.parallel_dims as parallel_dims
import torchtitan.tools.utils as utils
print(answers, metrics.device_type, dist_utils.device_type, parallel_dims.device_type, utils.device_type)
print({{type(m.device_module).__name__ for m in (metrics, dist_utils, utils)}}, utils.device_module is torch.cuda)
"""


def run(*, firsts, accelerator):
    """What each prints; all at once, as importing takes seconds."""
    codes = [EARLY_AND_LATE.format(first=first, accelerator=accelerator) for first in firsts]
    settings = {"stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[3]}
    processes = [subprocess.Popen([sys.executable, "-c", code], **settings) for code in codes]
    printed = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(firsts)
    return printed


def test_cpu_whether_torchtitan_was_imported_before_or_not():
    for types, modules in run(firsts=("", "import torchtitan.trainer"), accelerator="None"):
        assert types == "(True, True) cpu cpu cpu cpu"
        assert modules == "{'CpuDevice'} False"


def test_nothing_changes_where_an_accelerator_is_present():
    first = "import torch._utils, torchtitan.tools.utils as u; u.device_type, u.device_module = 'cuda', torch.cuda"
    ((types, modules),) = run(firsts=[first], accelerator="torch.device('cuda')")
    assert types == "(False, False) cuda cuda cuda cuda"
    assert modules.endswith("True")


def test_device_answers():
    device = CpuDevice()
    assert (device.device_count(), device.current_device(), device.get_device_name()) == (1, 0, "CPU")
    total, peak = device.get_device_properties().total_memory, device.memory_stats()["active_bytes.all.peak"]
    assert 10 * 2**20 < peak < total  # this process: more than Python, less than the machine
    block = torch.ones(50 * 2**20 // 4)
    assert device.memory_stats()["active_bytes.all.peak"] >= peak
    assert block.sum() > 0


def test_every_fsdp_module_reduces_with_sums():
    class Sharded(nn.Linear, FSDPModule):
        def __new__(cls, *args, **kwargs):  # FSDPModule.__new__ undoes fully_shard's class change
            return object.__new__(cls)

        def set_force_sum_reduction_for_comms(self, enable):
            self.forced = enable

    def parallelize(model, *, parallel_dims):
        model.dims = parallel_dims
        return model

    model = nn.Sequential(Sharded(1, 1), nn.Linear(1, 1), nn.Sequential(Sharded(1, 1)))
    wrapped = with_gloo_reductions(parallelize)(model, parallel_dims="dims")
    assert wrapped is model
    assert wrapped.dims == "dims"
    assert [module.forced for module in model.modules() if isinstance(module, Sharded)] == [True, True]
