"""Search for the prompt of an environment before RL: splits, budget, cache, proposers, and GEPA over them."""
