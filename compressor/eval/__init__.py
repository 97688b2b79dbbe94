"""Scores: perplexity, divergence from a reference, errors per tensor."""
