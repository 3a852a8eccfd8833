"""A user's own model: `kind = "python"`, `object = "file.py:name"`.

The object is a workload, or a callable that returns one (its keyword arguments come
from `[workload.args]`). It runs with the user's rights in the probe process; the
hashes of the file and of what it imports from beside it go into the lock, so a changed
model is a different run.
"""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leadline.core.errors import UsageError
from leadline.models.workload import Workload


def load_workload(
    base_dir: Path,
    object: str,  # noqa: A002 - the key's name in the configuration
    args: Mapping[str, Any] | None = None,
) -> Workload:
    """Import `file.py:name` and make a workload of it.

    Raises:
        UsageError: the file or name is missing, importing it fails, it is no workload, or
            arguments are given to what takes none.
    """
    file_name, colon, name = object.partition(":")
    file = (base_dir / file_name).resolve()
    if not colon or not file.is_file():
        raise UsageError(
            f"[workload] object is {object!r}; wanted 'file.py:name' with a file that exists, "
            f"looked for {file}"
        )
    found = getattr(_import_file(file), name, None)
    if found is None:
        raise UsageError(f"{file} defines no {name!r}; name a workload or a function returning one")
    made = found if isinstance(found, Workload) and not isinstance(found, type) else None
    if made is not None and args:
        raise UsageError(
            f"[workload.args] are given and {object} is a workload already, which takes none; "
            "name a function that returns one, or leave the arguments out"
        )
    if made is None and callable(found):
        made = found(**(args or {}))
    if not isinstance(made, Workload):
        raise UsageError(
            f"{object} is a {type(found if made is None else made).__name__}, not a workload; "
            "it needs name, vocab_size, build, loss and compile"
        )
    return made


def _import_file(file: Path) -> Any:
    name = f"leadline_workload_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up here
    sys.path.insert(0, str(file.parent))  # for the file's own imports of what lies beside it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"importing {file} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent))
    return module
