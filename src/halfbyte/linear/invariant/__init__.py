"""Products of unquantized matrices whose rows do not depend on what else is in the batch."""
