"""Pre-shard diffusers transformers for tensor parallelism: slice once, offline; load one file per rank.

`convert` does the work, `verify`, `merge` and `reshard` take its result; `loader.load_model` runs it. Importing this
package does not import torch.
"""

from ._version import __version__
from .commands.convert import convert
from .commands.merge import merge
from .commands.push import push
from .commands.reshard import reshard
from .commands.verify import verify
from .errors import (
    CheckpointError,
    HubError,
    LoadError,
    OutputError,
    PlanError,
    SetError,
    ShardconvError,
    ShardconvWarning,
    UsageError,
)
from .format.manifest import Manifest

__all__ = [
    "CheckpointError",
    "HubError",
    "LoadError",
    "Manifest",
    "OutputError",
    "PlanError",
    "SetError",
    "ShardconvError",
    "ShardconvWarning",
    "UsageError",
    "__version__",
    "convert",
    "merge",
    "push",
    "reshard",
    "verify",
]
