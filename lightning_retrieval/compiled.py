"""Networks that `torch.compile` has wrapped: they stay compiled, but keep their class and the names of their weights.

`torch.compile(network)` returns a wrapper of another class, whose weights have `_orig_mod.` in their names, while
`network.compile()` compiles the calls of the network itself. Wrappers are replaced by networks compiled in the second
way, so that classes, files and messages do not depend on how a network was compiled: in constructors, when a run
begins, and before a network is described or saved. Names in a file of a wrapper become plain when the file is read.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

WRAPPED = "_orig_mod"  # name of the network in its wrapper
PREFIX = f"{WRAPPED}."


def without_wrappers(network: Any) -> Any:
    """A network without wrappers of `torch.compile`, neither around it nor around its parts; all stay compiled.

    Args:
        network: any network, whose parts are changed in place. Another object is returned as it is.
    """
    if not isinstance(network, nn.Module):
        return network
    while _is_wrapper(network):
        network = _compiled_in_place(network)
    for part in list(network.modules()):
        for name, child in part._modules.items():
            if child is not None and _is_wrapper(child):
                part._modules[name] = without_wrappers(child)
    return network


def _is_wrapper(network: nn.Module) -> bool:
    # Its class is not imported, since that takes seconds without need if nothing is compiled.
    return WRAPPED in network._modules and hasattr(network, "dynamo_ctx")


def _compiled_in_place(wrapper: Any) -> nn.Module:
    """The network in a wrapper, whose calls are compiled as those of the wrapper were."""
    network: nn.Module = wrapper._modules[WRAPPED]
    compile_calls(network, wrapper.dynamo_ctx)
    return network


def compile_calls(network: nn.Module, compiler: Callable[[Any], Any]) -> None:
    """Compile the calls of a network, as `network.compile()` does.

    Args:
        network: any network.
        compiler: what `torch.compile` has stored as `dynamo_ctx`: it compiles a function.
    """
    network._compiled_call_impl = compiler(network._call_impl)


@contextmanager
def uncompiled(network: nn.Module) -> Iterator[None]:
    """Context in which a network and its parts run without being compiled, for what runs only once."""
    compiled = {}
    for part in network.modules():
        if part._compiled_call_impl is not None:
            compiled[part] = part._compiled_call_impl
            part._compiled_call_impl = None
    try:
        yield
    finally:
        for part, call in compiled.items():
            part._compiled_call_impl = call


def plain_name(name: str) -> str:
    """The name of a weight without the parts that `torch.compile` adds."""
    return name.replace(PREFIX, "")


def plain_state(state: Any) -> Any:
    """A copy of a state dict with plain names, and with the versions of modules."""
    renamed = copy.copy(state)  # copies also `_metadata`, the attribute with the versions
    for name in state:
        renamed[plain_name(name)] = renamed.pop(name)
    return renamed
