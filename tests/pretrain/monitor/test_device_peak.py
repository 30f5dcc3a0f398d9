"""Peaks by the names that drivers give."""

from __future__ import annotations

import pytest
import torch

from pretrain.monitor.device_peak import PEAK_TFLOPS, peak_of, peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_peak_by_name(name: str, peak: float | None) -> None:
    assert peak_tflops(name) == peak


def test_no_name_hides_a_later_one() -> None:
    assert all(peak_tflops(name) == peak for name, peak in PEAK_TFLOPS)


def test_configured_peak_counts_and_a_cpu_has_none() -> None:
    assert peak_of(torch.device("cpu"), 0.5) == (0.5e12, None)
    assert peak_of(torch.device("cpu"), None) == (None, None)
