"""Compress: an offline model-compression toolkit for causal language models."""

__version__ = "0.1.0"
