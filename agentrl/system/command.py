"""Environment and exit statuses of the command-line entry points.

Import it before torch and transformers, which read these variables when they are imported.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from agentrl.errors import UserError

# Threads that spin while they wait would take the cores from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Their progress bars would tear our display.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def exit_status(work: Callable[[], object]) -> int:
    """Do the work and return the exit status. 0: done; 2: an error the user can mend, with one message; 130:
    interrupted."""
    try:
        work()
    except UserError as error:
        return _complain(str(error))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _complain(f"the disk is full: writing {error.filename or 'a file'} failed; earlier files are intact")
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last checkpoint, if there is one", file=sys.stderr)
        return 130
    return 0


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2
