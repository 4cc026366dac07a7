"""`python -m loader.prefetch PATH -- SCRIPT [ARGS ...]`: prefetch PATH and run the script as if started itself."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

from .files.readahead import prefetch

USAGE = """usage: python -m loader.prefetch PATH -- SCRIPT [ARGS ...]
example: torchrun --nproc-per-node 4 -m loader.prefetch out -- serve.py"""


class _Callable(ModuleType):
    """Importing this module puts it in the place of the function `loader.prefetch`; so it can be called as well."""

    __call__ = staticmethod(prefetch)


sys.modules[__name__].__class__ = _Callable


def main(argv: list[str]) -> None:
    """Prefetch and run."""
    if len(argv) < 3 or argv[1] != "--":
        sys.exit(USAGE)
    prefetch(argv[0])
    sys.argv = argv[2:]
    sys.path[0] = str(Path(argv[2]).resolve().parent)
    runpy.run_path(argv[2], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
