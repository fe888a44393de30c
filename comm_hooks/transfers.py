"""Copy tensors from the CPU to an accelerator without waiting."""

from torch import Tensor, device


def to_device(values: Tensor, target: device) -> Tensor:
    """Return a copy of a CPU tensor on a device, without waiting for the device's earlier work.

    The tensor is pinned first: a copy from pageable memory may wait for that work.
    """
    if values.device.type != "cpu" or target.type in ("cpu", "meta"):
        return values.to(target)
    return values.pin_memory().to(target, non_blocking=True)
