"""Text to tokens, the block-by-block walk, and the statistics passes ask for."""
