"""The command line: one file per command. Only this folder prints."""
