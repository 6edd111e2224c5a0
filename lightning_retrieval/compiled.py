"""Networks that `torch.compile` has wrapped: they stay compiled, but keep their class and the names of their weights.

`torch.compile(network)` returns a wrapper of another class, whose weights have `_orig_mod.` in their names, while
`network.compile()` compiles the calls of the network itself. Wrappers are replaced by networks compiled in the second
way, so that classes, files and messages do not depend on how a network was compiled.
"""

from collections.abc import Callable, Iterator, MutableMapping
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


def is_compiled(embed: Any) -> bool:
    """Whether `torch.compile` has compiled a module, the module of a method, or a part of it; False for a function."""
    network = getattr(embed, "__self__", embed)
    if not isinstance(network, nn.Module):
        return False
    return any(part._compiled_call_impl is not None or _is_wrapper(part) for part in network.modules())


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


def rename_plainly(state: MutableMapping[str, Any]) -> None:
    """Remove the parts that `torch.compile` adds from names in a state, which is changed in place."""
    for name in [name for name in state if PREFIX in name]:
        state[plain_name(name)] = state.pop(name)


def plain_state(state: Any) -> Any:
    """A copy of a state dict with plain names, and with the versions of modules; another object as it is."""
    if not isinstance(state, MutableMapping) or not any(PREFIX in str(name) for name in state):
        return state
    renamed: Any = type(state)(state)  # type: ignore[call-arg]
    rename_plainly(renamed)
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed._metadata = versions
    return renamed


def keep_plain_names(network: nn.Module) -> None:
    """Let the state dict of a network have plain names, and let it load files of compiled networks.

    Args:
        network: the network, whose parts may be compiled at any time.
    """
    network.register_state_dict_pre_hook(_before_saving)
    network.register_load_state_dict_pre_hook(_before_loading)


def _before_saving(network: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    without_wrappers(network)


def _before_loading(network: nn.Module, state: MutableMapping[str, Any], *_: Any) -> None:
    without_wrappers(network)
    rename_plainly(state)
