"""The command ``compress``: registers one function per command and renders what they raise."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from compressor import __version__
from compressor.cli.demo import demo
from compressor.cli.distill import distill
from compressor.cli.evaluate import evaluate
from compressor.cli.export import export
from compressor.cli.inspect import inspect
from compressor.cli.plan import plan
from compressor.cli.quantize import quantize
from compressor.cli.verify import verify
from compressor.errors import CompressorError

app = typer.Typer(
    name="compress",
    help="Compress causal language models: quantize, export, evaluate, verify; one block in memory.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("quantize")(quantize)
app.command("plan")(plan)
app.command("distill")(distill)
app.command("export")(export)
app.command("eval")(evaluate)
app.command("inspect")(inspect)
app.command("verify")(verify)
app.command("demo")(demo)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"compress {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run the command line; exit codes: 0 done, 1 a gate or check failed, 2 user error."""
    # Threads that wait by spinning fight for the cores with torch's and numba's other pools.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except CompressorError as error:
        _fail(str(error), error.exit_code)
    except MemoryError:
        _fail("out of memory; `compress plan` predicts what a run needs (fewer --samples need less)", 2)
    except OSError as error:
        _debug()
        _fail(f"{error.filename or 'the system'}: {error.strerror or error}", 2)
    except Exception as error:
        _debug()
        told = f"{type(error).__name__}: {error}"
        _fail(f"unexpected: {told}\n  try: COMPRESS_TRACEBACK=1 shows where; please report it with the command", 2)


def _debug() -> None:
    """With COMPRESS_TRACEBACK set, where an unexpected error came from."""
    if os.environ.get("COMPRESS_TRACEBACK"):
        traceback.print_exc()


def _fail(message: str, code: int) -> None:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(code)
