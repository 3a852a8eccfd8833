"""Text to token shards, and the loader that reads them.

The public names are loaded on first use, so importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leadline.data.loader import Batch, TokenLoader
    from leadline.data.manifest import ShardsManifest, load_manifest
    from leadline.data.prepare import pack_text
    from leadline.data.verify import check_shards

__all__ = [
    "Batch",
    "ShardsManifest",
    "TokenLoader",
    "check_shards",
    "load_manifest",
    "pack_text",
]

_HOMES = {
    "Batch": "loader",
    "ShardsManifest": "manifest",
    "TokenLoader": "loader",
    "check_shards": "verify",
    "load_manifest": "manifest",
    "pack_text": "prepare",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
