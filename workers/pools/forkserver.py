"""What the forkserver does beside forking: at its end, after the server's, it removes its socket, and Ray's files,
which a killed server cannot do. And it collects no garbage, which would take a fifth of the time in which it imports.
Ctrl-C, which reaches it, too, ends it there without a word.

Imported there only, before the workers' modules.
"""

import atexit
import gc
import os
import shutil
import signal

# Forked ranks end by os._exit, which asks nobody.
atexit.register(shutil.rmtree, os.environ["TRAINHOUSE_FORKSERVER_DIRECTORY"], ignore_errors=True)

gc.disable()  # its children have it on

# It was started with SIGINT blocked; once all is imported it ignores it, as multiprocessing has it.
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
