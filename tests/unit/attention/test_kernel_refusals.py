"""Which CUDA kernel serves which GPU, head dims and release of its library, and what it says where it does not."""

import sys
import types

import pytest
import torch

from slimpipe.attention.kernels import choose_kernel, packages
from slimpipe.attention.kernels.choose import _FASTEST_FIRST, refusals
from slimpipe.attention.kernels.flash_attn import FlashAttnKernel
from slimpipe.attention.kernels.flash_attn_3 import FlashAttn3Kernel
from slimpipe.attention.kernels.flash_attn_4 import FlashAttn4Kernel
from slimpipe.options import KERNEL_NAMES
from slimpipe.torch_private import parameters_of
from tests.unit.attention.flash_stand_ins import (
    CUDNN,
    FLASH_ATTN_2,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    TORCH,
    OnGpu,
    function,
)

MODULES = {
    "flash_attn.flash_attn_interface": FLASH_ATTN_2["2.8.3"],
    "flash_attn_interface": FLASH_ATTN_3["November 2025"],
    "flash_attn.cute.interface": FLASH_ATTN_4,
}


@pytest.fixture
def machine(monkeypatch):
    """Sets the GPU, and what is installed and active."""

    def set_machine(capability=(9, 0), *, installed=MODULES, config=None, active=None, version="4.0.0b36"):
        found = {**dict.fromkeys((*MODULES, "flash_attn_config"), "ModuleNotFoundError: none"), **installed}
        if config is not None:
            found["flash_attn_config"] = types.SimpleNamespace(CONFIG={"build_flags": config})
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active)
        monkeypatch.setattr(packages, "load", found.__getitem__)
        monkeypatch.setattr("slimpipe.attention.kernels.flash_attn_3.load", found.__getitem__)
        monkeypatch.setattr("slimpipe.attention.kernels.flash_attn_4.installed_version", lambda distribution: version)
        package = types.ModuleType("flash_attn")
        package.__version__ = "2.8.3"
        monkeypatch.setitem(sys.modules, "flash_attn", package)

    set_machine()
    return set_machine


def reason(kernel, head_dim, head_dim_v=None, **how):
    q, v = OnGpu(head_dim, **how), OnGpu(head_dim_v or head_dim, **how)
    return kernel.refusal(q, q, v)


ALL = {"flash_attn_3", "flash_attn_4", "torch_cuda_flash", "flash_attn"}
PADDED = {"torch_cuda_flash", "flash_attn"}
"""They know one head dim only, and get V with zeros behind it."""


@pytest.mark.parametrize(
    "capability, head_dims, serve",
    [
        ((7, 5), (64, 64), set()),
        ((8, 0), (64, 64), {"torch_cuda_flash", "flash_attn", "torch_cudnn"}),
        ((8, 0), (256, 256), {"torch_cuda_flash", "flash_attn"}),
        ((8, 9), (224, 224), {"flash_attn"}),
        ((8, 9), (256, 256), {"torch_cuda_flash", "flash_attn"}),
        ((8, 0), (192, 128), PADDED),
        ((9, 0), (64, 64), {*ALL, "torch_cudnn"}),
        ((9, 0), (96, 96), {*ALL, "torch_cudnn"}),
        ((9, 0), (128, 128), {*ALL, "torch_cudnn"}),
        ((9, 0), (256, 256), ALL),
        ((9, 0), (192, 128), {"flash_attn_3", "flash_attn_4", "torch_cudnn", *PADDED}),
        ((10, 0), (128, 128), {"flash_attn_4", "torch_cuda_flash", "flash_attn", "torch_cudnn"}),
        ((10, 0), (160, 160), {"torch_cuda_flash", "flash_attn"}),
        ((10, 0), (256, 256), {"flash_attn_4", "torch_cuda_flash", "flash_attn"}),
        ((10, 0), (192, 128), {"flash_attn_4", "torch_cudnn", *PADDED}),
        ((12, 0), (128, 128), {"torch_cuda_flash", "flash_attn", "torch_cudnn"}),
        ((9, 0), (60, 60), set()),
        ((9, 0), (128, 64), {*ALL, "torch_cudnn"}),
    ],
)
def test_who_serves(capability, head_dims, serve, machine):
    machine(capability)
    q, v = map(OnGpu, head_dims)
    serving = {name for name, refused in refusals(q, q, v).items() if refused is None}
    assert serving - {"reference"} == serve


@pytest.mark.parametrize("kernel", [TORCH, CUDNN, FlashAttnKernel(), FlashAttn3Kernel(), FlashAttn4Kernel()])
def test_every_kernel_wants_half_precision_and_a_multiple_of_eight(kernel, machine):
    assert "needs torch.bfloat16 or torch.float16" in reason(kernel, 64, dtype=torch.float32)
    assert "it is 60, nearest legal value: 64" in reason(kernel, 60)
    assert "nearest legal value: " in reason(kernel, 512)
    assert "needs one head dim" in reason(kernel, 128, 64) and "q and k have 128, v has 64" in reason(kernel, 128, 64)


def test_head_dims_that_are_told(machine):
    assert reason(TORCH, 192, 128) == "needs one head dim; q and k have 192, v has 128"
    assert "or 192 with 128 for V; q and k have 96, v has 64" in reason(FlashAttn3Kernel(), 96, 64)
    machine((10, 0))
    assert "8, 16, .. 128 or 256; it is 200, nearest legal value: 256" in reason(FlashAttn4Kernel(), 200)


@pytest.mark.parametrize("kernel", [FlashAttn3Kernel(), FlashAttn4Kernel(), CUDNN])
def test_amd_gpus(kernel, machine, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "needs an NVIDIA GPU" in reason(kernel, 64)


@pytest.mark.parametrize(
    "capability, auto", [((8, 0), "torch_cuda_flash"), ((9, 0), "flash_attn_3"), ((10, 0), "flash_attn_4")]
)
def test_auto_takes_what_was_written_for_the_gpu(capability, auto, machine, monkeypatch):
    monkeypatch.setattr("slimpipe.attention.kernels.choose.check_shapes", lambda *tensors: None)
    machine(capability)
    tensors = [OnGpu(128)] * 3
    assert choose_kernel("auto", *tensors).name == auto
    machine(capability, installed={})
    assert choose_kernel("auto", *tensors).name == "torch_cuda_flash"


def test_every_name_is_a_kernel():
    q = torch.zeros(1, 4, 2, 8)
    assert {"auto", *refusals(q, q, q)} == set(KERNEL_NAMES)
    assert "torch_cudnn" not in {kind.name for kind in _FASTEST_FIRST}


def test_a_window_is_a_reason(machine, monkeypatch):
    monkeypatch.setattr("slimpipe.attention.kernels.choose.check_shapes", lambda *tensors: None)
    tensors = [OnGpu(128)] * 3
    assert choose_kernel("torch_cudnn", *tensors).name == "torch_cudnn"
    with pytest.raises(
        ValueError, match=r"torch_cudnn has no sliding windows; these .* 'flash_attn_3', 'flash_attn_4'"
    ):
        choose_kernel("torch_cudnn", *tensors, window=True)
    assert choose_kernel("flash_attn", *tensors, window=True).name == "flash_attn"


@pytest.mark.parametrize(
    "active, capability, head_dims, said",
    [
        ("FA3", (9, 0), (64, 64), None),
        ("FA3", (9, 0), (192, 128), None),
        ("FA3", (8, 0), (64, 64), "has FA3 activated, which needs compute capability 9.x; this GPU has 8.0; torch.nn."),
        ("FA4", (9, 0), (192, 128), None),
        ("FA4", (10, 0), (256, 256), None),
        ("FA4", (11, 0), (64, 64), "needs compute capability 9.x or 10.x"),
        ("FA4", (10, 0), (160, 160), "nearest legal value: 128"),
        ("FA9", (9, 0), (64, 64), "has FA9 activated, which is not known to work"),
    ],
)
def test_torch_follows_what_is_activated_in_it(active, capability, head_dims, said, machine, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    machine(capability, active=active)
    refused = reason(TORCH, *head_dims)
    assert refused is None if said is None else said in refused and "restore_flash_attention_impl()" in refused


def test_torch_before_2_14_has_no_working_fa4(machine, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    machine(active="FA4")
    assert "has FA4 activated, which needs torch 2.14 or newer" in reason(TORCH, 64)
    machine(active="FA3")
    assert reason(TORCH, 64) is None


def test_deterministic_backward(machine, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "no deterministic backward" in reason(CUDNN, 64)
    assert "nearest legal value: 192" in reason(FlashAttn3Kernel(), 256)
    assert reason(FlashAttn3Kernel(), 192) is reason(FlashAttn4Kernel(), 256) is reason(TORCH, 256) is None


@pytest.mark.parametrize(
    "kernel, how",
    [
        (FlashAttnKernel(), "pip install 'slimpipe[flash]'"),
        (FlashAttn3Kernel(), "built from the hopper folder of the flash-attention repository"),
        (FlashAttn4Kernel(), "pip install 'slimpipe[flash4]'"),
    ],
)
def test_a_missing_package_says_how_to_get_it(kernel, how, machine):
    machine(installed={})
    assert how in reason(kernel, 64) and "ModuleNotFoundError: none" in reason(kernel, 64)


def test_a_package_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface_of_nobody", None)
    assert "ModuleNotFoundError" in packages.load("flash_attn_interface_of_nobody")


@pytest.mark.parametrize("version, fits", [("2.6.3", False), ("2.7.0", True), ("2.8.3.post1", True), ("3.0.0", False)])
def test_versions_of_flash_attn(version, fits, machine):
    sys.modules["flash_attn"].__version__ = version
    refused = reason(FlashAttnKernel(), 64)
    assert refused is None if fits else "flash-attn 2.7 or newer of the 2.x line" in refused and version in refused


@pytest.mark.parametrize(
    "version, fits", [("4.0.0b15", False), ("4.0.0b16", True), ("4.0.0b36", True), ("4.0.0", True), (None, False)]
)
def test_versions_of_flash_attn_4(version, fits, machine):
    machine(version=version)
    refused = reason(FlashAttn4Kernel(), 64)
    assert refused is None if fits else "needs flash-attn-4 4.0.0b16 or newer" in refused


@pytest.mark.parametrize("releases, kind", [(FLASH_ATTN_2, FlashAttnKernel), (FLASH_ATTN_3, FlashAttn3Kernel)])
def test_every_known_release_fits(releases, kind, machine):
    for functions in releases.values():
        assert reason(kind(functions=functions), 64) is None


@pytest.mark.parametrize(
    "kind, changed, said",
    [
        # flash-attn 2.6, and FlashAttention-3 before 2025, as they were.
        (
            FlashAttnKernel,
            "q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax",
            "_flash_attn_forward has no parameter 'window_size_left'",
        ),
        (
            FlashAttn3Kernel,
            "q, k, v, softmax_scale, causal, window_size, descale_q=None, descale_k=None, descale_v=None",
            "_flash_attn_forward has no parameter 'cu_seqlens_q'",
        ),
        # One to come.
        (
            FlashAttn4Kernel,
            "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size_left, "
            "return_lse, plan",
            "_flash_attn_fwd needs a parameter 'plan' that slimpipe does not know",
        ),
        (FlashAttn4Kernel, None, "_flash_attn_fwd is missing"),
    ],
)
def test_unknown_signatures_are_refused(kind, changed, said, machine):
    known = {FlashAttnKernel: MODULES["flash_attn.flash_attn_interface"], FlashAttn4Kernel: FLASH_ATTN_4}
    functions = types.SimpleNamespace(**vars(known.get(kind, FLASH_ATTN_3["v2.8.3"])))
    name = "_flash_attn_fwd" if kind is FlashAttn4Kernel else "_flash_attn_forward"
    setattr(functions, name, changed and function(changed, None))
    refused = reason(kind(functions=functions), 64)
    assert said in refused and refused.startswith(f"needs {kind.needs}")


@pytest.mark.parametrize(
    "left_out, head_dim, said",
    [
        ("BACKWARD", 64, "FLASHATTENTION_DISABLE_BACKWARD; build it without"),
        ("VARLEN", 64, "FLASHATTENTION_DISABLE_VARLEN"),
        ("LOCAL", 64, "FLASHATTENTION_DISABLE_LOCAL"),
        ("HDIM256", 256, "without head dims of 256 or more"),
        ("HDIM96", 96, None),
        ("FP8", 64, None),
    ],
)
def test_flash_attn_3_built_without_a_part(left_out, head_dim, said, machine):
    machine(config={f"FLASHATTENTION_DISABLE_{left_out}": True, "FLASHATTENTION_DISABLE_HDIM64": False})
    refused = reason(FlashAttn3Kernel(), head_dim)
    assert refused is None if said is None else said in refused


def test_parameters_of_a_custom_op():
    def add(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + y * scale

    op = torch.library.custom_op("slimpipe_test_parameters::add", add, mutates_args=())
    assert parameters_of(op) == parameters_of(add) == {"x": True, "y": True, "scale": False}


@pytest.mark.parametrize(
    "version, numbers",
    [
        ("2.7.0", (2, 7, 0, float("inf"))),
        ("2.14", (2, 14, 0, float("inf"))),
        ("4.0.0b16", (4, 0, 0, 16)),
        ("2.14.1+cu130", (2, 14, 1, float("inf"))),
        ("unknown", (0,)),
    ],
)
def test_parse_version(version, numbers):
    assert packages.parse_version(version) == numbers
