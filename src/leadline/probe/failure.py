"""Telling an out-of-memory from every other failure, by type and not by guess."""

import torch

_CPU_ALLOCATOR_WORDS = "DefaultCPUAllocator"
"""A CPU allocation that fails is a plain RuntimeError; its text names the allocator."""


_CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation: what a driver call outside torch's allocator ends with."""
_CUBLAS_WORDS = "CUBLAS_STATUS_ALLOC_FAILED"
"""cuBLAS allocates its workspace itself; torch reports it as a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for a device or host allocation that failed, or an error that came of one.

    A compiler wraps what its trial kernels raise, so the causes are looked at too.
    """
    seen: BaseException | None = error
    while seen is not None:
        if _is_failed_allocation(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _is_failed_allocation(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, torch.AcceleratorError):
        return getattr(error, "error_code", None) == _CUDA_OUT_OF_MEMORY
    text = str(error)
    return isinstance(error, RuntimeError) and (
        _CPU_ALLOCATOR_WORDS in text or _CUBLAS_WORDS in text
    )


def first_line(error: BaseException) -> str:
    """The error as one line for a report."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
