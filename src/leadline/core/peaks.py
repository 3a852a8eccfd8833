"""Peak dense bf16 rates by exact device name, and the utilisation they give.

Every figure is the vendor's datasheet rate without sparsity, with fp32 accumulation.
A name that is not listed gives None and a reason, never a guess: a wrong peak makes a
wrong utilisation out of a right tok/s. Nothing is decided by utilisation.
"""

from dataclasses import dataclass

_PEAK_BF16_FLOP_PER_S = {
    # NVIDIA H200 and H100 datasheets: SXM 1,979 TFLOP/s and PCIe 1,513 with sparsity, half without.
    "NVIDIA H200": 989_500_000_000_000,
    "NVIDIA H100 80GB HBM3": 989_500_000_000_000,
    "NVIDIA H100 PCIe": 756_500_000_000_000,
    # NVIDIA A100 datasheet.
    "NVIDIA A100-SXM4-40GB": 312_000_000_000_000,
    "NVIDIA A100-SXM4-80GB": 312_000_000_000_000,
    "NVIDIA A100-PCIE-40GB": 312_000_000_000_000,
    "NVIDIA A100 80GB PCIe": 312_000_000_000_000,
    # NVIDIA L40S and A10 datasheets.
    "NVIDIA L40S": 362_050_000_000_000,
    "NVIDIA A10": 125_000_000_000_000,
}
_FLOP_PER_PARAMETER_AND_TOKEN = 6
"""Two for the forward, four for the backward; attention's own products are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Utilisation:
    """Share of the device's peak; None with a reason where the peak is not known."""

    percent: float | None
    why: str


def utilisation(device_name: str, tok_s: int, parameters: int) -> Utilisation:
    """Model FLOP/s utilisation: 6 x parameters x tok/s over the device's peak."""
    peak = _PEAK_BF16_FLOP_PER_S.get(device_name)
    if peak is None:
        return Utilisation(percent=None, why=f"no datasheet peak is known for {device_name!r}")
    flop_per_s = _FLOP_PER_PARAMETER_AND_TOKEN * parameters * tok_s
    return Utilisation(
        percent=100 * flop_per_s / peak, why=f"6 x parameters x tok/s over {peak:,} FLOP/s"
    )
