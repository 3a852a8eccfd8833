"""`leadline demo`: the whole story on embedded defaults."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from leadline.cli.output import JsonOption, data, talk


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Run directory.")] = Path(
        "demo-run"
    ),
    json_output: JsonOption = False,
) -> None:
    """Gate a tiny model on this machine, train it for a minute, and tap it from disk."""
    from leadline.cli.gate import finish, run_and_show
    from leadline.core.errors import IntegrityError, LockError
    from leadline.core.lineage import verify_lineage
    from leadline.core.lockfile import read_lock
    from leadline.gate.defaults import demo_config_path
    from leadline.gate.lock import lock_problems

    config = demo_config_path()
    outcome = run_and_show(config, out)
    if not outcome.status.green:
        finish(outcome, json_output)
    problems = lock_problems(out, deep=True)
    if problems:
        raise LockError(f"the lock just written does not verify: {'; '.join(problems)}")
    check = verify_lineage(out)
    if not check.ok:
        raise IntegrityError(f"the ledger just written does not verify: {check.reason}")
    talk.print(f"ledger: verified, {check.lines} lines, head {check.head.hash[:16]}")
    talk.print(f"lock: verified, sha256 {read_lock(out).sha256[:16]}")
    # Before torch starts, as the probes have it: threads that spin while another program
    # wants the core make a small CPU step many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    trained = _train(out, config.parent, json_output)
    tap = _tap(out, json_output)
    finish(outcome, json_output, {"trained": trained, "tap": tap})


def _train(run_dir: Path, base_dir: Path, json_output: bool) -> dict[str, Any]:
    from leadline.cli.progress import training_bar
    from leadline.gate.defaults import DEMO_TRAIN_SECONDS
    from leadline.gate.demo_model import MODEL_FOLDER, train_locked_model

    with training_bar(DEMO_TRAIN_SECONDS) as show:
        trained = train_locked_model(run_dir, base_dir, seconds=DEMO_TRAIN_SECONDS, on_step=show)
    tell = talk if json_output else data
    tell.print(
        f"trained: {trained['steps']:,} steps, {trained['tokens']:,} tokens in "
        f"{trained['seconds']:.0f} s ({trained['tok_s']:,} tok/s), loss "
        f"{trained['first_loss']:.2f} -> {trained['last_loss']:.2f}, held out "
        f"{trained['eval_loss']:.2f}"
    )
    tell.print(f"model: {run_dir / MODEL_FOLDER}", markup=False)
    return {**trained, "model_dir": str((run_dir / MODEL_FOLDER).resolve())}


def _tap(run_dir: Path, json_output: bool) -> dict[str, Any]:
    from leadline.cli.tap_record import tap_bar
    from leadline.gate.demo_model import TAP_FOLDER, tap_locked_model

    with tap_bar() as show:
        tap = tap_locked_model(run_dir, show)
    tell = talk if json_output else data
    tell.print(
        f"tapped: {tap['layers']} layers, {tap['tokens']:,} tokens in "
        f"{float(tap['seconds']):.0f} s; read {tap['bytes_read']:,} of "
        f"{tap['checkpoint_bytes']:,} bytes "
        f"({tap['bytes_read'] / tap['checkpoint_bytes']:.2f} x); rows reached "
        f"{tap['experts_reached']} of {tap['experts']} experts"
    )
    for note in tap["notes"]:
        talk.print(f"  [yellow]{note['kind']}[/] ({note['count']}):", end=" ")
        talk.print(note["detail"], markup=False)
    tell.print(f"Grams: {run_dir / TAP_FOLDER}", markup=False)
    return tap
