"""Saves seconds where the tests import libraries, and milliseconds with each Trainer. To be imported before the others.

Garbage collections take about a quarter of the time of imports: whoever imports this enables them afterwards. And
Lightning reads the metadata of all installed packages for each Trainer, which takes longer than all the rest of it.
"""

import functools
import gc
import importlib.metadata

gc.disable()
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
