"""Errors that mean that the memory of a device is exhausted, and others."""

import pytest
import torch

from lightning_retrieval.training.chunk_size import is_out_of_memory, may_be_out_of_memory


@pytest.mark.parametrize(
    ("error", "is_certain", "is_possible"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True, True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), True, True),
        (RuntimeError("CUDA error: out of memory"), True, True),
        (RuntimeError("GET was unable to find an engine to execute this computation"), False, True),
        (RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"), False, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_BAD_PARAM"), False, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False, False),
        (ValueError("CUBLAS_STATUS_ALLOC_FAILED"), False, False),
    ],
)
def test_which_errors_are_about_memory(error, is_certain, is_possible):
    assert is_out_of_memory(error) is is_certain
    assert may_be_out_of_memory(error) is is_possible
