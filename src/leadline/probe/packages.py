"""The packages installed here, and a pinned requirements file held against them."""

import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from leadline.core.errors import EnvironmentUnfitError

_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*"
    r"(?:==\s*(?P<version>[^\s;,#]+))?(?P<rest>.*)"
)


def installed_distributions() -> dict[str, str]:
    """Every installed distribution and its version, by normalised name."""
    found: dict[str, str] = {}
    for item in metadata.distributions():
        if name := item.metadata["Name"]:
            # Of two on the path, the first is the one that is imported.
            found.setdefault(_normal(name), item.version)
    return found


def unpinned_in(requirements: Path, distributions: Mapping[str, str]) -> list[str]:
    """What keeps *requirements* from saying exactly what is installed, one phrase each.

    A requirement without `==`, an installed version that none of its pins names, and a pin
    without an environment marker that is not installed.

    Raises:
        EnvironmentUnfitError: the file cannot be read, or pins nothing.
    """
    try:
        text = requirements.read_text("utf-8")
    except OSError as error:
        raise EnvironmentUnfitError(
            f"the pinned requirements {requirements} cannot be read: {error.strerror}; "
            "check [environment] requirements"
        ) from error
    except UnicodeDecodeError as error:
        raise EnvironmentUnfitError(
            f"the pinned requirements {requirements} are not UTF-8 text: {error.reason} at byte "
            f"{error.start}; check [environment] requirements"
        ) from error
    pins: dict[str, set[str]] = {}
    needed: set[str] = set()
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        match = _REQUIREMENT.match(line.strip())
        if match is None:
            continue  # blank, a comment or an option such as --hash
        name, version = _normal(match["name"]), match["version"]
        if version is None:
            found.append(f"{name} is not pinned with ==")
            continue
        # A universal lock pins a package once for each Python it resolves differently on.
        pins.setdefault(name, set()).add(version.split("+")[0])
        if ";" not in match["rest"]:
            needed.add(name)
    if not pins:
        raise EnvironmentUnfitError(
            f"{requirements} pins no package with ==, so nothing can be held against it; "
            "name a lock file or leave [environment] requirements out"
        )
    for name, versions in sorted(pins.items()):
        wanted = " or ".join(sorted(versions))
        installed = distributions.get(name)
        if installed is None:
            found += [f"{name} {wanted} is not installed"] if name in needed else []
        elif installed.split("+")[0] not in versions:
            found.append(f"{name} {installed} instead of {wanted}")
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
