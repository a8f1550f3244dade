"""Mixers and experts in plain torch, one a file: what each one means, which kernels are held against."""
