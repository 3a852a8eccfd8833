"""The disk stream against plain reads and other loaders on the same files, in one run.

    python bench/disk_stream.py --gib 16 --out bench/results/disk_stream_<gpu>_<yyyymm>.json
    python bench/disk_stream.py --gib 0.25 --rounds 1        # any machine

"raw": threads that read aligned pieces with O_DIRECT into memory of the same kind as the
ring (huge pages, touched before) and do nothing else: what the disk gives. "raw, small
pages": the same into ordinary pages, where a request to the disk ends at its limit of
segments; not the yardstick. "stream": `leadline.rig.disk_stream` through a (pinned)
ring and on to the device. "stream, host busy": the same while another thread launches small
operations without a pause, as a forward pass does. `runai_model_streamer` and
`fastsafetensors` take part where they are installed, on their own default settings (their
imports are not timed).

Pages of the files are dropped from the page cache before every reading; of two readings the
second is timed, so that nobody pays for fresh buffers; each round takes the readers in an
order of its own, and medians are compared. Target: stream / raw >= 0.95. A ratio well above
1 says that the two did not read under equal terms.
"""

import argparse
import importlib
import importlib.util
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hardware import hardware_facts
from leadline.probe.process import run_probe
from leadline.probe.request import EnvironmentRequest
from leadline.rig.disk_stream import DiskStream, Extent, coalesce
from leadline.rig.host_pool import HostPool

MIB = 2**20
TENSOR_BYTES = 8 * MIB
FILE_TENSORS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the files are read."""

    threads: int
    slab_bytes: int
    ring_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=8.0, help="size of the files made")
    parser.add_argument("--files", type=Path, nargs="*", help="safetensors files to read instead")
    parser.add_argument("--folder", type=Path, help="where to make files; default: temporary")
    parser.add_argument("--threads", type=int, nargs="+", default=[8])
    parser.add_argument("--slab-mib", type=float, nargs="+", default=[16])
    parser.add_argument("--ring-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        files = args.files or make_files(Path(folder), int(args.gib * 2**30))
        settings = [
            Setting(
                threads=threads,
                slab_bytes=int(slab * MIB),
                ring_bytes=args.ring_mib * MIB,
            )
            for threads in args.threads
            for slab in args.slab_mib
        ]
        result = {
            "bench": "disk_stream",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "hardware": hardware(Path(folder)),
            "bytes": sum(path.stat().st_size for path in files),
            "num_files": len(files),
            "rounds": args.rounds,
            "settings": [measure(files, setting, args.rounds) for setting in settings],
        }
    text = json.dumps(result, indent=2)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def hardware(folder: Path) -> dict[str, Any]:
    request = EnvironmentRequest(device="auto", requirements=None)
    return hardware_facts(run_probe(request, folder, "environment", lambda *_: None))


def make_files(folder: Path, num_bytes: int) -> list[Path]:
    """Safetensors files of random bytes, written through to the disk."""
    block = bytearray(os.urandom(TENSOR_BYTES))
    files, written = [], 0
    while written < num_bytes:
        tensors = min(FILE_TENSORS, -(-(num_bytes - written) // TENSOR_BYTES))
        header: dict[str, Any] = {
            f"layer.{n}.weight": {
                "dtype": "BF16",
                "shape": [TENSOR_BYTES // 4096, 2048],
                "data_offsets": [n * TENSOR_BYTES, (n + 1) * TENSOR_BYTES],
            }
            for n in range(tensors)
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"model-{len(files):05d}.safetensors"
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for n in range(tensors):
                # No two tensors alike, so that no layer below can store one for both.
                block[:16] = os.urandom(16)
                block[:: 64 * 1024] = bytes([n % 256]) * len(block[:: 64 * 1024])
                stream.write(block)
        drop_pages(path)
        files.append(path)
        written += tensors * TENSOR_BYTES
    return files


def drop_pages(path: Path) -> None:
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(files: Sequence[Path], setting: Setting, rounds: int) -> dict[str, Any]:
    num_bytes = sum(path.stat().st_size for path in files)
    rates: dict[str, list[float]] = {}
    notes: dict[str, Any] = {}
    for number in range(rounds):
        taking_part = list(readers(files, setting, notes))
        # A fixed order would give each reader the same predecessor, and the host's cache with it.
        random.Random(number).shuffle(taking_part)
        for name, read in taking_part:
            try:
                seconds = timed(files, read)
            except Exception as error:  # another project's; the table says so
                if name.startswith(("raw", "stream")):
                    raise
                notes[name] = f"failed: {error}"
                continue
            rates.setdefault(name, []).append(num_bytes / seconds / 1e9)
            print(f"{name:24s} {rates[name][-1]:6.2f} GB/s", file=sys.stderr, flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "threads": setting.threads,
        "slab_mib": setting.slab_bytes / MIB,
        "ring_mib": setting.ring_bytes / MIB,
        "gb_per_s": {name: [round(value, 3) for value in values] for name, values in rates.items()},
        "median_gb_per_s": {name: round(value, 3) for name, value in medians.items()},
        "ratio_to_raw": {name: round(value / medians["raw"], 3) for name, value in medians.items()},
        "notes": notes,
    }


def timed(files: Sequence[Path], read: Callable[[], float | None]) -> float:
    """Seconds of the second of two cold readings; the first makes the reader's buffers.

    Ours are made before its clock starts, so the others must not pay for theirs.
    """
    seconds = 0.0
    for _ in range(2):
        for path in files:
            drop_pages(path)
        begin = time.perf_counter()
        seconds = read() or time.perf_counter() - begin
    return seconds


def readers(
    files: Sequence[Path], setting: Setting, notes: dict[str, Any]
) -> Iterator[tuple[str, Callable[[], float | None]]]:
    yield "raw", lambda: read_raw(files, setting)
    yield "raw, small pages", lambda: read_raw(files, setting, huge_pages=False)
    yield "stream", lambda: read_stream(files, setting, notes, "stream")
    yield "stream, host busy", lambda: busy(lambda: read_stream(files, setting, notes, "busy"))
    yield "stream, buffered", lambda: read_stream(files, setting, notes, "buffered", direct=False)
    if importlib.util.find_spec("runai_model_streamer"):
        importlib.import_module("runai_model_streamer")
        yield "runai_model_streamer", lambda: read_runai(files)
    if importlib.util.find_spec("fastsafetensors"):
        importlib.import_module("fastsafetensors")
        yield "fastsafetensors", lambda: read_fastsafetensors(files)


def read_raw(files: Sequence[Path], setting: Setting, *, huge_pages: bool = True) -> float:
    pieces = [
        (path, begin)
        for path in files
        for begin in range(0, path.stat().st_size, setting.slab_bytes)
    ]
    numbers = count()
    handles = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files}

    def work(memory: memoryview) -> None:
        while (number := next(numbers)) < len(pieces):
            path, begin = pieces[number]
            os.preadv(handles[path], [memory], begin)

    buffers = [touched(setting.slab_bytes, huge_pages) for _ in range(setting.threads)]
    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    for handle in handles.values():
        os.close(handle)
    return seconds


def touched(num_bytes: int, huge_pages: bool) -> memoryview:
    """Memory that is there already: no page fault is timed."""
    memory: memoryview
    if huge_pages:
        # A pool of its own: memory that tensors hold outlives it.
        memory = HostPool(num_bytes, pinned=False).take(num_bytes).numpy().data
    else:
        mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_NOHUGEPAGE)
        memory = memoryview(mapped)
    for page in range(0, num_bytes, mmap.PAGESIZE):
        memory[page] = 0
    return memory


def read_stream(
    files: Sequence[Path],
    setting: Setting,
    notes: dict[str, Any],
    name: str,
    *,
    direct: bool = True,
) -> float:
    """Seconds from the first read to the last copy; making the pool is not counted."""
    extents = [Extent(path=path, begin=0, end=path.stat().st_size) for path in files]
    extents = coalesce(extents, max_gap=0, max_bytes=setting.slab_bytes)
    cuda = torch.cuda.is_available()
    copies = torch.cuda.Stream() if cuda else None
    target = torch.empty(setting.slab_bytes, dtype=torch.uint8, device="cuda" if cuda else "cpu")
    begin_pool = time.perf_counter()
    with HostPool(setting.ring_bytes, pinned=cuda) as pool:
        ring = pool.take(setting.ring_bytes)
        if not cuda:
            ring[:: mmap.PAGESIZE] = 0
        begin = time.perf_counter()
        with DiskStream(
            extents,
            ring=ring,
            slab_bytes=setting.slab_bytes,
            threads=setting.threads,
            direct=direct,
        ) as stream:
            for slab in stream:
                if copies is None:
                    slab.release()
                    continue
                with torch.cuda.stream(copies):
                    target[: slab.data.numel()].copy_(slab.data, non_blocking=True)
                    slab.release(after=copies.record_event(torch.cuda.Event(blocking=True)))
            if copies is not None:
                copies.synchronize()
            seconds = time.perf_counter() - begin
            stats = stream.stats
    notes[name] = {
        "direct": stats.direct,
        "bytes_from_disk": stats.bytes_from_disk,
        "pool_s": round(begin - begin_pool, 3),
    }
    return seconds


def busy(read: Callable[[], float]) -> float:
    """Run *read* while this process's interpreter is kept busy by another thread."""
    stop = threading.Event()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    value = torch.zeros(64, 64, device=device)

    def launch() -> None:
        launched = 0
        while not stop.is_set():
            value.add_(1.0)
            launched += 1
            if launched % 200 == 0 and device == "cuda":
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        return read()
    finally:
        stop.set()
        thread.join()


def read_runai(files: Sequence[Path]) -> None:
    from runai_model_streamer import SafetensorsStreamer

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in files], device=device)
        for _, tensor in streamer.get_tensors():
            del tensor
    if device != "cpu":
        torch.cuda.synchronize()


def read_fastsafetensors(files: Sequence[Path]) -> None:
    from fastsafetensors import SafeTensorsFileLoader

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    loader = SafeTensorsFileLoader(None, device, nogds=True)
    for path in files:
        loader.add_filenames({0: [str(path)]})
        buffers = loader.copy_files_to_device()
        for name in loader.get_keys():
            buffers.get_tensor(name)
        buffers.close()
        loader.reset()
    loader.close()
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
