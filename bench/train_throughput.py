"""dual-mind against a plain Llama-shaped model of the same size, in one run.

    python bench/train_throughput.py --out bench/results/train_throughput_<gpu>_<yyyymm>.json

Every (model, point) runs in a fresh process through the same probe as the gate, on the
same shards: bf16 autocast over fp32 master weights, fused AdamW, clipping, compiled.
Prints tok/s and the ratio dual-mind / each yardstick at P1, P2 and P3; target >= 1.0.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hardware import hardware_facts
from leadline.data import pack_text
from leadline.probe.process import run_probe
from leadline.probe.progress import Progress
from leadline.probe.request import EnvironmentRequest, PointRequest, Subject

POINTS = (("P1", 16, 512), ("P2", 64, 512), ("P3", 32, 1024))
SMALL_POINTS = (("P1", 2, 64), ("P2", 4, 64), ("P3", 2, 128))
OURS = "dual-mind"
MODELS: dict[str, dict[str, Any]] = {
    OURS: {"kind": "dual-mind", "preset": "139.7m"},
    "plain-llama": {"kind": "python", "object": "plain_llama.py:workload"},
    "transformers-llama": {
        "kind": "transformers",
        "model_type": "llama",
        "config": {
            "vocab_size": 32_960,
            "hidden_size": 1_024,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "intermediate_size": 2_944,
            "max_position_embeddings": 2_048,
            "tie_word_embeddings": True,
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=1, help="passes over all models and points")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try the script")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, Any] = {}
        for results in measure(Path(folder), arguments.steps, arguments.rounds, arguments.small):
            # Written after every measurement: a rented machine may go at any time.
            arguments.out.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    print_table(results)


def measure(folder: Path, steps: int, rounds: int, small: bool) -> Iterator[dict[str, Any]]:
    shards = folder / "shards"
    pack_text("stdlib", shards, tokenizer="bpe", vocab_size=2_048 if small else 32_768)
    environment = run_probe(
        EnvironmentRequest(device="auto", requirements=None), folder, "environment", quiet
    )
    rates: list[dict[str, Any]] = []
    for round_number in range(rounds):
        for point in SMALL_POINTS if small else POINTS:
            for model in MODELS:
                rates.append(one(folder, shards, environment, model, point, steps, round_number))
                print(json.dumps(rates[-1]), file=sys.stderr, flush=True)
                yield {
                    "bench": "train_throughput",
                    "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "hardware": hardware_facts(environment),
                    "steps": steps,
                    "rates": rates,
                    "ratios": ratios(rates),
                }


def one(
    folder: Path,
    shards: Path,
    environment: dict[str, Any],
    model: str,
    point: tuple[str, int, int],
    steps: int,
    round_number: int,
) -> dict[str, Any]:
    name, micro_batch, seq_len = point
    subject = Subject(
        workload=MODELS[model],
        base_dir=str(Path(__file__).parent),
        shards=str(shards),
        device=environment["device"]["kind"],
        seed=0,
    )
    request = PointRequest(
        subject=subject,
        name=name,
        micro_batch=micro_batch,
        seq_len=seq_len,
        eval_batch=micro_batch,
        eval_batches=3,
        warmup_steps=10,
        steps=steps,
        seconds=None,
        memory_limit_percent=80,
        steady_percent="3",
        checkpoint_dir=str(folder / "checkpoints"),
    )
    data = run_probe(request, folder, f"{model}-{name}-{round_number}", quiet)
    kept = ("tok_s", "tok_s_low", "tok_s_high", "parameters", "status", "why", "recompiles")
    return {
        "model": model,
        "point": name,
        "shape": f"{micro_batch}x{seq_len}",
        "peak_gib": round(data["memory"]["allocator_peak_bytes"] / 2**30, 2),
        "warmup_seconds": round(data["warmup_seconds"], 1),
        **{key: data[key] for key in kept},
    }


def ratios(rates: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median tok/s of ours over that of each yardstick, by point."""
    taken: dict[tuple[str, str], list[int]] = {}
    for rate in rates:
        taken.setdefault((rate["model"], rate["point"]), []).append(rate["tok_s"])
    middle = {key: sorted(values)[len(values) // 2] for key, values in taken.items()}
    return {
        model: {
            point: round(middle[OURS, point] / rate, 3)
            for (name, point), rate in sorted(middle.items())
            if name == model and (OURS, point) in middle
        }
        for model in MODELS
        if model != OURS
    }


def print_table(results: dict[str, Any]) -> None:
    for rate in results["rates"]:
        print(
            f"{rate['model']:20} {rate['point']} {rate['shape']:>8} {rate['tok_s']:>9,} tok/s "
            f"{rate['parameters']:>12,} parameters {rate['peak_gib']:6.1f} GiB  {rate['why']}"
        )
    for model, by_point in results["ratios"].items():
        told = "  ".join(f"{point} {value:.3f}" for point, value in by_point.items())
        print(f"dual-mind / {model}: {told}   (target >= 1.0)")


def quiet(progress: Progress) -> None:
    del progress


if __name__ == "__main__":
    main()
