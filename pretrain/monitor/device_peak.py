"""Peak speeds of devices, for model FLOPs utilisation (MFU).

Dense bf16 matrix products with float32 accumulation, in TFLOP/s, as the makers' data sheets give them. Where a sheet
gives the speed with 2:4 sparsity only (most of NVIDIA's since Hopper), half of it. Consumer cards reach half of their
float16-accumulation speed.
"""

from __future__ import annotations

import torch

PEAK_TFLOPS = (
    # Part of the device's name, TFLOP/s. The first that fits counts: variants before their families.
    ("H100 PCIe", 756.0),  # NVIDIA H100 data sheet: 1,513 with sparsity
    ("H100 NVL", 835.5),  # NVIDIA H100 data sheet: 1,671
    ("H200 NVL", 835.5),  # NVIDIA H200 data sheet: 1,671
    ("GH200", 989.5),  # NVIDIA GH200 data sheet: 1,979
    ("H100", 989.5),  # SXM; NVIDIA H100 data sheet: 1,979
    ("H800", 989.5),  # as H100; NVLink differs
    ("H200", 989.5),  # SXM; NVIDIA H200 data sheet: 1,979
    ("GB200", 2500.0),  # NVIDIA GB200 NVL72 data sheet: 360 PFLOP/s with sparsity over 72 GPUs
    ("B200", 2250.0),  # NVIDIA DGX B200 data sheet: 36 PFLOP/s with sparsity over 8 GPUs
    ("A100", 312.0),  # NVIDIA A100 data sheet
    ("A800", 312.0),  # as A100; NVLink differs
    ("A40", 149.7),  # NVIDIA A40 data sheet
    ("A30", 165.0),  # NVIDIA A30 data sheet
    ("A10G", 70.0),  # NVIDIA A10G data sheet
    ("A10", 125.0),  # NVIDIA A10 data sheet
    ("L40S", 362.05),  # NVIDIA L40S data sheet: 733 with sparsity
    ("L40", 181.05),  # NVIDIA L40 data sheet
    ("L4", 121.0),  # NVIDIA L4 data sheet: 242 with sparsity
    ("RTX 6000 Ada", 364.2),  # NVIDIA Ada architecture paper
    ("RTX A6000", 154.8),  # NVIDIA GA102 architecture paper
    ("RTX 5090", 209.5),  # NVIDIA RTX Blackwell architecture paper
    ("RTX 4090", 165.2),  # NVIDIA Ada architecture paper
    ("RTX 3090", 71.0),  # NVIDIA GA102 architecture paper
    ("MI355X", 2516.6),  # AMD Instinct MI355X data sheet
    ("MI325X", 1307.4),  # AMD Instinct MI325X data sheet
    ("MI300X", 1307.4),  # AMD Instinct MI300X data sheet
    ("MI250X", 191.5),  # AMD Instinct MI250X data sheet: 383 over its two devices
    ("MI210", 181.0),  # AMD Instinct MI210 data sheet
)


def peak_tflops(device_name: str) -> float | None:
    """Of a device by its name, or None for one that is not in the table, and for a slice of one (MIG)."""
    if " MIG " in device_name:
        return None
    return next((peak for part, peak in PEAK_TFLOPS if part in device_name), None)


def peak_of(device: torch.device, configured: float | None) -> tuple[float | None, str | None]:
    """FLOP/s of one rank's device and None; or None and a line on what to do about it, empty where nothing is amiss."""
    if configured is not None:
        return configured * 1e12, None
    if device.type != "cuda":
        return None, None
    name = torch.cuda.get_device_name(device)
    peak = peak_tflops(name)
    if peak is None:
        return None, f"no MFU: the peak of {name!r} is not known; set monitor.peak_tflops (dense bf16, of one GPU)"
    return peak * 1e12, None
