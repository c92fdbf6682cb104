"""What may be chosen: layouts, membership, moves, baselines."""
