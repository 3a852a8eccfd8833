"""Grams of experts' rows on one CUDA device: our kernel, its shapes, and the alternatives.

    python bench/grouped_gram.py --out bench/results/grouped_gram_<gpu>_<yyyymm>.json

For 128 experts of width 768, as many rows as a wide step brings: the kernel with and
without carry, with other program shapes (`--sweep`), on skewed routing; a grouped product
that returns bf16; a loop of products over experts, which waits for the device. Then the
single Gram of all tokens against one full product. TFLOP/s count 2 n K K for every kernel,
though ours computes little more than half of that; errors are relative to float64.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from leadline.tap.gram import GramSum, GroupedGramSum
from leadline.tap.gram_blocks import GramBlocks
from leadline.tap.grouped_gram import BlockGrams, TileConfig, config_for

EXPERTS = 128
WIDTH = 768
ROWS = (65_536, 131_072)
SINGLES = ((2048, 16_384), (2048, 65_536), (4096, 16_384))
REPEATS = 15
CHECKED = 4  # groups whose error is looked at
BF16 = torch.bfloat16

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true", help="other program shapes and lanes too")
    arguments = parser.parse_args()
    began = time.monotonic()
    peak = matmul_peak()
    results: list[Result] = []
    for result in chain(grouped(arguments.sweep), singles(arguments.sweep), packing()):
        if "tflop_s" in result:
            result["share_of_matmul"] = round(result["tflop_s"] / peak, 3)
        print(json.dumps(result), file=sys.stderr, flush=True)
        results.append(result)
    told = {
        "bench": "grouped_gram",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware(),
        "matmul_bf16_tflop_s": round(peak, 1),
        "seconds": round(time.monotonic() - began, 1),
        "results": results,
    }
    text = json.dumps(told, indent=2, sort_keys=True)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")


def hardware() -> Result:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def matmul_peak() -> float:
    """TFLOP/s of a large square bf16 product: what a kernel can hope for here."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9


def milliseconds(work: Callable[[], object]) -> float:
    """Median device time of one call, the host's waits included."""
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def grouped(sweep: bool) -> Iterator[Result]:
    for n in ROWS:
        rows = torch.randn(n, WIDTH, device="cuda").to(BF16)
        for routing in ("even", "skewed"):
            offsets = routed(n, routing)
            kernels = ours()
            if routing == "even":
                kernels |= alternatives() | (shapes() if sweep else {})
            for name, kernel in kernels.items():
                case = {"rows": n, "routing": routing, "kernel": name}
                yield case | measured(kernel, rows, offsets)


def routed(n: int, routing: str) -> Tensor:
    """Offsets of n rows drawn over the experts, all alike or by 1 / (rank + 8)."""
    weights = torch.ones(EXPERTS)
    if routing == "skewed":
        weights = 1 / (torch.arange(EXPERTS) + 8.0)
        weights = weights[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(0))]
    generator = torch.Generator().manual_seed(1)
    expert = torch.multinomial(weights, n, replacement=True, generator=generator)
    sizes = torch.bincount(expert, minlength=EXPERTS)
    return torch.cat((torch.zeros(1), sizes.cumsum(0))).to(torch.int32).cuda()


Kernel = Callable[[Tensor, Tensor], Callable[[], object]]
"""From rows and offsets to a call that adds once; what it returns gives the full Grams."""


def measured(kernel: Kernel, rows: Tensor, offsets: Tensor) -> Result:
    try:
        add = kernel(rows, offsets)
        found = add()
        error = worst_error(found, rows, offsets)
        took = milliseconds(add)
    except (RuntimeError, ValueError, TypeError, AttributeError) as fault:
        return {"failed": str(fault).splitlines()[0][:200]}
    flop = 2 * int(offsets[-1]) * rows.shape[1] ** 2
    return {
        "milliseconds": round(took, 3),
        "tflop_s": round(flop / took / 1e9, 1),
        "relative_error": float(f"{error:.2e}"),
        "result_dtype": str(getattr(found, "dtype", torch.float32)),
    }


def ours() -> dict[str, Kernel]:
    def kernel(carry: bool, dtype: torch.dtype = BF16) -> Kernel:
        def prepare(rows: Tensor, offsets: Tensor) -> Callable[[], object]:
            sums = GroupedGramSum(EXPERTS, WIDTH, device="cuda", carry=carry)
            typed = rows.to(dtype)
            return lambda: (sums.add(typed, offsets), sums)[1]

        return prepare

    return {
        "leadline": kernel(False),
        "leadline, carry": kernel(True),
        "leadline, float32 rows": kernel(False, torch.float32),
    }


def shapes() -> dict[str, Kernel]:
    """The kernel with program shapes other than the one chosen."""
    chosen = config_for(BF16)
    found: dict[str, Kernel] = {}
    for step, warps, stages, registers in (
        (64, 4, 3, None),
        (64, 8, 3, None),
        (64, 8, 3, 128),
        (64, 8, 4, None),
        (64, 4, 4, None),
        (32, 4, 5, None),
        (32, 8, 5, 128),
        (128, 8, 2, None),
        (128, 8, 3, None),
    ):
        config = TileConfig(
            tile=128, step_rows=step, num_warps=warps, num_stages=stages, max_registers=registers
        )
        name = f"step {step}, {warps} warps, {stages} stages, {registers or 'free'} registers"
        name += " (chosen)" if config == chosen else ""
        found[name] = shaped(config, carry=False)
        if step == 64 and stages == 3:
            found[f"{name}, carry"] = shaped(config, carry=True)
    return found


def shaped(config: TileConfig, *, carry: bool) -> Kernel:
    def prepare(rows: Tensor, offsets: Tensor) -> Callable[[], object]:
        blocks = GramBlocks(num_features=WIDTH)
        sums = BlockGrams(EXPERTS, blocks, lanes=1, carry=carry, device=torch.device("cuda"))
        return lambda: (sums.add_groups(rows, offsets, 0, config), sums)[1]

    return prepare


def alternatives() -> dict[str, Kernel]:
    def grouped_mm(rows: Tensor, offsets: Tensor) -> Callable[[], object]:
        return lambda: F.grouped_mm(rows.T, rows, offs=offsets[1:])

    def grouped_mm_added(rows: Tensor, offsets: Tensor) -> Callable[[], object]:
        sums = torch.zeros(EXPERTS, WIDTH, WIDTH, device="cuda")
        return lambda: sums.add_(F.grouped_mm(rows.T, rows, offs=offsets[1:]))

    def loop(rows: Tensor, offsets: Tensor) -> Callable[[], object]:
        sums = torch.zeros(EXPERTS, WIDTH, WIDTH, device="cuda")

        def add() -> Tensor:
            for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
                if end > begin:
                    part = rows[begin:end]
                    sums[expert] += torch.mm(part.T, part, out_dtype=torch.float32)
            return sums

        return add

    return {
        "F.grouped_mm": grouped_mm,
        "F.grouped_mm, added in fp32": grouped_mm_added,
        "torch.mm per expert": loop,
    }


def worst_error(found: Any, rows: Tensor, offsets: Tensor) -> float:
    """Largest relative error of a few groups, after one addition."""
    bounds = offsets.tolist()
    errors = []
    for group in range(0, EXPERTS, EXPERTS // CHECKED):
        wide = rows[bounds[group] : bounds[group + 1]].double()
        errors.append(packed_error(packed_of(found, group), wide))
    return max(errors)


def packed_of(found: Any, group: int) -> Tensor:
    if isinstance(found, GroupedGramSum):
        return found.packed(groups=range(group, group + 1))[0]
    if isinstance(found, BlockGrams):
        out = torch.empty(1, WIDTH * (WIDTH + 1) // 2, device="cuda")
        found.pack(out, group)
        return out[0]
    row, column = torch.triu_indices(WIDTH, WIDTH, device="cuda")
    packed: Tensor = found[group, row, column]
    return packed


def packed_error(packed: Tensor, wide: Tensor) -> float:
    row, column = torch.triu_indices(wide.shape[1], wide.shape[1], device=wide.device)
    wanted = (wide.T @ wide)[row, column]
    return float((packed.double() - wanted).norm() / wanted.norm())


def singles(sweep: bool) -> Iterator[Result]:
    """One Gram of all rows, of mean 1 so that sums lose what they can lose."""
    for width, n in SINGLES:
        rows = (torch.randn(n, width, device="cuda") + 1).to(BF16)
        row, column = torch.triu_indices(width, width, device="cuda")
        wide = rows.double()
        wanted = (wide.T @ wide)[row, column]
        del wide
        for name, gram in single_kernels(width, sweep).items():
            gram.add(rows)
            error = float((gram.packed().double() - wanted).norm() / wanted.norm())
            took = milliseconds(lambda gram=gram, rows=rows: gram.add(rows))
            yield {
                "rows": n,
                "width": width,
                "kernel": f"single, {name}",
                "milliseconds": round(took, 3),
                "tflop_s": round(2 * n * width**2 / took / 1e9, 1),
                "relative_error": float(f"{error:.2e}"),
                "num_bytes": gram.num_bytes,
            }


def single_kernels(width: int, sweep: bool) -> dict[str, Any]:
    kernels: dict[str, Any] = {
        "leadline": GramSum(width, device="cuda", carry=False),
        "leadline, carry": GramSum(width, device="cuda"),
        "torch.mm": FullGram(width),
    }
    if sweep:
        for lanes in (1, 2, 4, 8, 16):
            kernels[f"{lanes} lanes"] = LaneGram(width, lanes)
    return kernels


class FullGram:
    """Both triangles, by the library's product."""

    def __init__(self, width: int) -> None:
        self.sums = torch.zeros(width, width, device="cuda")
        self.num_bytes = self.sums.nbytes

    def add(self, rows: Tensor) -> None:
        """Add rows [n, K]."""
        self.sums.add_(torch.mm(rows.T, rows, out_dtype=torch.float32))

    def packed(self) -> Tensor:
        """Packed upper triangle."""
        row, column = torch.triu_indices(*self.sums.shape, device="cuda")
        return self.sums[row, column]


class LaneGram:
    """Ours with a number of lanes."""

    def __init__(self, width: int, lanes: int) -> None:
        self.width = width
        blocks = GramBlocks(num_features=width)
        self.sums = BlockGrams(1, blocks, lanes=lanes, carry=False, device=torch.device("cuda"))
        self.num_bytes = self.sums.num_bytes

    def add(self, rows: Tensor) -> None:
        """Add rows [n, K]."""
        self.sums.add_rows(rows)

    def packed(self) -> Tensor:
        """Packed upper triangle."""
        out = torch.empty(1, self.width * (self.width + 1) // 2, device="cuda")
        self.sums.pack(out, 0)
        return out[0]


def packing() -> Iterator[Result]:
    """Writing packed triangles of all experts."""
    sums = GroupedGramSum(EXPERTS, WIDTH, device="cuda")
    out = sums.packed()
    took = milliseconds(lambda: sums.packed(out))
    moved = sums.num_bytes + out.nbytes
    yield {
        "kernel": "packed",
        "milliseconds": round(took, 3),
        "gb_s": round(moved / took / 1e6, 1),
        "num_bytes": sums.num_bytes,
    }


if __name__ == "__main__":
    main()
