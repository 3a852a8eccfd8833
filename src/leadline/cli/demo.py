"""`leadline demo`: the whole story on embedded defaults."""

from pathlib import Path
from typing import Annotated

import typer

from leadline.cli.output import JsonOption, talk


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Run directory.")] = Path(
        "demo-run"
    ),
    json_output: JsonOption = False,
) -> None:
    """Gate a tiny model on this machine: pack, twin, sweep, lock, verify, report."""
    from leadline.cli.gate import finish, run_and_show
    from leadline.core.errors import IntegrityError, LockError
    from leadline.core.lineage import verify_lineage
    from leadline.core.lockfile import read_lock
    from leadline.gate.defaults import demo_config_path
    from leadline.gate.lock import lock_problems

    outcome = run_and_show(demo_config_path(), out)
    if outcome.status.green:
        problems = lock_problems(out, deep=True)
        if problems:
            raise LockError(f"the lock just written does not verify: {'; '.join(problems)}")
        check = verify_lineage(out)
        if not check.ok:
            raise IntegrityError(f"the ledger just written does not verify: {check.reason}")
        talk.print(f"ledger: verified, {check.lines} lines, head {check.head.hash[:16]}")
        talk.print(f"lock: verified, sha256 {read_lock(out).sha256[:16]}")
    finish(outcome, json_output)
