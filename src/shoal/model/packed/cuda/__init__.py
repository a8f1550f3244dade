"""Decoding on NVIDIA GPUs: Triton kernels, and a captured graph per layer that every depth plan replays."""
