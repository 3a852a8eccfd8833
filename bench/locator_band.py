"""How far clean models stay inside the divergence locator's band; JSON on stdout.

The constants of `leadline.probe.errorband` come from these figures: for every module
call of models known to be clean, the bf16 error and what its best case explains. A
clean call never touches the band; how near it comes is `worst_share_of_band`.

    python bench/locator_band.py --device cpu
    python bench/locator_band.py --device cuda --preset 139.7m
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leadline.models.dualmind import DualMindWorkload
from leadline.probe.callwatch import module_names
from leadline.probe.errorband import (
    ERROR_QUANTILE,
    FLOOR,
    SENSITIVITY,
    best_case_errors,
)
from leadline.probe.isolation import isolated
from leadline.probe.lanes import LaneRunner
from leadline.probe.locator import locate_divergence
from leadline.probe.replay import Replayer, floating
from leadline.probe.rowerror import row_error

TOKENS = 320
VOCAB = 512

Case = tuple[str, nn.Module, Callable[[nn.Module], Tensor]]


def cases(device: str, preset: str) -> Iterator[Case]:
    for scale in (1.0, 4.0):
        yield dual_mind(device, preset, scale)
    for std in (0.02, 0.2):
        for attention in ("sdpa", "eager"):
            yield from families(device, attention, std)


def dual_mind(device: str, preset: str, scale: float) -> Case:
    workload = DualMindWorkload.from_spec(preset)
    torch.manual_seed(0)
    model = workload.build().to(device)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(scale)
    tokens = torch.randint(0, workload.vocab_size, (2, 513)).to(device)
    return (
        f"dual-mind {preset} x{scale:g}",
        model,
        lambda m: workload.loss(m, tokens[:, :-1], tokens[:, 1:]),
    )


def families(device: str, attention: str, std: float) -> Iterator[Case]:
    import transformers

    transformers.logging.set_verbosity_error()
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "initializer_range": std,
    }
    grouped = sizes | {"num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 32, "num_experts": 32, "num_experts_per_tok": 8}
    configs = (
        transformers.LlamaConfig(**grouped),
        transformers.Qwen3Config(**grouped, head_dim=16),
        transformers.Qwen3MoeConfig(**grouped, head_dim=16, **experts),
        transformers.MixtralConfig(**grouped, num_local_experts=4),
        transformers.GPTNeoXConfig(**sizes),
    )
    tokens = torch.randint(0, VOCAB, (2, TOKENS)).to(device)
    for config in configs:
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        yield (
            f"{config.model_type} {attention} std {std}",
            model.to(device),
            lambda m: m(input_ids=tokens, labels=tokens, use_cache=False).loss,
        )


def call_errors(
    model: nn.Module, forward: Callable[[nn.Module], Tensor], device: str
) -> list[dict[str, Any]]:
    """The bf16 error and the best-case error of every result of every call."""
    rows = []
    with isolated(model, device) as buffers:
        runner = LaneRunner(model, lambda: forward(model), buffers, device, 0)
        fp32, bf16 = runner.fp32(), runner.bf16()
        names = module_names(model)
        replayer = Replayer(lambda: forward(model), bf16.dtypes, names, buffers, device)
        generator = torch.Generator(device=device).manual_seed(0)
        for call in fp32.calls:
            reference = floating(call.output)
            results = replayer.in_bfloat16(call, ())
            best = best_case_errors(call, replayer, reference, generator) if reference else []
            for tensor, result, explained in zip(reference, results, best, strict=True):
                error = row_error(tensor, result, ERROR_QUANTILE)
                rows.append({"module": call.frame.name, "error": error, "best_case": explained})
    return rows


def measure(case: Case, device: str) -> dict[str, Any]:
    name, model, forward = case
    started = time.perf_counter()
    report = locate_divergence(model, forward, device_type=device)
    seconds = time.perf_counter() - started
    rows = call_errors(model, forward, device)
    nearest = max(rows, key=lambda row: row["error"] / (SENSITIVITY * row["best_case"] + FLOOR))
    above = max(rows, key=lambda row: row["error"] - row["best_case"])
    return {
        "model": name,
        "locate_s": round(seconds, 2),
        "accused": [f"{a.module}: {a.rule}: {a.detail}" for a in report.accused],
        "skipped": [f"{module}: {reason}" for module, reason in report.skipped],
        "modules": report.modules_checked,
        "worst_share_of_band": round(
            nearest["error"] / (SENSITIVITY * nearest["best_case"] + FLOOR), 3
        ),
        "nearest": nearest,
        "furthest_above_best_case": above,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--preset", default="tiny")
    arguments = parser.parse_args()
    results = [
        measure(case, arguments.device) for case in cases(arguments.device, arguments.preset)
    ]
    on_gpu = arguments.device == "cuda"
    facts = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "sensitivity": SENSITIVITY,
        "floor": FLOOR,
        "results": results,
    }
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
