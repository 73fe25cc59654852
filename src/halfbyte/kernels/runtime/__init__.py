"""CUDA C++ at run time: NVRTC, the cache of cubins, tensor maps, devices."""
