"""What the command line does when its own streams or its session end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "leadline")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", [("--json",), ()])
def test_stdout_that_cannot_be_written_is_one_sentence(tmp_path: Path, words: tuple) -> None:
    (tmp_path / "ledger.jsonl").write_text("", encoding="utf-8")
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [*COMMAND, "ledger", "verify", str(tmp_path), *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_pack_ended_by_a_signal_takes_its_temporary_files_away(
    tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out" / "shards"
    out.parent.mkdir()
    command = [*COMMAND, "data", "pack", "stdlib", "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not list(out.parent.iterdir()) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    assert list(out.parent.iterdir()) == []
