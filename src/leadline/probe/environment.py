"""What the machine is, and whether it can run bf16 here.

Capability is necessary and not sufficient: the wheel must hold code for the device's
architecture, and one real attention kernel must run, forward and backward. The software,
the device with its power limit and the variables that steer torch go into the fingerprint.
"""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from leadline.core.canonical import sha256_json
from leadline.core.errors import EnvironmentUnfitError
from leadline.core.source import source_sha256
from leadline.probe import nvml
from leadline.probe.packages import installed_distributions, unpinned_in
from leadline.probe.request import EnvironmentRequest
from leadline.probe.subject import check_workload

_VARIABLE_PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "MKL_",
    "NVIDIA_TF32",
    "OMP_",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
)
MIN_CAPABILITY = (8, 0)
"""Ampere: the first generation whose tensor cores take bf16."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Yes or no, with the reason either way."""

    legal: bool
    why: str


def run_environment(request: EnvironmentRequest) -> dict[str, Any]:
    """Gather the evidence; what is in `problems` makes the machine unfit.

    Raises:
        UsageError: the workload cannot be opened or cannot do what will be asked of it.
        EnvironmentUnfitError: CUDA was asked for and is not there.
    """
    if request.workload is not None:
        check_workload(request)
    device_type, requirements = request.device, request.requirements
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = device_facts(device_type)
    bf16 = _bf16_verdict(device)
    kernel, kernel_problem = run_attention_kernel(device_type)
    distributions = installed_distributions()
    unpinned = [] if requirements is None else unpinned_in(Path(requirements), distributions)
    problems = [] if bf16.legal else [bf16.why]
    if kernel_problem:
        problems.append(kernel_problem)
    if unpinned:
        problems.append(
            f"{len(unpinned)} packages differ from {Path(requirements or '').name}: "
            f"{', '.join(unpinned[:5])}; install the pinned versions"
        )
    found = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": device,
        "cpu": {
            "name": _cpu_name(),
            "cores": psutil.cpu_count(logical=True),
            "memory_bytes": int(psutil.virtual_memory().total),
        },
        "bf16": asdict(bf16),
        "attention_kernel": {"ran": not kernel_problem, "name": kernel},
        "distributions_sha256": sha256_json(distributions),
        "distributions": distributions,
        "requirements": None if requirements is None else Path(requirements).name,
        "unpinned": unpinned,
        "variables": numeric_variables(os.environ),
        "code_sha256": source_sha256(),
        "problems": problems,
    }
    return {
        **found,
        "other_processes": nvml.other_processes() if device_type == "cuda" else [],
        "fingerprint": fingerprint(found),
    }


def fingerprint(found: Mapping[str, Any]) -> str:
    """Hash of what must be the same where the lock is used: software and device, not its load."""
    keys = ("python", "torch", "cuda", "distributions_sha256", "variables")
    device = dict(found["device"])
    if device["kind"] == "cpu":
        del device["memory_bytes"]  # moves by a few pages with every kernel
    return sha256_json({**{key: found[key] for key in keys}, "device": device})


def numeric_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that change how torch and CUDA compute; where caches lie does not."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_VARIABLE_PREFIXES) and not name.endswith(("_DIR", "_PATH", "_HOME"))
    }


def device_facts(device_type: str) -> dict[str, Any]:
    """Name, capability, memory and wheel architectures of the device."""
    if device_type == "cpu":
        return {
            "kind": "cpu",
            "name": _cpu_name(),
            "capability": None,
            "memory_bytes": int(psutil.virtual_memory().total),
            "driver": None,
            "mig": None,
            "power_limit_watts": None,
            "arch_list": [],
            "count": 1,
        }
    if not torch.cuda.is_available():
        raise EnvironmentUnfitError(
            "device is cuda but torch sees no CUDA device; "
            "install a CUDA build of torch, check the driver, or set device = 'cpu'"
        )
    properties = torch.cuda.get_device_properties(0)
    return {
        "kind": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": int(properties.total_memory),
        "driver": nvml.driver_version(),
        "mig": nvml.mig_mode(),
        "power_limit_watts": nvml.power_limit_watts(),
        "arch_list": torch.cuda.get_arch_list(),
        "count": torch.cuda.device_count(),
    }


def device_name(device: torch.device) -> str:
    """The device's own name, exactly as the driver or the kernel gives it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def bf16_on_cuda(capability: tuple[int, int], arch_list: Sequence[str]) -> Verdict:
    """Judge a device by its own capability and the architectures the wheel was built for.

    A binary for sm_XY runs on devices of the same major version and at least minor Y;
    PTX (`compute_XY`) is compiled by the driver for anything newer. Code of a family (`f`)
    stays within the major version, code of one architecture (`a`) runs on that one alone.
    """
    major, minor = capability
    if capability < MIN_CAPABILITY:
        return Verdict(
            legal=False,
            why=f"compute capability {major}.{minor} is below 8.0: bf16 is not legal here; "
            "rent an Ampere or newer card",
        )
    for name in arch_list:
        if _runs_on(name, capability):
            return Verdict(legal=True, why=f"legal: capability {major}.{minor}, built for {name}")
    return Verdict(
        legal=False,
        why=f"this torch is built for {', '.join(arch_list) or 'no GPU'}, not for capability "
        f"{major}.{minor}; install a build for this card",
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if match is None:
        return False
    kind, built, limit = match[1], (int(match[2]), int(match[3])), match[4]
    if limit == "a":
        return built == capability
    if kind == "sm" or limit == "f":
        return built[0] == capability[0] and built[1] <= capability[1]
    return built <= capability


def run_attention_kernel(device_type: str) -> tuple[str, str]:
    """Run causal attention in bf16, forward and backward; returns its name and any problem."""
    name = f"scaled_dot_product_attention, bf16, causal, {device_type}"
    try:
        torch.manual_seed(0)
        q, k, v = (
            torch.randn(2, 4, 128, 64, device=device_type, dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out.float().square().sum().backward()
        exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        error = ((out.double() - exact).norm() / exact.norm()).item()
    except RuntimeError as error_raised:
        return name, f"a bf16 attention kernel does not run: {str(error_raised).splitlines()[0]}"
    if not error < 0.02:  # bf16 rounds its inputs' products to 2**-9; 2 % is a broken kernel
        return name, f"the bf16 attention kernel is wrong by {error:.3f} relative; check the driver"
    return name, ""


def _bf16_verdict(device: Mapping[str, Any]) -> Verdict:
    if device["kind"] == "cpu":
        try:
            product = torch.ones(8, 8, dtype=torch.bfloat16) @ torch.ones(
                8, 8, dtype=torch.bfloat16
            )
        except RuntimeError as error:
            return Verdict(legal=False, why=f"bf16 does not run on this CPU: {error}")
        if not bool((product == 8).all()):
            return Verdict(legal=False, why="bf16 products on this CPU are wrong")
        return Verdict(legal=True, why="legal: runs on this CPU")
    major, minor = str(device["capability"]).split(".")
    return bf16_on_cuda((int(major), int(minor)), device["arch_list"])


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()
