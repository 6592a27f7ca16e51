"""How a command ends: its exit status, mistakes told in a line, Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import typer

from rlinf.commands.streams import protect_streams, stdout_fault
from rlinf.errors import DiskFullError, SimulatorError, UserError, WorkerDiedError, full_disk, install_line

UsageError: Any = typer.BadParameter.__mro__[1]  # click's, wherever this typer keeps it
# Exit statuses.
MISTAKE, SIMULATOR, DIVERGED, DIED, NO_SPACE, DIFFERS = range(2, 8)
INTERRUPTED, NO_READER = 130, 141
# Commands whose results are files: a stdout that cannot be written loses none of them, and changes no exit status.
LEAVES_FILES = ("train", "eval", "compare", "sft", "collect", "seeds", "export", "quickstart", "replay", "record")
# Optional package -> the extra that brings it.
EXTRAS = {
    "pyarrow": "datasets",
    "PIL": "datasets",
    "av": "video",
    "peft": "lora",
    "websockets": "serve",
    "msgpack": "serve",
}


def run_command(app: Callable[..., Any]) -> NoReturn:
    """Run the command of this process and exit; what a person can mend is a message and an exit status."""
    protect_streams()
    threading.excepthook = partial(_thread_failed, threading.excepthook)
    logging.addLevelName(logging.WARNING, "warning")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        status = app(prog_name="rlinf", standalone_mode=False) or 0
    except UsageError as error:
        status = _refused(error.format_message() + _as_setting(error), MISTAKE)
    except UserError as error:
        status = _refused(error, NO_SPACE if full_disk(error) else MISTAKE)
    except DiskFullError as error:
        status = _refused(error, NO_SPACE)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        install = install_line(EXTRAS[error.name])
        status = _refused(f"the Python package {error.name} is not installed: {install}", MISTAKE)
    except SimulatorError as error:
        status = _refused(error, SIMULATOR)
    except FloatingPointError as error:
        status = _refused(error, DIVERGED)
    except WorkerDiedError as error:
        status = _refused(error, DIED)
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except Exception as error:
        if (reason := full_disk(error)) is None:
            raise
        status = _refused(f"a file cannot be written: {reason}", NO_SPACE)
    if status == 0 and (fault := stdout_fault()) and sys.argv[1:2] and sys.argv[1] not in LEAVES_FILES:
        status = NO_SPACE if full_disk(fault) else NO_READER
    if status == INTERRUPTED:
        print("interrupted", file=sys.stderr)
        _leave_now()
    sys.exit(status)


def _refused(error: object, status: int) -> int:
    """Say why; `rlinf` alone has shown its help and has nothing to add."""
    if text := str(error):
        print(f"error: {text}", file=sys.stderr)
    return status


def _as_setting(error: Any) -> str:
    """For an option that does not exist, such as --learning_rate: settings are written key=value here."""
    from rlinf.compat.other_names import key_meant

    meant = key_meant(str(getattr(error, "option_name", "")).lstrip("-"))
    return "" if meant is None else f"; settings are written key=value, here {meant}=VALUE"


def _thread_failed(tell: Callable[[threading.ExceptHookArgs], Any], args: threading.ExceptHookArgs) -> None:
    """Say nothing of a logger's thread that found no space: the logger itself fails next, with a warning."""
    if not full_disk(args.exc_value):
        tell(args)


def _interrupt(*_: Any) -> None:
    """The first Ctrl-C unwinds, and everything is closed on the way; a second one does not wait for that."""
    signal.signal(signal.SIGINT, lambda *_: _leave_now())
    raise KeyboardInterrupt


def _leave_now() -> NoReturn:
    """Without waiting for threads; simulators end by themselves when their parent is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)
