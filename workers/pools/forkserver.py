"""What the forkserver does beside forking: at its end, after the server's, it removes its socket, and Ray's files,
which a killed server cannot do. And it collects no garbage, which would take a fifth of the time in which it imports.

Imported there only, before the workers' modules.
"""

import atexit
import gc
import os
import shutil

# Forked ranks end by os._exit, which asks nobody.
atexit.register(shutil.rmtree, os.environ["TRAINHOUSE_FORKSERVER_DIRECTORY"], ignore_errors=True)

gc.disable()  # its children have it on
