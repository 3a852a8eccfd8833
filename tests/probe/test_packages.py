"""Installed packages against a pinned requirements file."""

import pytest
import torch

from leadline.core.errors import EnvironmentUnfitError
from leadline.probe.packages import installed_distributions, unpinned_in


def _unpinned(tmp_path, text, installed):
    path = tmp_path / "requirements.lock"
    path.write_text(text, encoding="utf-8")
    return unpinned_in(path, installed)


@pytest.mark.parametrize(
    ("text", "installed", "expected"),
    [
        ("a==1.0\n", {"a": "1.0"}, []),
        ("a==1.0\n", {"a": "1.1"}, ["a 1.1 instead of 1.0"]),
        ("a==1.0\n", {"b": "9"}, ["a 1.0 is not installed"]),
        ("a==1.0 ; sys_platform == 'win32'\n", {"b": "9"}, []),
        ("A_b.c==1.0\n", {"a-b-c": "2"}, ["a-b-c 2 instead of 1.0"]),
        ("torch==2.13.0\n", {"torch": "2.13.0+cpu"}, []),
        ("torch==2.13.0+cu130\n", {"torch": "2.13.0+cpu"}, []),
        ("a==1.0 \\\n    --hash=sha256:00\n", {"a": "1.0"}, []),
        ("a==1.0 ; python_version < '3.12'\n", {"a": "1.0"}, []),
        ("a==1.0;python_version < '3.12'\na==2.0; python_version >= '3.12'\n", {"a": "2.0"}, []),
        (
            "a==1.0 ; python_version < '3.12'\na==2.0 ; python_version >= '3.12'\n",
            {"a": "3.0"},
            ["a 3.0 instead of 1.0 or 2.0"],
        ),
        ("a[extra,other]==1.0\n", {"a": "1.1"}, ["a 1.1 instead of 1.0"]),
        ("a == 1.0  # why\n", {"a": "1.1"}, ["a 1.1 instead of 1.0"]),
        ("# a==2.0\n    # via b==3\na==1.0\n", {"a": "1.0", "b": "1"}, []),
        ("a==1.0\nb>=2\nc\n", {"a": "1.0"}, ["b is not pinned with ==", "c is not pinned with =="]),
        ("a==1.0\nb==2.0\n", {"a": "1.0"}, ["b 2.0 is not installed"]),
        ("a==1.0 \\\n    --hash=sha256:00\nb==2 ; python_version < '3'\n", {"a": "1.0"}, []),
        ("b==1\na==1\n", {"a": "2", "b": "2"}, ["a 2 instead of 1", "b 2 instead of 1"]),
    ],
)
def test_unpinned_of_a_lock_names_what_differs(tmp_path, text, installed, expected):
    assert _unpinned(tmp_path, text, installed) == expected


def test_unpinned_of_a_file_without_pins_is_refused(tmp_path):
    with pytest.raises(EnvironmentUnfitError, match="pins no package"):
        _unpinned(tmp_path, "torch>=2\n", {"torch": "1.0"})


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_unpinned_of_an_unreadable_file_is_refused_by_name(tmp_path, kind):
    path = tmp_path / "requirements.lock"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"a==1\n\xff\xfe")
    with pytest.raises(EnvironmentUnfitError, match=r"requirements\.lock"):
        unpinned_in(path, {})


def test_installed_distributions_are_normalised_and_hold_torch():
    found = installed_distributions()
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert [name for name in found if name != name.lower() or "_" in name] == []


def test_installed_distribution_twice_on_the_path_counts_as_the_first(tmp_path, monkeypatch):
    for place, version in (("first", "1.0"), ("second", "2.0")):
        info = tmp_path / place / f"twice_here-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: twice_here\nVersion: {version}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")
    for place in ("second", "first"):
        monkeypatch.syspath_prepend(str(tmp_path / place))
    assert installed_distributions()["twice-here"] == "1.0"
