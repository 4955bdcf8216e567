"""NVIDIA GPUs: own Triton kernels, and wrappers around packages that a user may install."""
