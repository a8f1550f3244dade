"""The device and dtype to compute in where the caller does not say."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def default_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_of(given: str | torch.device | None) -> torch.device:
    """The given device, else the default one."""
    return torch.device(given) if given is not None else default_device()


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device computes it natively, else float32."""
    return torch.bfloat16 if _native_bfloat16(device) else torch.float32


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # The public capability string stops at AVX512; the probes for the instruction itself are private, hence the guard.
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return device.type == "cpu" and any(probe() for probe in probes if probe is not None)


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch dtype of that name, or the dtype itself; ValueError for an unknown name."""
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
