"""The oracle's functions written for speed: a public launcher and a private kernel per file."""
