"""Peak speeds of GPUs, by their names."""

BF16_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}
"""Part of a device's name -> peak of dense bfloat16 matrix products, TFLOP/s, from NVIDIA's data sheets. The
first part that the name contains counts: for example, "H100 PCIe" before "H100"."""


def peak_tflops(name: str) -> float | None:
    """Return the peak of a device with this name, None if it is unknown."""
    return next((peak for part, peak in BF16_TFLOPS.items() if part in name), None)
