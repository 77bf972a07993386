"""`python -m agentrl.verl.main_dapo`: the trainer of verl's DAPO recipe, for commands of `recipe.dapo.main_dapo`."""

import sys

from agentrl.verl.launch import DAPO, run

if __name__ == "__main__":
    sys.exit(run(DAPO))
