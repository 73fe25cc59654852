"""The C++ kernels for CPUs, and their Python bindings."""
