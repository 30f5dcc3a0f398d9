"""megatron-core's indexed dataset, without the rest of its package.

`import megatron.core` loads its whole training stack, which takes many seconds; the data modules need none of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any


def indexed_dataset() -> Any:
    """The module `megatron.core.datasets.indexed_dataset`."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for name in ("megatron.core", "megatron.core.datasets"):
        if name not in sys.modules:
            package = types.ModuleType(name)
            inner = name.split(".")[1:]
            package.__path__ = ["/".join([root, *inner]) for root in spec.submodule_search_locations]
            sys.modules[name] = package
    importlib.import_module("megatron.core.parallel_state")  # which megatron.core.utils imports in a circle
    return importlib.import_module("megatron.core.datasets.indexed_dataset")
