"""The attention benchmark with peers: cases, run, table and picture."""
