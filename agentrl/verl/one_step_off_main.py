"""`python -m agentrl.verl.one_step_off_main`: verl's trainer one step off policy.

For commands of `verl.experimental.one_step_off_policy.main_ppo`.
"""

import sys

from agentrl.verl.launch import ONE_STEP_OFF, run

if __name__ == "__main__":
    sys.exit(run(ONE_STEP_OFF))
