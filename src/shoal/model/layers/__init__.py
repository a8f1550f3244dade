"""Recurrent mixers and experts in plain torch, one a file: what each means, which kernels are held against."""
