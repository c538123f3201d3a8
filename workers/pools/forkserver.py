"""What the forkserver does beside forking: at its end, after the server's, it removes its socket, and Ray's files.

Imported there only, before the workers' modules. A server that was killed cannot do it.
"""

import atexit
import os
import shutil

# Forked ranks end by os._exit, which asks nobody.
atexit.register(shutil.rmtree, os.environ["TRAINHOUSE_FORKSERVER_DIRECTORY"], ignore_errors=True)
