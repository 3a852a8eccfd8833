import pytest

import leadline
from leadline.core.source import source_sha256


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of nothing: two source files that stand for the package's own."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "__init__.py").write_text("a = 1\n", encoding="utf-8")
    (tmp_path / "sub" / "part.py").write_text("b = 2\n", encoding="utf-8")
    monkeypatch.setattr(leadline, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


def test_source_hash_of_unchanged_code_is_the_same(package):
    assert source_sha256() == source_sha256()


@pytest.mark.parametrize("change", ["edit", "add", "delete", "rename"])
def test_source_hash_after_a_change_is_another(package, change):
    before, part = source_sha256(), package / "sub" / "part.py"
    if change == "edit":
        part.write_text("b = 3\n", encoding="utf-8")
    elif change == "add":
        (package / "new.py").write_text("", encoding="utf-8")
    elif change == "delete":
        part.unlink()
    else:
        part.rename(package / "sub" / "other.py")
    assert source_sha256() != before


def test_source_hash_ignores_what_is_not_source(package):
    before = source_sha256()
    (package / "sub" / "part.pyc").write_bytes(b"cache")
    assert source_sha256() == before
