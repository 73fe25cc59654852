"""halfbyte inside other engines."""
