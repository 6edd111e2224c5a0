"""Which errors mean that the memory of a device is exhausted."""

import re

import torch

# cuBLAS and cuDNN allocate memory of their own, past the allocator of torch, and report a failure by a status.
_ALLOCATION_FAILED = re.compile(
    r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_(\w+_)?ALLOC(ATION)?_FAILED|CUDA error: out of memory"
)
# What remains of the error if the workspace of every algorithm of a convolution was too large.
_NO_ALGORITHM = re.compile(r"unable to find an engine|unable to find a valid cuDNN algorithm", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is a failed allocation on a device: of torch, cuBLAS, cuDNN, cuSOLVER or cuSPARSE."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _ALLOCATION_FAILED.search(str(error)) is not None


def may_be_out_of_memory(error: BaseException) -> bool:
    """Whether less memory may be the cure: also true if cuDNN found no algorithm for a convolution."""
    if is_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and _NO_ALGORITHM.search(str(error)) is not None
