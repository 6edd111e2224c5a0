"""Reaching the modules behind an embedding function, which may be a module, a method of one or any other function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def visit_modules(embed: Callable[[Tensor], Tensor], visit: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Call `visit` with each module of `embed`.

    If `embed` is a module or a method of one, all its modules are visited at once. The modules of any other function
    are unknown until they run, so each is visited right before its forward pass, by a global hook. A module gets no
    hook, since torch.compile would compile it again each time.

    Args:
        embed: maps inputs to embeddings.
        visit: called with a module, possibly several times with the same one.
    """
    owner = getattr(embed, "__self__", embed)
    if isinstance(owner, nn.Module):
        for module in owner.modules():
            visit(module)
        yield
        return
    hook = register_module_forward_pre_hook(lambda module, args: visit(module))
    try:
        yield
    finally:
        hook.remove()
