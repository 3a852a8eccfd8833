"""One optimiser step, its precision, and checkpoints."""
