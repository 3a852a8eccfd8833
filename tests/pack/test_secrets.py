import sysconfig
from pathlib import Path

import pytest

from leadline.core.errors import UsageError
from leadline.pack.secrets import Finding, scan_secrets, scan_tree

_TOKEN = "ghp_" + "aB3" * 12


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "tree"
    root.mkdir()
    return root


def test_scan_names_path_line_and_kind(root):
    (root / "conf.py").write_text(f"# nothing\n\nkey = '{_TOKEN}'\n")
    assert scan_secrets(root) == [Finding(path="conf.py", line=3, kind="github-token")]


def test_scan_never_shows_the_secret(root):
    (root / "conf.py").write_text(_TOKEN)
    scan = scan_tree(root)
    assert _TOKEN not in repr(scan) + str(scan.findings[0])


def test_scan_of_a_clean_tree_finds_nothing(root):
    (root / "a.py").write_text("import secrets\ntoken = secrets.token_hex()\n")
    assert scan_secrets(root) == []


def test_scan_judges_a_binary_file_by_name_alone(root):
    (root / "id_rsa").write_bytes(b"\0\0" + _TOKEN.encode())
    (root / "shard.bin").write_text(_TOKEN)
    assert scan_secrets(root) == [Finding(path="id_rsa", line=0, kind="secret-file")]


def test_scan_reads_utf16_text(root):
    (root / "keys.txt").write_text(f"first\nsecond {_TOKEN}\n", encoding="utf-16")
    assert scan_secrets(root) == [Finding(path="keys.txt", line=2, kind="github-token")]


@pytest.mark.parametrize("before", [0, 8190, (1 << 20) - 3, (1 << 20) + 8180, 3 << 20])
def test_scan_finds_a_secret_across_the_edge_of_a_block(root, before):
    lines = b"x" * 99 + b"\n"
    filler = (lines * (before // 100 + 1))[:before]
    (root / "big.txt").write_bytes(filler + b" " + _TOKEN.encode() + b"\n" + lines * 200)
    (finding,) = scan_secrets(root)
    assert finding.line == filler.count(b"\n") + 1


def test_scan_says_which_text_it_did_not_read_to_the_end(root, monkeypatch):
    monkeypatch.setattr("leadline.pack.secrets._LIMIT_BYTES", 1 << 20)
    (root / "corpus.jsonl").write_bytes(b"text\n" * 500_000)
    (root / "shard.bin").write_bytes(b"text\n" * 500_000)
    assert scan_tree(root).cut_short == ("corpus.jsonl",)


def test_scan_reports_every_byte_it_reads(root):
    (root / "a.txt").write_bytes(b"x" * 10_000)
    seen = []
    scan_tree(root, seen.append)
    assert sum(seen) == 10_000


def test_allow_list_lets_through_what_it_names_and_reports_it(root):
    (root / "tests").mkdir()
    (root / "tests/a.pem").write_text(_TOKEN)
    (root / "b.py").write_text(_TOKEN)
    (root / ".leadlineallow").write_text("# reviewed\n\ntests/*.pem github-token\n")
    scan = scan_tree(root)
    assert [f.path for f in scan.findings] == ["b.py"]
    assert [f.path for f in scan.allowed] == ["tests/a.pem"]


def test_allow_list_is_by_kind(root):
    (root / "a.pem").write_text(_TOKEN)
    (root / ".leadlineallow").write_text("a.pem private-key\n")
    scan = scan_tree(root)
    assert len(scan.findings) == 1
    assert scan.unused_allowances == ("a.pem private-key",)


def test_allow_list_line_without_a_kind_is_refused_with_its_number(root):
    (root / ".leadlineallow").write_text("# fine\na.pem\n")
    with pytest.raises(UsageError, match=r"line 2 is 'a\.pem'"):
        scan_tree(root)


def test_scan_of_pythons_own_library_finds_nothing(root):
    library = Path(sysconfig.get_path("stdlib"))
    folders = ("asyncio", "email", "http", "urllib", "json", "logging", "xml", "unittest")
    for path in [*library.glob("*.py"), *(p for f in folders for p in (library / f).glob("*.py"))]:
        copy = root / path.relative_to(library)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    assert len(list(root.rglob("*.py"))) > 200
    assert scan_secrets(root) == []


def test_scan_of_our_own_source_and_tests_finds_nothing():
    project = Path(__file__).parents[2]
    assert scan_secrets(project / "src") == []
    assert scan_secrets(project / "tests") == []
