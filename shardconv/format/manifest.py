"""`shardconv.json`: everything needed to load, check, merge or reshard a set without its source.

A manifest is written last, so its presence means that the set is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from ..errors import SetError
from ..system.jsonfile import parse, read_bounded
from ..system.links import strange_link
from .cut import Cut
from .dtypes import DTYPE_BITS
from .header import is_astronomic
from .layout import FORMAT_VERSION, SetLayout, StoredTensor, plan_layout
from .names import MANIFEST_NAME, REPLICATED_FILE, rank_file_name
from .plan import REPLICATED, Plan, Style, parse_plan, plan_to_json

MAX_SLICES = 500_000  # tensors times ranks; a large model of 2,000 tensors for 64 ranks has 128,000
_SEAL = ',\n"manifest_digest": "'  # what stands between the text and the digest of the text


@dataclass(frozen=True, slots=True)
class SourceFileRecord:
    """A weight file as it was when it was converted."""

    name: str
    nbytes: int
    header_digest: str  # xxh3-128 of everything before the data part, hex
    digest: str  # xxh3-128 over the digests of header and tensors, hex; "" in a dry run
    metadata: Mapping[str, str]  # `__metadata__`


@dataclass(frozen=True, slots=True)
class Source:
    """Where the weights came from."""

    repo: str | None  # Hub repo id; None for a local folder
    revision: str | None  # commit
    subfolder: str | None
    variant: str | None
    files: tuple[SourceFileRecord, ...]

    @property
    def place(self) -> tuple[str | None, ...]:
        """Repo, commit, subfolder and variant."""
        return self.repo, self.revision, self.subfolder, self.variant

    def same_weights(self, other: Source) -> bool:
        """Whether both speak of the same files, wherever they were: names, lengths, headers and, where both sides know
        them already, digests of every byte."""
        return len(self.files) == len(other.files) and all(
            replace(mine, digest="") == replace(theirs, digest="")
            and (mine.digest == theirs.digest or not mine.digest or not theirs.digest)
            for mine, theirs in zip(self.files, other.files, strict=True)
        )


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the set."""

    name: str
    rank: int | None  # None: the file of replicated tensors
    nbytes: int
    header_digest: str  # xxh3-128 of everything before the data part, hex; "" in a dry run


@dataclass(frozen=True, slots=True)
class Manifest:
    """The record of one conversion. `conversion_id` is "" and digests are empty in a dry run."""

    tool_version: str
    conversion_id: str
    source: Source
    model_class: str
    config_digest: str  # xxh3-128 of config.json's keys and values, private ones ("_...") left out, hex
    library_name: str  # of the model's class
    library_version: str
    tp_degree: int
    self_contained: bool
    cast_to: str | None  # a dtype name of the format; None: stored as the source has it
    keep_fp32: tuple[str, ...]  # modules kept in F32 under a cast
    plan: Plan
    head_counts: tuple[int, ...]  # that a tp degree must divide, as it must every block; each once, ascending
    tensors: tuple[StoredTensor, ...]  # in source order
    digests: Mapping[str, tuple[str, ...]]  # tensor -> xxh3-128 of each stored slice (one when whole), hex
    aliases: Mapping[str, str]  # a name that is not stored -> the stored name it is tied to
    left_out: tuple[str, ...]  # source tensors that the model does not have
    files: tuple[FileRecord, ...]

    def layout(self) -> SetLayout:
        """Where every slice stands."""
        return plan_layout(self.tensors, self.tp_degree, self.self_contained)

    def settings(self) -> dict[str, object]:
        """What was asked for, as opposed to what was found; two sets differ on purpose when this differs."""
        return {
            "model_class": self.model_class,
            "config_digest": self.config_digest,
            "tp_degree": self.tp_degree,
            "self_contained": self.self_contained,
            "dtype": {"cast_to": self.cast_to, "keep_fp32": list(self.keep_fp32)},
            "plan": plan_to_json(self.plan),
        }

    def identity(self) -> str:
        """The conversion id: xxh3-128 over settings, source digests and every slice digest. Names of repos and tool
        versions do not enter, so that the same bytes made in two ways have one id."""
        document = {
            "format_version": FORMAT_VERSION,
            **self.settings(),
            "head_counts": list(self.head_counts),
            "source": [[file.name, file.nbytes, file.digest] for file in self.source.files],
            "tensors": [_tensor_to_json(tensor, self.digests[tensor.name]) for tensor in self.tensors],
            "aliases": dict(self.aliases),
            "left_out": list(self.left_out),
        }
        return xxhash.xxh3_128_hexdigest(_compact(document).encode())

    def to_json(self) -> str:
        """The text of `shardconv.json`: one line a tensor, one line a file, always the same for the same record."""
        source = self.source
        head: dict[str, object] = {
            "format_version": FORMAT_VERSION,
            "tool": {"name": "shardconv", "version": self.tool_version},
            "conversion_id": self.conversion_id,
            **self.settings(),
            "head_counts": list(self.head_counts),
            "library": {"name": self.library_name, "version": self.library_version},
            "source": {
                "repo": source.repo, "revision": source.revision, "subfolder": source.subfolder,
                "variant": source.variant,
                "files": [
                    {"name": file.name, "nbytes": file.nbytes, "header_digest": file.header_digest,
                     "digest": file.digest, "metadata": dict(file.metadata)}
                    for file in source.files
                ],
            },
            "aliases": dict(self.aliases),
            "left_out": list(self.left_out),
        }  # fmt: skip
        files = [
            {"name": f.name, "rank": f.rank, "nbytes": f.nbytes, "header_digest": f.header_digest} for f in self.files
        ]
        tensors = [_tensor_to_json(tensor, self.digests.get(tensor.name, ())) for tensor in self.tensors]
        lines = [f'"{key}": {_compact(value)}' for key, value in head.items()]
        lines += [f'"{key}": [\n' + ",\n".join(map(_compact, rows)) + "\n]" for key, rows in
                  (("files", files), ("tensors", tensors))]  # fmt: skip
        body = "{\n" + ",\n".join(lines)
        return f'{body}{_SEAL}{xxhash.xxh3_128_hexdigest(body.encode())}"\n}}\n'

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of the set in `folder`. Raises `SetError` when it is missing, damaged or too new."""
        path = folder / MANIFEST_NAME
        outside = strange_link(path)
        if outside:
            raise SetError(f"{path}: a link that leads out of its folder, to {outside}; put the file itself there")
        try:
            raw = read_bounded(path)
        except FileNotFoundError:
            raise SetError(f"{folder}: no {MANIFEST_NAME}, so not a complete set; convert again") from None
        except OSError as error:
            raise SetError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise SetError(f"{path}: not JSON ({error}); fetch or convert again") from None
        return cls.parse(raw, str(path))

    @classmethod
    def parse(cls, raw: bytes, where: str) -> Manifest:
        """A manifest from the bytes of its file, which `where` names in messages. Raises `SetError` as `read` does."""
        try:
            document = parse(raw)
        except ValueError as error:
            raise SetError(f"{where}: not JSON ({error}); fetch or convert again") from None
        manifest = cls.from_json(document, where)
        body, sealed, _ = raw.rpartition(_SEAL.encode())
        if not sealed or document["manifest_digest"] != xxhash.xxh3_128_hexdigest(body):
            raise SetError(f"{where}: not as it was written, its own digest differs; fetch or convert again")
        return manifest

    @classmethod
    def from_json(cls, document: Any, where: str) -> Manifest:
        """A manifest from parsed JSON; `where` names it in messages. Raises `SetError`."""
        version = document.get("format_version") if isinstance(document, dict) else None
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise SetError(
                f"{where}: format version {version}, this shardconv reads {FORMAT_VERSION}; upgrade shardconv"
            )
        try:
            manifest = _from_json(document)
            consistent = _is_consistent(manifest)
        except RecursionError:
            raise SetError(f"{where}: not a well-formed manifest (nested too deep); fetch or convert again") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SetError(
                f"{where}: not a well-formed manifest ({type(error).__name__}: {error}); fetch or convert again"
            ) from None
        if not consistent:
            raise SetError(f"{where}: contradicts itself, so it was edited or damaged; fetch or convert again")
        return manifest


def _is_consistent(manifest: Manifest) -> bool:
    """Whether files, layout and conversion id bear each other out."""
    found = [(file.name, file.rank, file.nbytes) for file in manifest.files]
    if len(found) not in (manifest.tp_degree, manifest.tp_degree + 1):
        return False
    expected = [(file.name, file.rank, file.nbytes) for file in manifest.layout().files]
    return expected == found and manifest.identity() == manifest.conversion_id


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _tensor_to_json(tensor: StoredTensor, digests: tuple[str, ...]) -> dict[str, object]:
    record: dict[str, object] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "style": tensor.style,
    }
    if tensor.cut is not None:
        record |= {"dim": tensor.cut.dim, "block_sizes": tensor.cut.block_sizes}
    return record | {"digests": digests}


def _expect(value: Any, kind: type | tuple[type, ...]) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ValueError(f"expected {kind}, found {value!r}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a number of bytes or elements, found {value!r}")
    return value


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(_expect(item, str) for item in _expect(value, list))


def _optional_text(value: Any) -> str | None:
    return None if value is None else str(_expect(value, str))


def _string_map(value: Any) -> dict[str, str]:
    return {key: _expect(item, str) for key, item in _expect(value, dict).items()}


def _from_json(document: Any) -> Manifest:
    _expect(document["manifest_digest"], str)  # `read` compares it, as it is of the text
    tp = _count(document["tp_degree"])
    if _expect(document["format_version"], int) != FORMAT_VERSION or not 1 <= tp <= 65536:
        raise ValueError(f"format_version {document['format_version']}, tp_degree {tp}")
    if tp * len(document["tensors"]) > MAX_SLICES:
        raise ValueError(f"{len(document['tensors'])} tensors for {tp} ranks, at most {MAX_SLICES} slices are laid out")
    source, dtype = document["source"], document["dtype"]
    records = [(_tensor_from_json(raw, tp), _strings(raw["digests"])) for raw in _expect(document["tensors"], list)]
    if len({tensor.name for tensor, _ in records}) != len(records):
        raise ValueError("a tensor stands twice")
    if any(len(digests) != (tp if tensor.cut else 1) for tensor, digests in records):
        raise ValueError("expected one digest for each slice")
    return Manifest(
        tool_version=_expect(document["tool"]["version"], str),
        conversion_id=_expect(document["conversion_id"], str),
        source=Source(
            repo=_optional_text(source["repo"]),
            revision=_optional_text(source["revision"]),
            subfolder=_optional_text(source["subfolder"]),
            variant=_optional_text(source["variant"]),
            files=tuple(map(_source_file_from_json, _expect(source["files"], list))),
        ),
        model_class=_expect(document["model_class"], str),
        config_digest=_expect(document["config_digest"], str),
        library_name=_expect(document["library"].get("name", "diffusers"), str),
        library_version=_expect(document["library"]["version"], str),
        tp_degree=tp,
        self_contained=_expect(document["self_contained"], bool),
        cast_to=_optional_text(dtype["cast_to"]),
        keep_fp32=_strings(dtype["keep_fp32"]),
        plan=parse_plan(document["plan"], "plan"),
        head_counts=tuple(map(_count, _expect(document["head_counts"], list))),
        tensors=tuple(tensor for tensor, _ in records),
        digests={tensor.name: digests for tensor, digests in records},
        aliases=_string_map(document["aliases"]),
        left_out=_strings(document["left_out"]),
        files=tuple(_file_from_json(raw, tp) for raw in _expect(document["files"], list)),
    )


def _source_file_from_json(raw: Any) -> SourceFileRecord:
    texts = [_expect(raw[key], str) for key in ("name", "header_digest", "digest")]
    return SourceFileRecord(texts[0], _count(raw["nbytes"]), texts[1], texts[2], _string_map(raw["metadata"]))


def _file_from_json(raw: Any, tp: int) -> FileRecord:
    rank = None if raw["rank"] is None else _count(raw["rank"])
    expected = REPLICATED_FILE if rank is None else rank_file_name(rank, tp)
    if raw["name"] != expected:
        raise ValueError(f"expected the file name {expected}, found {raw['name']!r}")
    return FileRecord(expected, rank, _count(raw["nbytes"]), _expect(raw["header_digest"], str))


def _tensor_from_json(raw: Any, tp: int) -> StoredTensor:
    name, dtype, style = (_expect(raw[key], str) for key in ("name", "dtype", "style"))
    if dtype not in DTYPE_BITS:
        raise ValueError(f"{name}: unknown dtype {dtype!r}")
    shape = tuple(map(_count, _expect(raw["shape"], list)))
    if is_astronomic(shape):
        raise ValueError(f"{name}: a shape of more elements than there can be")
    if style != REPLICATED:
        Style(style)
    if "dim" not in raw:
        return StoredTensor(name, dtype, shape, style, None)
    if DTYPE_BITS[dtype] % 8:
        raise ValueError(f"{name}: cut, though {dtype} has several elements in a byte")
    cut = Cut(_count(raw["dim"]), tuple(map(_count, _expect(raw["block_sizes"], list))))
    if cut.dim >= len(shape) or sum(cut.block_sizes) != shape[cut.dim] or any(size % tp for size in cut.block_sizes):
        raise ValueError(f"{name}: blocks {cut.block_sizes} do not fit dim {cut.dim} of {shape} for tp degree {tp}")
    return StoredTensor(name, dtype, shape, style, cut)
