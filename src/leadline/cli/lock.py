"""`leadline lock`: hold a lock against everything it locks."""

from pathlib import Path
from typing import Annotated

import typer

from leadline.cli.output import JsonOption, data, print_json

app = typer.Typer(help="Check a lock.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """Check a lock."""


@app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    deep: Annotated[bool, typer.Option("--deep", help="Also hash every token shard.")] = False,
    json_output: JsonOption = False,
) -> None:
    """Lock against ledger, evidence, arithmetic, data manifest and code."""
    from rich.markup import escape

    from leadline.cli.progress import byte_bar
    from leadline.core.lockfile import read_lock
    from leadline.gate.lock import lock_problems

    lock = read_lock(run_dir)
    with byte_bar() as show:
        problems = lock_problems(
            run_dir, deep=deep, on_progress=lambda done, total: show("check shards", done, total)
        )
    if json_output:
        print_json(
            {
                "ok": not problems,
                "problems": problems,
                "sha256": lock.sha256,
                "locked_budget_tokens": lock.payload["locked_budget_tokens"],
                "total_steps": lock.payload["total_steps"],
                "best_cfg": lock.payload["best_cfg"],
            }
        )
    elif problems:
        for problem in problems:
            data.print(f"  [bold red]differs[/]  {escape(problem)}")
    else:
        payload = lock.payload
        data.print(
            f"lock verified: {payload['locked_budget_tokens']:,} tokens, "
            f"{payload['total_steps']:,} steps at {payload['best_cfg']}; sha256 {lock.sha256}"
        )
    if problems:
        raise typer.Exit(1)
