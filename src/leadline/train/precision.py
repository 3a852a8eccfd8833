"""The two precisions a lane can run in, and proof that fp32 is fp32.

bf16 means: master weights, gradients and optimizer state in fp32, matrix products under
autocast in bf16. fp32 means: autocast off and TF32 off, whatever the environment says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch

_PROOF_SIZE = 1024


class Precision(StrEnum):
    """Name of a lane."""

    FP32 = "fp32"
    BF16 = "bf16"


@contextmanager
def precision_context(precision: Precision, device_type: str) -> Iterator[None]:
    """Run the block in *precision*; every global setting is put back afterwards."""
    before = torch.get_float32_matmul_precision()
    cudnn_before = torch.backends.cudnn.allow_tf32
    # Even the bf16 lane keeps TF32 off: what autocast leaves in fp32 was left there on purpose.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=precision is Precision.BF16):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = cudnn_before


def matmul_error(device: torch.device, seed: int = 0) -> float:
    """Relative error ||fp32 - f64|| / ||f64|| of one product on *device*, as set up now.

    Call it inside the precision context that is to be proven.
    """
    generator = torch.Generator().manual_seed(seed)
    left, right = (
        torch.randn(_PROOF_SIZE, _PROOF_SIZE, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    exact = left.float().double() @ right.float().double()
    product = (left.float().to(device) @ right.float().to(device)).cpu().double()
    return float((product - exact).norm() / exact.norm())
