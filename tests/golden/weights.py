"""The sources of the golden sets: weights by a formula, so that they need not be kept, and are the same everywhere."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent


def write_source(model: str, folder: Path) -> Path:
    """The component folder that the golden sets of `model` were converted from: `config.json` and one weight file,
    whose bfloat16 values follow from each tensor's name."""
    folder.mkdir(parents=True)
    shutil.copyfile(GOLDEN / model / "config.json", folder / "config.json")
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in json.loads((GOLDEN / model / "shapes.json").read_text()).items():
        raw = _bfloat16(name, int(np.prod(shape)))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "diffusion_pytorch_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def _bfloat16(name: str, num: int) -> bytes:
    """`num` values in (-1, 1), no two neighbours alike: the upper half of each float32."""
    mixed = (np.arange(num, dtype=np.uint64) * 2654435761 + zlib.crc32(name.encode())) % 4093
    values = (mixed.astype(np.float32) - 2046.0) / 2048.0
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
