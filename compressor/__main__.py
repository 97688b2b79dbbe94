"""``python -m compressor`` is the command ``compress``."""

from compressor.cli.app import main

main()
