"""Environment and exit statuses of the command-line entry points.

Import it before torch and transformers, which read these variables when they are imported.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable

from agentrl.errors import NothingLeft, UserError
from agentrl.system.garbage import put_off_full_collections
from agentrl.system.registrations import of_one_run
from agentrl.system.termination import Terminated, sigterm_raises
from agentrl.system.visible import complain, visible

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Their progress bars would tear our display.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class Shown(logging.Formatter):
    """Formatter of warnings, which may quote a program that the policy ran."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def exit_status(work: Callable[[], object]) -> int:
    """Do the work and return the process's exit status.

    0: done, or nothing is left to do; 2: something the user can mend, with one message; 130: interrupted (Ctrl-C);
    143: terminated (SIGTERM).
    """
    if logging.lastResort is not None:  # where nobody else shows warnings
        logging.lastResort.setFormatter(Shown())
    put_off_full_collections()  # in the imports of torch and transformers they took a sixth of the time
    try:
        with sigterm_raises(), of_one_run():
            work()
    except NothingLeft as told:
        print(visible(str(told)))
    except UserError as error:
        return complain(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return complain(f"the disk is full: writing {error.filename or 'a file'} failed; earlier files are intact")
    except KeyboardInterrupt as interrupt:
        ended, status = ("terminated", 143) if isinstance(interrupt, Terminated) else ("interrupted", 130)
        general = ["the same command goes on from the last checkpoint, if there is one"]
        print(f"{ended}; {'; '.join(getattr(interrupt, '__notes__', general))}", file=sys.stderr)
        return status
    return 0
