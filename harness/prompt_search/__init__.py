"""Search for the prompt of an environment before RL: splits, budget, cache, proposers, and the GEPA search over them."""
