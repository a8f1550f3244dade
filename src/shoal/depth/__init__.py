"""Which layers a token runs: budgets (how many), orders (which go first), plans (the two together)."""
