"""`python -m agentrl.verl.fully_async_main`: verl's fully asynchronous trainer.

For commands of `verl.experimental.fully_async_policy.fully_async_main`.
"""

import sys

from agentrl.verl.launch import FULLY_ASYNC, run

if __name__ == "__main__":
    sys.exit(run(FULLY_ASYNC))
