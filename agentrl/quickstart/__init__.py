"""The data, the tiny policy and the warm-up of the quickstart."""
