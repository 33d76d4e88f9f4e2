"""C kernels for CPUs."""
