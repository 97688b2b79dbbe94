"""Training of what a rounded model may still change: its scales and norm weights; the codes stay."""
