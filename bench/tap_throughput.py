"""The calibration tap of a 20-GB MoE against its disk, its compute and `accelerate`.

    python bench/tap_throughput.py --checkpoint CKPT --out bench/results/tap_<gpu>_<yyyymm>.json

Makes the checkpoint when the folder is not there (bench/moe_checkpoint.py), then takes every
figure in one run: raw disk reads, resident compute, the tap with Grams on and off under
budgets of 25 % (VRAM) and 10 % (host pool) of the model, and `accelerate` disk offload.
Prints each figure and ratio with its target and writes JSON after every measurement.
Documents are seeded draws of ids, the frequent ones as frequent as words of a text are.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from child_watch import run_watched
from hardware import hardware_facts
from leadline.probe.process import run_probe
from leadline.probe.progress import Progress
from leadline.probe.request import EnvironmentRequest
from moe_checkpoint import SMALL, MoeShape, write_checkpoint
from tap_ratios import ratios, table

MIB = 2**20
HERE = Path(__file__).parent
SHARES = {"vram": 0.25, "pool": 0.10}
PARTS = ("raw", "resident", "tap", "untapped", "accelerate", "raw-again")
SMALL_BUDGET_MIB = 512
"""Where the model is smaller than what any pass works with."""


def main() -> None:
    arguments = parse()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        bench = Bench(arguments, Path(folder))
        for part in PARTS:
            if part not in arguments.skip:
                bench.measure(part)
    bench.save()
    print(table(bench.results))
    if arguments.small:
        print("these sizes only try the script: targets hold for the 20-GB model on a GPU")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="made there when it does not exist")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="big disk")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the taps")
    parser.add_argument("--skip", nargs="*", default=[], choices=PARTS)
    parser.add_argument("--steps", type=int, default=2, help="accelerate: measured at each width")
    parser.add_argument("--threads", type=int, default=8, help="of the raw read")
    parser.add_argument("--small", action="store_true", help="tiny sizes on a CPU, to try it")
    arguments = parser.parse_args()
    small = arguments.small
    arguments.checkpoint = arguments.checkpoint or arguments.work / f"tap-moe{'-small' * small}"
    arguments.tokens = sorted(arguments.tokens or ([2_048, 4_096] if small else [2**18, 2**20]))
    return arguments


class Bench:
    """One run: what it measured so far, and where it writes it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.started = time.perf_counter()
        environment = run_probe(
            EnvironmentRequest(device="auto", requirements=None), folder, "environment", quiet
        )
        shape = SMALL if arguments.small else MoeShape()
        self.checkpoint_bytes = ready_checkpoint(arguments.checkpoint, shape)
        self.document_tokens = 128 if arguments.small else 2048
        self.vocab = json.loads((arguments.checkpoint / "config.json").read_text())["vocab_size"]
        floor = SMALL_BUDGET_MIB if arguments.small else 1
        budgets = {
            f"{name}_mib": max(int(self.checkpoint_bytes * share) // MIB, floor)
            for name, share in SHARES.items()
        }
        self.results: dict[str, Any] = {
            "bench": "tap_throughput",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "hardware": hardware_facts(environment),
            "code_sha256": environment["code_sha256"],
            "checkpoint": {"bytes": self.checkpoint_bytes, **asdict(shape)},
            "document_tokens": self.document_tokens,
            "budgets": budgets,
            "raw": [],
            "resident": [],
            "taps": [],
            "accelerate": [],
        }
        self.save()

    def measure(self, part: str) -> None:
        """Take one part's figures."""
        most = max(self.arguments.tokens)
        if part in ("raw", "raw-again"):
            self.yardstick("raw", "--threads", str(self.arguments.threads))
        elif part == "resident":
            batches = ("4",) if self.arguments.small else ("4", "8", "16")
            options = ("--batches", *batches, "--tokens", str(min(most, 131_072)))
            self.yardstick(part, "--corpus", str(self.corpus(most)), *options)
        elif part == "accelerate":
            widths = ("1", "4") if self.arguments.small else ("1", "32")
            options = ("--batches", *widths, "--steps", str(self.arguments.steps))
            offload = ("--offload", str(self.folder / "offload"))
            self.yardstick(part, "--corpus", str(self.corpus(most)), *options, *offload)
            shutil.rmtree(self.folder / "offload", ignore_errors=True)
        else:
            for tokens in self.arguments.tokens:
                self.tap(tokens, grams=part == "tap")

    def yardstick(self, name: str, *options: str) -> None:
        """Run bench/tap_yardsticks.py and keep every line as it comes."""
        command = [sys.executable, str(HERE / "tap_yardsticks.py"), name]
        log = self.folder / f"{name}.log"
        with log.open("wb") as errors:
            child = subprocess.Popen(
                [*command, str(self.arguments.checkpoint), *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    self.add(name, json.loads(line))
        if child.wait():
            self.add(name, {"failed": child.returncode, "log": tail(log.read_text())})

    def tap(self, tokens: int, *, grams: bool) -> None:
        """`leadline tap record` in a process of its own, as a person would start it."""
        out = self.folder / "tap"
        budgets = self.results["budgets"]
        command = [
            *(sys.executable, "-m", "leadline", "tap", "record", str(self.arguments.checkpoint)),
            *("--corpus", str(self.corpus(tokens)), "--out", str(out), "--json"),
            *("--vram-mib", str(budgets["vram_mib"])),
            *("--host-pool-mib", str(budgets["pool_mib"])),
            *(() if grams else ("--targets", "none")),
        ]
        run = run_watched(command, log=self.folder / "tap.log")
        found: dict[str, Any] = {"asked_tokens": tokens, "grams": grams, **asdict(run)}
        del found["stdout"], found["stderr"]
        if run.exit_code:
            found |= {"failed": run.exit_code, "log": tail(run.stderr + run.stdout)}
        else:
            files = [path for path in out.rglob("*") if path.is_file()]
            found["tap_bytes"] = sum(path.stat().st_size for path in files)
            found["result"] = json.loads(run.stdout)
        shutil.rmtree(out, ignore_errors=True)
        self.add("taps", found)

    def corpus(self, tokens: int) -> Path:
        """Documents of *tokens* tokens in all, as a file."""
        path = self.folder / f"corpus-{tokens}.npy"
        if not path.exists():
            documents = max(tokens // self.document_tokens, 1)
            np.save(path, draw_documents(documents, self.document_tokens, self.vocab))
        return path

    def add(self, part: str, found: dict[str, Any]) -> None:
        """Keep a figure."""
        self.results[part].append(found)
        print(part, json.dumps(found), file=sys.stderr, flush=True)
        self.save()

    def save(self) -> None:
        """Written after every measurement: a rented machine may go at any time."""
        self.results["ratios"] = ratios(self.results)
        self.results["bench_seconds"] = round(time.perf_counter() - self.started, 1)
        text = json.dumps(self.results, indent=2, sort_keys=True) + "\n"
        self.arguments.out.write_text(text)


def ready_checkpoint(folder: Path, shape: MoeShape) -> int:
    """Bytes of all tensors of the checkpoint, which is made first where there is none."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        made = folder.with_name(folder.name + ".part")
        shutil.rmtree(made, ignore_errors=True)
        start = time.perf_counter()
        write_checkpoint(made, shape)
        made.rename(folder)
        print(f"checkpoint: made in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return int(json.loads(index.read_text())["metadata"]["total_size"])


def draw_documents(documents: int, tokens: int, vocab: int) -> np.ndarray[Any, Any]:
    """Ids int32 [documents, tokens]: the r-th most frequent one as often as 1 / (r + 2.7)."""
    random = np.random.default_rng(0)
    shares = 1.0 / (np.arange(vocab) + 2.7)
    ranks = np.searchsorted(np.cumsum(shares / shares.sum()), random.random((documents, tokens)))
    order = random.permutation(vocab)  # frequent ids lie anywhere in the table
    return order[np.minimum(ranks, vocab - 1)].astype(np.int32)


def tail(text: str) -> str:
    return text[-2_000:]


def quiet(progress: Progress) -> None:
    del progress


if __name__ == "__main__":
    main()
