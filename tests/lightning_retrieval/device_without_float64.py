"""A pretended device without float64, for machines that have no such device.

Its tensors are tensors of the CPU that name another device. As on a real one, they are never float64, an operation on
tensors of two devices fails, and so does a conversion to NumPy.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE, CPU = torch.device("mps"), torch.device("cpu")
TO_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)
# These take tensors of two devices: the index may be on the CPU, and copies are made from one device to the other.
ANY_DEVICE = (torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.copy_, torch.Tensor.to)


class DeviceTensor(torch.Tensor):
    """A tensor of the pretended device."""


class DeviceWithoutFloat64(TorchFunctionMode):
    """While this is entered, `DEVICE` exists and has no float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        values = (args, kwargs or {})
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        on_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        if function == torch.Tensor.device.__get__:
            return DEVICE if on_device else CPU
        if on_device and function in TO_NUMPY:
            raise TypeError("A tensor of the device cannot be converted to NumPy.")
        if on_device and function not in ANY_DEVICE and any(is_on_cpu(tensor) for tensor in tensors):
            raise RuntimeError(f"{function.__name__} expected all tensors to be on the same device.")
        args, kwargs = tree_map(without_device, values)
        result = function(*args, **kwargs)
        if result_is_on_device(function, values, on_device):
            return tree_map(with_device, result)
        return result


def is_on_cpu(tensor):
    """Whether it is a tensor of the CPU that is not a number."""
    return tensor.ndim > 0 and not isinstance(tensor, DeviceTensor)


def result_is_on_device(function, values, on_device):
    named = [torch.device(value) for value in tree_leaves(values) if is_device(value)]
    if function is torch.Tensor.to and isinstance(values[0][1], torch.Tensor):
        return isinstance(values[0][1], DeviceTensor)
    if function is torch.Tensor.cpu:
        return False
    if named:
        return named[0] == DEVICE
    return on_device


def is_device(value):
    return isinstance(value, torch.device) or value in ("cpu", "mps")


def without_device(value):
    if isinstance(value, DeviceTensor):
        return value.as_subclass(torch.Tensor)
    return CPU if value == DEVICE else value


def with_device(value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.dtype == torch.float64:
        raise TypeError("The device has no float64.")
    return value.as_subclass(DeviceTensor)
