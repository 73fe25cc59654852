"""Measuring: times of calls, memory bandwidth, the machine, and reports of runs."""
