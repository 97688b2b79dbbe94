"""What to do to which tensor: strict YAML (schema) and its resolution against headers (plan)."""
