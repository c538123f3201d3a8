"""Prepares the forkserver; imported only there, before the workers' modules.

When it exits, after the server, it removes its socket and Ray's files, which a killed server cannot do. It collects no
garbage, which would take a fifth of the time of its imports. Ctrl-C, which it receives too, ends it silently, like a
child that was just being started.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
from types import TracebackType

# Forked ranks end by os._exit, which skips this.
atexit.register(shutil.rmtree, os.environ["TRAINHOUSE_FORKSERVER_DIRECTORY"], ignore_errors=True)

gc.disable()  # its children enable it

# It was started with SIGINT blocked; after these imports multiprocessing makes it ignore SIGINT.
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints an error of a child before it runs, unless the server ended while it started the child."""
    if kind is not EOFError:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _report
