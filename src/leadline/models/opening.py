"""How a configuration names a workload: the `[workload]` table and its three kinds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadline.core.errors import UsageError
from leadline.models.workload import Workload

KINDS = ("dual-mind", "transformers", "python")


def open_workload(spec: Mapping[str, Any], base_dir: Path) -> Workload:
    """Build the workload that a `[workload]` table describes.

    Relative paths are taken from *base_dir*, the folder of the configuration.

    Raises:
        UsageError: the kind is unknown, or a key is missing, unknown or out of range.
    """
    options = dict(spec)
    kind = options.pop("kind", None)
    try:
        if kind == "dual-mind":
            from leadline.models.dualmind import DualMindWorkload

            return DualMindWorkload.from_spec(**options)
        if kind == "transformers":
            from leadline.models.causal_lm import CausalLMWorkload

            return CausalLMWorkload.from_spec(base_dir=base_dir, **options)
        if kind == "python":
            from leadline.models.custom import load_workload

            return load_workload(base_dir=base_dir, **options)
    except TypeError as error:
        raise UsageError(f"[workload] kind {kind!r} does not take these keys: {error}") from error
    raise UsageError(f"[workload] kind is {kind!r}; known kinds: {', '.join(KINDS)}")
