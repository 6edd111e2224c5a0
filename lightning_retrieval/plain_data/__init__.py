"""Objects as plain data and back, for checkpoints, logs and hubs.

As in config files of LightningCLI, an object is described by its class path and its constructor arguments:
`{"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}`. `describe.py` writes such descriptions, and `rebuild.py`
rebuilds the objects. Descriptions in a file are data: a file may not choose what is imported or called. Only `rules.py`
decides which classes and settings a file may name.
"""

from lightning_retrieval.plain_data.describe import class_path as class_path
from lightning_retrieval.plain_data.describe import describe as describe
from lightning_retrieval.plain_data.describe import is_variadic as is_variadic
from lightning_retrieval.plain_data.describe import logged_settings as logged_settings
from lightning_retrieval.plain_data.describe import unsharded_class as unsharded_class
from lightning_retrieval.plain_data.describe import without_sources as without_sources
from lightning_retrieval.plain_data.formats import FORMAT as FORMAT
from lightning_retrieval.plain_data.formats import FORMAT_KEY as FORMAT_KEY
from lightning_retrieval.plain_data.formats import check_format as check_format
from lightning_retrieval.plain_data.rebuild import KWARGS as KWARGS
from lightning_retrieval.plain_data.rebuild import arguments_of_file as arguments_of_file
from lightning_retrieval.plain_data.rebuild import built as built
from lightning_retrieval.plain_data.rebuild import rebuild as rebuild
from lightning_retrieval.plain_data.rebuild import rebuild_factory as rebuild_factory
from lightning_retrieval.plain_data.rules import IN_PYTHON as IN_PYTHON
from lightning_retrieval.plain_data.rules import INSTALLED as INSTALLED
from lightning_retrieval.plain_data.rules import add_named_packages as add_named_packages
from lightning_retrieval.plain_data.rules import check_plain_data as check_plain_data
from lightning_retrieval.plain_data.rules import import_named_module as import_named_module
from lightning_retrieval.plain_data.rules import load_function as load_function
from lightning_retrieval.plain_data.rules import named_by_user as named_by_user
from lightning_retrieval.plain_data.rules import named_values as named_values
from lightning_retrieval.plain_data.rules import names_kernels as names_kernels
