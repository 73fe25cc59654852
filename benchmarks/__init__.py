"""Speed and accuracy claims: programs to run from the repository's root, and their runs as JSON."""
