"""The C++ kernels for CPUs, and how Python reaches them."""
