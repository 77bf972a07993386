"""`python -m agentrl.verl.main_ppo`: verl's PPO trainer, for commands of `verl.trainer.main_ppo`."""

import sys

from agentrl.verl.launch import PPO, run

if __name__ == "__main__":
    sys.exit(run(PPO))
