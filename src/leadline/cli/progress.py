"""Progress bars of commands that read or write many bytes, or train for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from leadline.cli.output import talk

if TYPE_CHECKING:
    from rich.progress import TaskID

    from leadline.train.short_run import ShortRunProgress


@contextmanager
def byte_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr with one line a stage; none where nobody watches."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:16}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, done_bytes: int, total_bytes: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total_bytes)
            bar.update(tasks[stage], completed=done_bytes)

        yield show


@contextmanager
def training_bar(seconds: float) -> Iterator[Callable[["ShortRunProgress"], None]]:
    """A bar on stderr over *seconds* of training, with step, loss and rate."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("train"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[told]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=talk, transient=True, disable=not talk.is_terminal) as bar:
        task = bar.add_task("", total=seconds, told="", visible=False)

        def show(at: "ShortRunProgress") -> None:
            rate = at.tokens / max(at.elapsed_s, 1e-9)
            told = f"step {at.step}  loss {at.loss:.3f}  {rate:,.0f} tok/s"
            bar.update(task, completed=min(at.elapsed_s, seconds), told=told, visible=True)

        yield show
