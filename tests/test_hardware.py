"""The table of devices: found by what jax calls them, and nothing guessed."""

import pytest

from longtrain import hardware


@pytest.mark.parametrize(
    ("device_kind", "name", "bfloat16"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", "H100", 989.5e12),
        ("NVIDIA H200", "H200", 989.5e12),
        ("NVIDIA B200", "B200", 2250e12),
        ("NVIDIA GB200", "GB200", 2500e12),
        ("TPU v5 lite", "v5e", 197e12),
        ("TPU v5", "v5p", 459e12),
        ("TPU v5p", "v5p", 459e12),
        ("TPU v6 lite", "v6e", 918e12),
        ("gb200", "GB200", 2500e12),
    ],
)
def test_a_device_is_found_by_its_kind_or_name(device_kind: str, name: str, bfloat16: float):
    device = hardware.lookup(device_kind)
    assert device is not None
    assert (device.name, device.peak("bfloat16")) == (name, bfloat16)


@pytest.mark.parametrize(
    ("name", "gib"),
    [("A100-40GB", 39.4), ("A100-80GB", 79.3), ("H100", 79.1), ("H200", 139.8), ("B200", 178.4), ("GB200", 184.3)],
)
def test_memory_is_what_the_device_reports(name: str, gib: float):
    """As CUDA's messages round it."""
    assert hardware.DEVICES[name].memory_bytes / 2**30 == pytest.approx(gib, abs=0.05)


def test_a_peak_that_no_data_sheet_has_is_unknown():
    assert hardware.DEVICES["v5p"].peak("float32") is None
    assert hardware.DEVICES["H100"].peak("float32") == 67e12


@pytest.mark.parametrize("device_kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA L4", "TPU v9"])
def test_a_device_that_is_not_in_the_table_is_unknown(device_kind: str):
    assert hardware.lookup(device_kind) is None


@pytest.mark.parametrize("device", hardware.DEVICES.values(), ids=lambda device: device.name)
def test_the_figures_of_a_device_fit_together(device: hardware.Device):
    peak = device.peak_flops
    assert peak["bfloat16"] > 1e14
    # Each narrower type is at least as fast, and no figure is one with sparsity beside a dense one.
    steps = [("float32", "tf32", 20), ("tf32", "bfloat16", 2.1), ("bfloat16", "float8", 2)]
    for slower, faster, most in steps:
        if slower in peak and faster in peak:
            assert peak[slower] <= peak[faster] <= most * peak[slower]
    assert device.memory_bandwidth > device.link_bandwidth > device.network_bandwidth > 1e9
    assert 1e10 < device.host_bandwidth < device.memory_bandwidth
    assert 1.6e10 < device.memory_bytes < 200e9
