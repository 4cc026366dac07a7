"""Pre-shard diffusers transformers for tensor parallelism: slice once, offline; load one file per rank.

`convert` does the work, `verify`, `merge` and `reshard` take its result; `loader.load_model` runs it. Importing this
package does not import torch.
"""

from ._version import __version__
from .conversion import convert
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
from .merging import merge
from .pushing import push
from .resharding import reshard
from .verifying import verify

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
