"""Few rows of x: weights stream once through the registers."""
