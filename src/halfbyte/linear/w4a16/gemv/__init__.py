"""W4A16 GEMV for small M: the weights stream once through the registers."""
