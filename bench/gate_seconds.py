"""How long a whole gate takes on this machine, and what it found, as one JSON file.

    python bench/gate_seconds.py CONFIG.toml --out bench/results/gate_<model>_<gpu>_<yyyymm>.json

Runs `leadline gate run` in a fresh folder under a wall clock: compiles, process starts
and hashing included. Target on an H200 at 139.7 M parameters: at most 7 minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hardware import hardware_facts

TARGET_SECONDS = 420


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "leadline", "gate", "run", str(arguments.config)]
        start = time.perf_counter()
        code = subprocess.run([*command, "--out", str(run_dir)], check=False).returncode
        seconds = time.perf_counter() - start
        result = collect(run_dir, seconds, code)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
    print(f"gate: exit {code}, {seconds:.0f} s (target <= {TARGET_SECONDS} s)")
    return code


def collect(run_dir: Path, seconds: float, code: int) -> dict[str, Any]:
    """The figures of a finished run; step times are left in the run's own evidence."""
    evidence = {
        path.stem: json.loads(path.read_bytes())["data"]
        for path in sorted((run_dir / "evidence").glob("*.json"))
    }
    twin = evidence.get("twin", {})
    points = {name: data for name, data in evidence.items() if name.startswith("probe.")}
    lock_path = run_dir / "config.lock.json"
    return {
        "bench": "gate_seconds",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware_facts(evidence["environment"]),
        "code_sha256": evidence["environment"]["code_sha256"],
        "exit_code": code,
        "wall_seconds": round(seconds),
        "target_seconds": TARGET_SECONDS,
        "twin": {
            key: twin.get(key)
            for key in ("worst_delta", "worst_step", "final_delta", "tolerance", "matmul_error")
        },
        "points": {
            name.partition(".")[2]: {key: v for key, v in data.items() if key != "step_ns"}
            for name, data in points.items()
        },
        "lock": json.loads(lock_path.read_bytes()) if lock_path.exists() else None,
    }


if __name__ == "__main__":
    sys.exit(main())
