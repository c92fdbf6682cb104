"""StableHLO modules and the Shardy partitioner, in process."""
