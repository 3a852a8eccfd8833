"""The hardware and versions that every published figure carries."""

from collections.abc import Mapping
from typing import Any


def hardware_facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the environment's evidence that a benchmark result is read with."""
    packages = ("torch", "transformers", "triton", "numpy", "tokenizers", "leadline")
    device = environment["device"]
    return {
        "device": device["name"],
        "device_memory_bytes": device["memory_bytes"],
        "capability": device["capability"],
        "driver": device["driver"],
        "cpu": environment["cpu"]["name"],
        "cores": environment["cpu"]["cores"],
        "python": environment["python"],
        "torch": environment["torch"],
        "cuda": environment["cuda"],
        "versions": {
            name: version
            for name, version in environment["distributions"].items()
            if name in packages
        },
    }
