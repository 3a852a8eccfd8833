"""The two precisions a lane can run in, and proof that fp32 is fp32.

bf16 means: master weights, gradients and optimizer state in fp32, matrix products under
autocast in bf16. fp32 means: autocast off and TF32 off, whatever the environment says.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch

_PROOF_SIZE = 1024


class Precision(StrEnum):
    """Name of a lane."""

    FP32 = "fp32"
    BF16 = "bf16"


@contextmanager
def precision_context(precision: Precision, device_type: str) -> Iterator[None]:
    """Run the block in *precision*; every global setting is put back afterwards."""
    with (
        # Even the bf16 lane: what autocast leaves in fp32 was left there on purpose.
        exact_fp32_products(),
        torch.autocast(device_type, dtype=torch.bfloat16, enabled=precision is Precision.BF16),
    ):
        yield


@contextmanager
def exact_fp32_products() -> Iterator[None]:
    """Run the block with no fp32 product taken in fewer bits; for the backward, too.

    torch has an older and a newer way to say it, and refuses to read one where only the
    other was used. Both are set, so that either may be read inside.
    """
    old, cudnn_old = _old_matmul_precision(), _old_cudnn_tf32()
    new = [(owner, owner.fp32_precision) for owner in _product_settings()]
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    for owner, _ in new:
        owner.fp32_precision = "ieee"
    try:
        yield
    finally:
        if old is not None:
            torch.set_float32_matmul_precision(old)
        if cudnn_old is not None:
            torch.backends.cudnn.allow_tf32 = cudnn_old
        for owner, value in new:
            owner.fp32_precision = value


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


def _product_settings() -> tuple[Any, ...]:
    backends: Any = torch.backends  # its stubs lag behind its attributes
    return (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    )


def _old_matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None  # set in the newer way; there is nothing older to put back


def _old_cudnn_tf32() -> bool | None:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None  # as above
