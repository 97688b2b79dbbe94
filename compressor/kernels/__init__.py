"""Arrays in, arrays out. Imports nothing of ours; every fast function has a slow obvious twin."""
