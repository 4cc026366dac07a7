"""Pre-shard diffusers transformers for tensor parallelism: slice once, offline; load one file per rank.

`convert` does the work, `verify`, `merge` and `reshard` take its result; `loader.load_model` runs it. Importing this
package imports nothing else: each name is found when it is asked for, and none of them needs torch to be imported.
"""

from __future__ import annotations

from ._version import __version__ as __version__

TYPE_CHECKING = False  # `typing`'s own takes longer to import than all that stands here
if TYPE_CHECKING:
    from typing import Any

    from .commands.convert import convert as convert
    from .commands.merge import merge as merge
    from .commands.push import push as push
    from .commands.reshard import reshard as reshard
    from .commands.verify import verify as verify
    from .errors import CheckpointError as CheckpointError
    from .errors import HubError as HubError
    from .errors import LoadError as LoadError
    from .errors import OutputError as OutputError
    from .errors import PlanError as PlanError
    from .errors import SetError as SetError
    from .errors import ShardconvError as ShardconvError
    from .errors import ShardconvWarning as ShardconvWarning
    from .errors import UsageError as UsageError
    from .format.manifest import Manifest as Manifest

_HOME = {
    "CheckpointError": "errors",
    "HubError": "errors",
    "LoadError": "errors",
    "Manifest": "format.manifest",
    "OutputError": "errors",
    "PlanError": "errors",
    "SetError": "errors",
    "ShardconvError": "errors",
    "ShardconvWarning": "errors",
    "UsageError": "errors",
    "convert": "commands.convert",
    "merge": "commands.merge",
    "push": "commands.push",
    "reshard": "commands.reshard",
    "verify": "commands.verify",
}
__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'shardconv' has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = found  # asked for once
    return found


def __dir__() -> list[str]:
    return __all__
