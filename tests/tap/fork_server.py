"""A process that has torch imported and forks one child for every command line it is asked for.

Run as a script by `processes.CommandServer`; a line of JSON in, a line of JSON out:

    {"run": [ARGUMENTS], "folder": DIR, "fault": [NAME, {...}]}   ->   {"pid": N}
    {"wait": N}                                                   ->   {"status": CODE}

The child is `leadline ARGUMENTS` in every respect: its own signals, streams and exit
code. Its stdout, stderr and what the kernel counted for it lie in DIR afterwards.
"""

import gc
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tests.tap import faults  # type: ignore[import-not-found]

from leadline.cli.app import main as leadline

FAMILIES = ("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen4_exp")
COUNTERS = ("/proc/self/io", "/proc/self/status")


def warm() -> None:
    """Import and compute what every tap does, so that a fork begins with its own work."""
    import rich.progress  # noqa: F401
    from pydantic import BaseModel  # noqa: F401
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    import leadline.tap.plan_report
    import leadline.tap.record
    import leadline.tap.step  # noqa: F401

    # transformers compiles a thousand patterns for every model; the cache holds half of them.
    re._MAXCACHE = 10_000  # type: ignore[attr-defined]
    for family in FAMILIES:
        with suppress(ImportError, ValueError):  # a family of a newer transformers
            __import__(f"transformers.models.{family}.modeling_{family}")
    with torch.device("meta"):
        config = AutoConfig.for_model("qwen2_moe", num_hidden_layers=1)
        get_model_conversion_mapping(AutoModelForCausalLM.from_config(config))
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page that it looks at


def main() -> None:
    """Serve until stdin closes."""
    warm()
    replies = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            reply = {"status": os.waitstatus_to_exitcode(status)}
        else:
            reply = {"pid": fork(request, replies)}
        os.write(replies, (json.dumps(reply) + "\n").encode())


def fork(request: dict[str, Any], replies: int) -> int:
    """Start a command in a child; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.close(replies)
        code = command(request["run"], Path(request["folder"]), request.get("fault"))
    except SystemExit as ended:  # a signal on the last stretch
        code = ended.code if isinstance(ended.code, int) else code
    finally:
        os._exit(code)


def command(arguments: list[str], folder: Path, fault: list[Any] | None) -> int:
    """Run a command to its end in this process; its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    started = time.perf_counter()
    try:
        if fault is not None:
            getattr(faults, fault[0])(**fault[1])
        leadline(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the command is over
    threading._shutdown()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    told = {"seconds": time.perf_counter() - started, "counters": {}, **faults.TOLD}
    for name in COUNTERS:
        if Path(name).is_file():
            told["counters"] |= fields(Path(name))
    written = folder / "ended.json.tmp"
    written.write_text(json.dumps(told), encoding="utf-8")
    written.rename(folder / "ended.json")
    return code


def fields(path: Path) -> dict[str, int]:
    """The `name: number` lines of a file of /proc; memory comes in KiB."""
    lines = (line.partition(":") for line in path.read_text(encoding="ascii").splitlines())
    words = {name: value.split() for name, _, value in lines}
    return {name: int(value[0]) for name, value in words.items() if value and value[0].isdigit()}


if __name__ == "__main__":
    main()
