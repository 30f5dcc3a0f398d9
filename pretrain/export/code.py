"""The source files that an exported folder runs: copies of this project's, importing each other relatively.

`transformers` copies the Python files of a folder into one flat package of its own, so that only `from .module import`
works between them. Modules of the network and of `pretrain.export.remote` therefore go side by side; their names
differ.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {"deeploop_model": "deeploop_model", "pretrain.export.remote": "pretrain/export/remote"}
_IMPORT = re.compile(rf"^(\s*from )(?:{'|'.join(map(re.escape, PACKAGES))})(\.\w+ import )", re.MULTILINE)


def source_files(*entries: str) -> dict[str, str]:
    """File name -> content, of the modules with these dotted names and of all that they import from the project."""
    files: dict[str, str] = {}
    waiting = list(entries)
    while waiting:
        package, _, name = waiting.pop().rpartition(".")
        if f"{name}.py" in files:
            continue
        source = (REPOSITORY / PACKAGES[package] / f"{name}.py").read_text(encoding="utf-8")
        waiting += own_imports(source)
        files[f"{name}.py"] = _IMPORT.sub(r"\1\2", source)
    return files


def own_imports(source: str) -> list[str]:
    """Dotted names of the modules in `PACKAGES` that a source file imports, for type checking too."""
    found = [node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    return [module for module in found if module.rpartition(".")[0] in PACKAGES]
