"""From a plan to shards: the run, one block of it, one tensor of a block, and the scales moved before."""
