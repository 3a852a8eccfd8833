"""Progress bars of commands that read or write many bytes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from leadline.cli.output import talk

if TYPE_CHECKING:
    from rich.progress import TaskID


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
