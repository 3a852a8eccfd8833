"""Entry point and command tree.

Command modules import their libraries inside the functions, so that `--help`
loads neither torch nor transformers.
"""

import io
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Annotated

import typer

from leadline._version import __version__
from leadline.cli import data, demo, gate, ledger, lock, pack, probe, report, rig, tap
from leadline.core.errors import LeadlineError

# Newer typer carries a click of its own, older typer uses the installed one; either way
# this is the base of what it raises over a wrong command line.
_ClickException: type[typer.BadParameter] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

_SIGNAL_BASE = 128  # plus the signal's number: the shell's own convention
_INTERRUPTED = 130

app = typer.Typer(
    name="leadline",
    help="Measure first, lock, run once inside a window, prove it afterwards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"leadline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Measure first, lock, run once inside a window, prove it afterwards."""
    del debug, version  # read from argv in main(), where the error is caught


# Command groups, in the order --help shows them.
app.command(name="demo")(demo.demo)
app.add_typer(gate.app, name="gate")
app.command(name="probe")(probe.probe)
app.add_typer(lock.app, name="lock")
app.add_typer(ledger.app, name="ledger")
app.add_typer(pack.app, name="pack")
app.add_typer(data.app, name="data")
app.add_typer(rig.app, name="rig")
app.add_typer(tap.app, name="tap")
app.command(name="report")(report.report)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with DESIGN's codes: 0 green, 1 failed, 2 usage, 3 red."""
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    # --debug is accepted anywhere on the line, because people add it to the end of a failed one.
    arguments = [word for word in arguments if word != "--debug"]
    as_json = "--json" in arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be text
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed session, a machine taken back
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish stands
            signal.signal(number, _stop)
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="leadline", standalone_mode=False)
    except _ClickException as error:
        if as_json:
            _print_json_error("UsageError", error.format_message())
        error.show(file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except LeadlineError as error:
        if debug:
            raise
        if as_json:
            _print_json_error(type(error).__name__, str(error))
        sys.stderr.write(f"leadline: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has seen enough (`| head`); nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(_SIGNAL_BASE + signal.SIGPIPE)
    except Exception as error:
        if debug:
            raise
        message = f"{type(error).__name__}: {error}"
        if as_json:
            _print_json_error(type(error).__name__, message)
        sys.stderr.write(f"leadline: unexpected {message} (run again with --debug for the trace)\n")
        sys.exit(1)
    if code == _INTERRUPTED:  # newer typer turns the interrupt into this code and says nothing
        sys.stderr.write("leadline: stopped\n")
    sys.exit(code if isinstance(code, int) else 0)


def _print_json_error(kind: str, message: str) -> None:
    # Where stdout itself is what failed, stderr still tells.
    with suppress(OSError, ValueError):
        sys.stdout.write(json.dumps({"error": {"kind": kind, "message": message}}) + "\n")
        sys.stdout.flush()


def _stop(number: int, frame: object) -> None:
    """End as an interrupt does, so that temporary files are taken away."""
    del frame
    with suppress(OSError):  # past Python's streams, which the signal may have interrupted
        os.write(2, b"leadline: stopped\n")
    raise SystemExit(_SIGNAL_BASE + number)
