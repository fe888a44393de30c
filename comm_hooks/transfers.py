"""Copy tensors from the CPU to an accelerator without waiting."""

from torch import Tensor, device


def to_device(values: Tensor, target: device) -> Tensor:
    """Return a copy of CPU values on a device, queued behind the device's earlier work.

    Values are pinned first: copying from other memory, a driver may wait for the earlier work.

    Example::

        >>> import torch
        >>> to_device(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    if values.device.type != "cpu" or target.type in ("cpu", "meta"):
        return values.to(target)
    return values.pin_memory().to(target, non_blocking=True)
