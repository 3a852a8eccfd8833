"""What a release promises: one version everywhere, and a lock that names all it installs."""

import re
import tomllib
from pathlib import Path

import pytest

from leadline import __version__

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==(\S+)", re.MULTILINE)


@pytest.fixture(scope="module")
def lock_text() -> str:
    return (ROOT / "requirements.lock").read_text(encoding="utf-8")


def test_changelog_top_entry_is_the_packages_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", text, re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == __version__


def test_lock_pins_every_direct_dependency_but_torch(lock_text: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needs = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
    ]
    names = {re.split(r"[^A-Za-z0-9._-]", need)[0].lower() for need in needs}
    pinned = {name for name, _ in PIN.findall(lock_text)}
    assert names - pinned == {"torch"}


def test_lock_hashes_every_pin(lock_text: str) -> None:
    blocks = re.split(r"\n(?=[a-z0-9])", lock_text.strip())[1:]
    unhashed = [block.split()[0] for block in blocks if "--hash=sha256:" not in block]
    assert len(blocks) > 50
    assert unhashed == []


def test_lock_leaves_out_accelerator_wheels_and_addresses(lock_text: str) -> None:
    foreign = [
        name
        for name, _ in PIN.findall(lock_text)
        if re.match(r"torch$|triton|cuda-|nvidia-(?!ml-py)", name)
    ]
    assert foreign == []
    assert "://" not in lock_text
