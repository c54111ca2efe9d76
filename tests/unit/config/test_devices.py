"""The values of --devices_per_worker."""

import pytest

from tfps.config.devices import DeviceRequest, devices, requested


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "65", "cpu:0", "cpu:-2", "cpu:", "cpu", "gpu:x", "gpu:2", "1.5", "CPU:2"]
)
def test_what_is_no_number_of_devices_is_refused(value: str) -> None:
    """The message says what would be valid."""
    with pytest.raises(ValueError, match="number of GPUs from 1 to 64, or cpu:N"):
        devices(value)


def test_a_request_is_read() -> None:
    """A number is of GPUs; without the flag it is all of them."""
    assert [requested(value and devices(value)) for value in (None, "8", "cpu:4")] == [
        DeviceRequest("GPU"),
        DeviceRequest("GPU", 8),
        DeviceRequest("CPU", 4),
    ]
