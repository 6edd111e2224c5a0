"""Objects as plain data and back, for checkpoints, transforms, logs and hubs.

An object is described as in the config files of LightningCLI, by its class path and its constructor arguments:
`{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}`. `describe.py` writes such descriptions, and `rebuild.py`
makes the objects again. Descriptions in a file are data: a file may not choose what is imported or called, and
`rules.py` alone decides which classes and settings it may name.
"""

from lightning_retrieval.plain_data.describe import (
    class_path,
    constructor_parameters,
    describe,
    is_variadic,
    logged_settings,
    unsharded_class,
    without_sources,
)
from lightning_retrieval.plain_data.rebuild import (
    check_settings,
    rebuild,
    rebuild_factory,
    rebuild_optional,
)
from lightning_retrieval.plain_data.rules import (
    TRANSFORM_PACKAGES,
    check_plain_data,
    find_class,
    import_named_module,
    is_below,
    load_function,
    named_by_user,
    names_kernels,
)

__all__ = [
    "TRANSFORM_PACKAGES",
    "check_plain_data",
    "check_settings",
    "class_path",
    "constructor_parameters",
    "describe",
    "find_class",
    "import_named_module",
    "is_below",
    "is_variadic",
    "load_function",
    "logged_settings",
    "named_by_user",
    "names_kernels",
    "rebuild",
    "rebuild_factory",
    "rebuild_optional",
    "unsharded_class",
    "without_sources",
]
