"""What is fuzzed: a reader of ours, sound folders to start from, and what must hold whatever the folder holds.

A target returns what happened in a word or two; a finding is an exception that is not of our tree, or a `Finding`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash
from mutation import Case
from safetensors import SafetensorError, safe_open

from shardconv.commands.merge import merge
from shardconv.errors import ShardconvError
from shardconv.format.config import config_digest
from shardconv.format.cut import Cut
from shardconv.format.header import FileHeader
from shardconv.format.layout import StoredTensor, file_header
from shardconv.format.manifest import FileRecord, Manifest, Source, SourceFileRecord, _from_json
from shardconv.format.pipeline import pipeline_components
from shardconv.format.plan import REPLICATED, Rule, Style, read_plan_file
from shardconv.format.sets import open_files
from shardconv.source.checkpoint import open_checkpoint
from shardconv.system.jsonfile import parse

MAX_ISSUE_LENGTH = 2000  # characters of one fault; a message must not repeat a megabyte of input
STEM = "diffusion_pytorch_model"
MANIFEST = "shardconv.json"
MODEL_INDEX = "model_index.json"
CONFIG = b'{"_class_name": "ToyTransformer", "_diffusers_version": "0.42.1", "num_layers": 2}'
TP = 2


class Finding(Exception):
    """What must not be."""


# --- sound inputs


def _weights(tensors: Sequence[tuple[str, str, list[int], int]], metadata: object = None) -> bytes:
    """A safetensors file of (name, dtype, shape, nbytes), written by nothing of ours."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    position = 0
    for name, dtype, shape, nbytes in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(position)


ODD = _weights(
    [("u", "U8", [3], 3), ("w", "BF16", [2, 4], 16), ("s", "F32", [], 4), ("z", "F16", [0, 8], 0), ("q", "F4", [6], 3),
     ("p", "F6_E2M3", [4], 3), ("c", "C64", [1], 8)], {"format": "pt", "modelspec.x": "ÿ"},
)  # fmt: skip
FIRST = _weights([("blocks.0.q.weight", "BF16", [4, 4], 32), ("blocks.0.q.bias", "BF16", [4], 8)], {"format": "pt"})
SECOND = _weights([("blocks.1.q.weight", "F32", [2, 2], 16), ("norm.weight", "F32", [2], 8)], {"format": "pt"})


def _checkpoint_cases() -> list[Case]:
    files = [f"{STEM}-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    listed = {
        "blocks.0.q.weight": files[0],
        "blocks.0.q.bias": files[0],
        "blocks.1.q.weight": files[1],
        "norm.weight": files[1],
    }
    index = json.dumps({"metadata": {"total_size": 64}, "weight_map": listed}).encode()
    shards = dict(zip(files, (FIRST, SECOND), strict=True))
    return [
        {"config.json": CONFIG, f"{STEM}.safetensors.index.json": index, **shards},
        {"config.json": CONFIG, f"{STEM}.safetensors": FIRST, f"{STEM}.fp16.safetensors": SECOND},
        {"config.json": CONFIG, f"{STEM}.safetensors.index.fp16.json": index, **shards},
    ]


def _manifest(self_contained: bool) -> Manifest:
    tensors = (
        StoredTensor("proj.weight", "BF16", (8, 4), "packed_colwise", Cut(0, (4, 4))),
        StoredTensor("out.weight", "BF16", (4, 8), "rowwise", Cut(1, (8,))),
        StoredTensor("out.bias", "F8_E8M0", (4,), "rowwise", None),
        StoredTensor("norm.weight", "F32", (), REPLICATED, None),
    )
    source = SourceFileRecord("a.safetensors", 4000, "1" * 32, "2" * 32, {"format": "pt"})
    return Manifest(
        tool_version="0.1.0", conversion_id="", source=Source("org/name", "c0ffee", None, "fp16", (source,)),
        model_class="ToyTransformer", config_digest="0" * 32, tp_degree=TP,
        library_name="diffusers", library_version="0.42.1",
        self_contained=self_contained, cast_to="BF16", keep_fp32=("norm",),
        plan={"proj": Rule(Style.PACKED_COLWISE, (1, 1)), "out": Rule(Style.ROWWISE)}, head_counts=(TP,),
        tensors=tensors, digests={}, aliases={"tied.weight": "norm.weight"}, left_out=("ema.weight",), files=(),
    )  # fmt: skip


def seal(manifest: Manifest) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest made true: digests of zeros, its own id, and the files that bear it out."""
    layout = manifest.layout()
    parts = {tensor.name: (tensor.slice_nbytes(manifest.tp_degree), tensor.cut) for tensor in manifest.tensors}
    digests = {
        name: (xxhash.xxh3_128_hexdigest(bytes(nbytes)),) * (manifest.tp_degree if cut else 1)
        for name, (nbytes, cut) in parts.items()
    }
    manifest = replace(manifest, digests=digests)
    manifest = replace(manifest, conversion_id=manifest.identity())
    headers = {file.name: file_header(file, manifest.conversion_id, manifest.tp_degree) for file in layout.files}
    records = [
        FileRecord(file.name, file.rank, file.nbytes, xxhash.xxh3_128_hexdigest(headers[file.name]))
        for file in layout.files
    ]
    files = {file.name: headers[file.name] + bytes(file.nbytes - len(headers[file.name])) for file in layout.files}
    return replace(manifest, files=tuple(records)), files


def _set_cases() -> list[Case]:
    cases = []
    for self_contained in (False, True):
        manifest, files = seal(_manifest(self_contained))
        cases.append({MANIFEST: manifest.to_json().encode(), **files})
    return cases


# --- what must hold


def check_error(error: ShardconvError) -> str:
    """Every fault is a line of ordinary length that any terminal and any file can take, and survives a pickle."""
    if not error.issues:
        raise Finding("an error without a fault")
    for issue in error.issues:
        if not issue.isprintable():
            raise Finding(f"a fault that is no line of text: {issue!r}"[:MAX_ISSUE_LENGTH])
        if len(issue) > MAX_ISSUE_LENGTH:
            raise Finding(f"a fault of {len(issue)} characters: {issue[:200]}")
    str(error).encode("utf-8")
    if pickle.loads(pickle.dumps(error)).issues != error.issues:
        raise Finding("an error that a pickle changes")
    return type(error).__name__


# Where we and the safetensors library (0.8.0) differ about a header, on purpose: our words -> why.
STRICTER = {
    "stands twice": "two tensors, or two metadata keys, of one name: the library takes the last",
    "does not have exactly dtype, shape and data_offsets": "unknown fields, or a list for an object; of no writer",
    "nested too deep": "an unknown field again, of 64 to 127 levels",
    "has the shape": "a size of 2**63 or more beside a 0; torch cannot hold it",
    "more elements than there can be": "sizes that overflow 63 bits beside a 0 that stands before them",
}
LOOSER = {"-0": "a minus before a zero count: JSON's integer, Rust's float"}


def header(folder: Path) -> str:
    """`FileHeader.read`, against the library's parser."""
    path = folder / "model.safetensors"
    try:
        ours = FileHeader.read(path)
    except ShardconvError as error:
        said = check_error(error)
        if _library_reads(path) and not any(words in str(error) for words in STRICTER):
            raise Finding(f"the library reads what we refuse: {error}") from None
        return said
    if not _library_reads(path):
        if b"-0" in path.read_bytes():
            return "read, a minus zero"
        raise Finding("we read what the library refuses")
    with safe_open(path, "np") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        theirs = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
        if theirs != {each.name: (each.dtype, each.shape) for each in ours.tensors}:
            raise Finding(f"tensors differ: {theirs} and {ours.tensors}")
        if (file.metadata() or {}) != ours.metadata:
            raise Finding(f"metadata differs: {file.metadata()} and {ours.metadata}")
    return "read"


def _library_reads(path: Path) -> bool:
    try:
        with safe_open(path, "np"):
            return True
    except SafetensorError:
        return False


def checkpoint(folder: Path) -> str:
    """`open_checkpoint`: config, index, source selection, headers."""
    for variant in (None, "fp16"):
        try:
            opened = open_checkpoint(folder, variant)
        except ShardconvError as error:
            said = check_error(error)
        else:
            said = "read"
            if any(file.path.resolve().parent != folder.resolve() for file in opened.files):
                raise Finding("a file from elsewhere")
            for tensor in opened.tensors.values():
                if (
                    tensor.file.header.data_start + tensor.entry.start + tensor.entry.nbytes
                    > tensor.file.path.stat().st_size
                ):
                    raise Finding("a tensor beyond its file")
    return said


def converted(folder: Path) -> str:
    """`Manifest.read` and `open_files` for all ranks."""
    try:
        manifest = Manifest.read(folder)
    except ShardconvError as error:
        return check_error(error)
    if Manifest.from_json(json.loads(manifest.to_json()), "again") != manifest:
        raise Finding("a manifest that does not read back what it wrote")
    try:
        files = open_files(folder, manifest, range(manifest.tp_degree))
    except ShardconvError as error:
        return f"manifest read, {check_error(error)}"
    if any(each.path.parent != folder for each in files):
        raise Finding("a file from elsewhere")
    return "read"


def forged(folder: Path) -> str:
    """A manifest that lies well: changed, then its id, digests and rank files made to agree. Opened and merged."""
    try:
        document = parse((folder / MANIFEST).read_bytes())
        manifest = _from_json(document)
        layout = manifest.layout()
        if layout.nbytes > 1 << 22 or len(layout.files) > 40:
            return "too large to forge"
        manifest, files = seal(replace(manifest, config_digest=config_digest(json.loads(CONFIG))))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
        return "nothing to forge"
    component = folder / "component"
    target = component / f"tp{manifest.tp_degree}"
    target.mkdir(parents=True)
    for name, data in {**files, MANIFEST: manifest.to_json().encode()}.items():
        (target / name).write_bytes(data)
    (component / "config.json").write_bytes(CONFIG)
    try:
        opened = Manifest.read(target)
        open_files(target, opened, range(opened.tp_degree))
        merge(target, folder / "out")
    except ShardconvError as error:
        return check_error(error)
    open_checkpoint(folder / "out")
    return "merged"


def plan(folder: Path) -> str:
    """`read_plan_file`."""
    try:
        read_plan_file(folder / "plan.json")
    except ShardconvError as error:
        return check_error(error)
    return "read"


def pipeline(folder: Path) -> str:
    """`pipeline_components`."""
    try:
        found = pipeline_components(folder)
    except ShardconvError as error:
        return check_error(error)
    if any("/" in name or name in ("", ".", "..") for name in found):
        raise Finding(f"a component that is no folder name: {sorted(found)}")
    return "read"


@dataclass(frozen=True, slots=True)
class Target:
    """A reader and where its fuzzing starts."""

    run: Callable[[Path], str]
    seeds: Sequence[Case]
    allowance: int = 8 << 20  # bytes it may allocate whatever it is given


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


_COMPONENTS = {
    "_class_name": "FluxPipeline",
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "vae": [None, None],
}
_PLAN = {"a.*.b": "colwise", "c": {"style": "packed_rowwise", "blocks": [1, 3]}, "d": "rowwise_rep"}
TARGETS: dict[str, Target] = {
    "header": Target(header, [{"model.safetensors": ODD}, {"model.safetensors": FIRST}]),
    "checkpoint": Target(checkpoint, _checkpoint_cases()),
    "set": Target(converted, _set_cases()),
    "forged": Target(forged, [{MANIFEST: case[MANIFEST]} for case in _set_cases()], 64 << 20),  # buffers
    "plan": Target(plan, [{"plan.json": _json(_PLAN)}]),
    "pipeline": Target(pipeline, [{MODEL_INDEX: _json(_COMPONENTS)}]),
}
