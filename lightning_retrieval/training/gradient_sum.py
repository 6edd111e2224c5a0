"""Sums the gradients of all processes once per step, mostly while the last backward pass is still running.

The loss of a step is a sum with one term for each process. The term is the loss of the process's queries against all
rows. If a loss is defined for whole batches only, the term of each process is an equal fraction of that loss. In both
cases, the gradient of a parameter is the sum of the processes' gradients.

Parameters are divided into buckets from the last to the first, which is about the order in which a backward pass
completes their gradients. As soon as all gradients of a bucket are complete, they are moved into one tensor, and
the all-reduce of this tensor runs while the backward pass continues. No tensor ever holds a copy of all gradients. DDP
uses buckets in the same way. Unlike DDP, this code does not search the graph for parameters without a gradient. Losses
may have parameters. Their gradients are computed in the backward pass of the loss, which may come before that of the
network, so they are summed at the end of the step.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from lightning_retrieval.distributed import sum_over_ranks, to_device, to_host, world_size
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.training.full_sharding import ShardedParts, is_sharded

BUCKET_BYTES = 25 * 2**20  # the default of DDP


class GradientSum:
    """Replaces the gradients of one step by their sums over the processes.

    Call `overlapped` around the last backward pass, then `finish`. If no parameter is sharded, `overlapped` is
    optional: the result is the same without it, to the last bit. The buckets depend only on the parameters, so that a
    resumed run sums in the same order.

    Args:
        parameters: parameters whose gradients are summed. Parameters that require no gradient, or that are sharded over
            the processes, are ignored.
        of_loss: parameters of the loss. Their gradients are summed by `finish`.
        sharded: the modules whose parameters are sharded; they sum their gradients themselves, in `overlapped`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        of_loss: Iterable[nn.Parameter] = (),
        sharded: ShardedParts | None = None,
    ) -> None:
        self._sharded = sharded
        self._full: list[_Bucket] = []
        self._rest: dict[torch.dtype, _Bucket] = {}
        self._started = 0  # number of full buckets whose sum has been started
        if world_size() > 1:
            self._divide(list(parameters), set(of_loss))

    def _divide(self, parameters: list[nn.Parameter], of_loss: set[nn.Parameter]) -> None:
        """Put the parameters into buckets of one dtype each."""
        trained = [parameter for parameter in parameters if parameter.requires_grad and not is_sharded(parameter)]
        for parameter in reversed(trained):
            if parameter not in of_loss:
                bucket = self._rest.setdefault(parameter.dtype, _Bucket())
                bucket.add(parameter)
                if bucket.bytes >= BUCKET_BYTES:
                    self._full.append(self._rest.pop(parameter.dtype))
        for parameter in trained:
            if parameter in of_loss:
                self._rest.setdefault(parameter.dtype, _Bucket()).add(parameter)

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Context for the last backward pass: start the sum of each full bucket once its gradients are complete."""
        sharded: AbstractContextManager[None] = nullcontext()
        if self._sharded is not None:
            sharded = self._sharded.summed()
        handles = []
        for bucket in self._full:
            for parameter in bucket.parameters:
                handles.append(parameter.register_post_accumulate_grad_hook(self._marks_complete(bucket)))
        try:
            with sharded:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _marks_complete(self, bucket: "_Bucket") -> Callable[[Tensor], None]:
        """The gradient hook for the parameters of a bucket. All processes start buckets in the same order."""

        def mark_complete(parameter: Tensor) -> None:
            if bucket.is_started:
                raise InvalidValue(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} was computed in two parts, as "
                    "reentrant checkpoints that share a layer do, which cannot be summed over processes",
                    "GradientSum",
                    cure="use torch.utils.checkpoint with use_reentrant=False",
                )
            bucket.incomplete.discard(parameter)
            while self._started < len(self._full) and not self._full[self._started].incomplete:
                self._start_next()

        return mark_complete

    def _start_next(self) -> None:
        self._full[self._started].start()
        self._started += 1

    def finish(self, values: Float[Tensor, " value"]) -> Float[Tensor, " value"]:
        """Replace each `.grad` by its sum over the processes, and return the sum of `values`, on the CPU.

        A process that has no gradient for a parameter adds zero. If no process has a gradient for a parameter, the
        parameter's `.grad` is None afterwards.

        Args:
            values: values of this process.
        """
        if world_size() == 1:
            return to_host(values)
        buckets = [*self._full, *self._rest.values()]
        has_gradient = [parameter.grad is not None for bucket in buckets for parameter in bucket.parameters]
        for bucket in buckets[self._started :]:
            bucket.start()
        flags = to_device(has_gradient, values.device).to(values.dtype)
        sums = to_host(sum_over_ranks(torch.cat([flags, values])))
        ranks_with_gradient = iter(sums[: len(flags)].tolist())
        for bucket in buckets:
            bucket.finish([next(ranks_with_gradient) > 0 for _ in bucket.parameters])
        return sums[len(flags) :]


class _Bucket:
    """A set of parameters of one dtype. One all-reduce sums all their gradients."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.bytes = 0
        self.incomplete: set[Tensor] = set()  # parameters whose gradient the last backward pass has not completed yet
        self._flat: Tensor | None = None  # kept, or the collective's thread may delete it while Python exits
        self._gradients: list[Tensor] = []  # views of the tensor that is summed, of the shapes of the parameters
        self._work: Any = None

    def add(self, parameter: nn.Parameter) -> None:
        """Add a parameter."""
        self.parameters.append(parameter)
        self.incomplete.add(parameter)
        self.bytes += parameter.nbytes

    @property
    def is_started(self) -> bool:
        """Whether the gradients are being summed."""
        return self._work is not None

    def start(self) -> None:
        """Move the gradients into one tensor, and start its all-reduce."""
        parts = []
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            parts.append(gradient.detach().permute(_memory_order(parameter)).flatten())
        self._flat = torch.cat(parts)
        sizes = [parameter.numel() for parameter in self.parameters]
        self._gradients = list(map(_like, self.parameters, self._flat.split(sizes)))
        for parameter, gradient in zip(self.parameters, self._gradients):
            if parameter.grad is not None:
                parameter.grad = gradient  # frees the memory of the original gradient
        self._work = dist.all_reduce(self._flat, async_op=True)

    def finish(self, exist: Iterable[bool]) -> None:
        """Wait for the sums, and set the gradient of each parameter for which some process has one."""
        self._work.wait()
        for parameter, gradient, exists in zip(self.parameters, self._gradients, exist, strict=True):
            parameter.grad = gradient if exists else None


def _memory_order(parameter: nn.Parameter) -> list[int]:
    """The dimensions of a parameter in the order of its memory, such as that of `torch.channels_last`."""
    return sorted(range(parameter.ndim), key=parameter.stride, reverse=True)


def _like(parameter: nn.Parameter, flat: Float[Tensor, " element"]) -> Tensor:
    """A view of the shape of a parameter, with its order of memory: an optimizer is slower if the orders differ."""
    order = _memory_order(parameter)
    view = flat.view([parameter.shape[dimension] for dimension in order])
    return view.permute([order.index(dimension) for dimension in range(parameter.ndim)])
