"""One file per whole-model transform: the same function in other weights, given as a view of a checkpoint."""
