"""Telling an out-of-memory from every other failure, by type and not by guess."""

import torch

_CPU_ALLOCATOR_WORDS = "DefaultCPUAllocator"
"""A CPU allocation that fails is a plain RuntimeError; its text names the allocator."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for a device or host allocation that failed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR_WORDS in str(error)


def first_line(error: BaseException) -> str:
    """The error as one line for a report."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
