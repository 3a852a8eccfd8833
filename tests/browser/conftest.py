"""A real headless browser, and the sample runs of the report's own tests."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

QUIET = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
)
NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="session")
def chromium() -> str:
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    return found


@pytest.fixture
def open_page(chromium: str, tmp_path: Path) -> Callable[..., str]:
    """Load an address in a fresh profile and return the document once it has loaded."""

    def run(address: str, *flags: str) -> str:
        profile = tmp_path / "profile"
        shutil.rmtree(profile, ignore_errors=True)
        command = [chromium, *QUIET, f"--user-data-dir={profile}", *flags, "--dump-dom", address]
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout

    return run


@pytest.fixture(scope="session")
def sample_runs() -> ModuleType:
    """The builders of tests/report, which no package holds."""
    path = Path(__file__).resolve().parents[1] / "report" / "conftest.py"
    spec = importlib.util.spec_from_file_location("report_sample_runs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
