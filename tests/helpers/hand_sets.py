"""Sets of arbitrary tensors, made of the converter's parts without a model, for round trips."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from handmade import write_source
from hypothesis import strategies as st

from shardconv import Manifest, __version__
from shardconv.commands.prepare import plan_conversion
from shardconv.engine import run as engine
from shardconv.engine.slices import write_headers
from shardconv.format.config import config_digest
from shardconv.format.cut import Cut
from shardconv.format.dtypes import DTYPE_BITS, nbytes_of
from shardconv.format.header import FileHeader
from shardconv.format.layout import plan_layout, stored_tensors
from shardconv.format.manifest import Source, SourceFileRecord
from shardconv.format.names import MANIFEST_NAME
from shardconv.format.plan import Rule, Style
from shardconv.source.checkpoint import SourceFile, SourceTensor

CONFIG = {"_class_name": "HandmadeTransformer"}
RawTensor = tuple[str, str, tuple[int, ...], bytes]  # name, dtype, shape, data


@dataclass(frozen=True)
class HandSource:
    """Tensors, by file, and how they are to be cut."""

    files: Sequence[Sequence[RawTensor]]
    cuts: Mapping[str, Cut]

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
        """What `toys.read_weights` gives of all files."""
        return {name: (dtype, shape, data) for file in self.files for name, dtype, shape, data in file}


@st.composite
def sources(draw: st.DrawFn, unit: int) -> HandSource:
    """A few tensors of any dtype of 1 to 8 bytes in 1 to 3 files; blocks are multiples of `unit`."""
    files: list[list[RawTensor]] = []
    cuts: dict[str, Cut] = {}
    dtypes = sorted(dtype for dtype, bits in DTYPE_BITS.items() if bits % 8 == 0)
    for _ in range(draw(st.integers(1, 3))):
        files.append([])
        for _ in range(draw(st.integers(1, 3))):
            name = f"blocks.{sum(map(len, files))}.weight"
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            if shape and draw(st.booleans()):
                dim = draw(st.integers(0, min(1, len(shape) - 1)))
                parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
                cuts[name] = Cut(dim, tuple(unit * part for part in parts))
                shape[dim] = unit * sum(parts)
            dtype = draw(st.sampled_from(dtypes))
            data = draw(st.randoms(use_true_random=False)).randbytes(nbytes_of(dtype, shape))
            files[-1].append((name, dtype, tuple(shape), data))
    return HandSource(files, cuts)


def convert(source: HandSource, out: Path, tp: int, self_contained: bool = False) -> Path:
    """Write `source` beside `out` and its set for `tp` ranks into `out`; returns the set's folder."""
    held: dict[str, SourceTensor] = {}
    records = []
    for position, tensors in enumerate(source.files):
        path = out.parent / f"{out.name}-source-{position}.safetensors"
        write_source(path, tensors)
        file = SourceFile(f"source-{position}.safetensors", path, FileHeader.read(path))
        held |= {entry.name: SourceTensor(entry, file) for entry in file.header.tensors}
        records.append(SourceFileRecord(file.name, file.header.file_nbytes, file.header.digest, "5" * 32, {}))
    styles = (Style.PACKED_COLWISE, Style.PACKED_ROWWISE)
    cuts = {name: (styles[cut.dim], cut) for name, cut in source.cuts.items()}
    layout = plan_layout(
        stored := stored_tensors([each.entry for each in held.values()], cuts, None, ()), tp, self_contained
    )
    folder = out / f"tp{tp}"
    folder.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(CONFIG))
    fds = [os.open(folder / file.name, os.O_RDWR | os.O_CREAT, 0o644) for file in layout.files]
    digests = engine.run(plan_conversion(layout, held), fds, lambda nbytes: None)
    manifest = Manifest(
        tool_version=__version__, conversion_id="", model_class=CONFIG["_class_name"], library_name="diffusers",
        library_version="0.42.1",
        config_digest=config_digest(CONFIG), source=Source("org/name", "c0ffee", None, None, tuple(records)),
        tp_degree=tp, self_contained=self_contained, cast_to=None, keep_fp32=(), plan={"a": Rule(Style.ROWWISE)},
        head_counts=(), tensors=tuple(stored), digests={name: each.slices for name, each in digests.items()},
        aliases={}, left_out=(), files=(),
    )  # fmt: skip
    manifest = write_headers(manifest, layout, fds)
    for fd in fds:
        os.close(fd)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return folder
