"""`shardconv inspect`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from ..commands.inspect import Held, Inspected, inspect
from ..errors import OutputError
from ..format.manifest import Manifest
from ..format.plan import plan_to_json
from ..format.summary import human, summarize
from .output import report, report_json
from .report import figures, table
from .svg import Chart, Row, draw

NAME = "inspect"
HELP = "say what a file, a set or an output folder is"
DESCRIPTION = """Say what stands at PATH: model class, source, degree, dtype, plan, bytes by style and rank. PATH is a
safetensors file, a set (tpN), a component folder or an output folder. Reads manifests and headers only."""
EXAMPLE = """example:
  $ shardconv inspect out/
  $ shardconv inspect --tensors out/transformer/tp4/rank-00000-of-00004.safetensors
  $ shardconv inspect --svg tp4.svg out/transformer/tp4     # one bar a rank, coloured by style
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this verb."""
    add = parser.add_argument
    add("path", metavar="PATH", help="safetensors file, set, component folder or output folder")
    add("--tensors", action="store_true", help="list every tensor")
    add("--json", action="store_true", help="print one JSON document instead of text")
    add("--svg", metavar="FILE", help="draw it into this file")


def run(args: argparse.Namespace) -> None:
    """Inspect, then draw and print."""
    found = inspect(args.path)
    if args.svg:
        try:
            Path(args.svg).write_text(draw(list(map(_chart, found))), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{args.svg}: cannot be written ({error.strerror}); name another file") from None
    if args.json:
        report_json([_as_json(each, args.tensors) for each in found])
    else:
        report("\n\n".join("\n".join(_as_text(each, args.tensors)) for each in found))


def _as_json(found: Inspected, tensors: bool) -> dict[str, object]:
    document: dict[str, object] = {"path": str(found.path), "kind": "file" if found.header else "set"}
    manifest = found.manifest
    if manifest:
        source = manifest.source
        document |= figures(manifest)
        document |= {
            "tool_version": manifest.tool_version,
            "library_version": manifest.library_version,
            "keep_fp32": list(manifest.keep_fp32),
            "source": {
                "repo": source.repo,
                "revision": source.revision,
                "subfolder": source.subfolder,
                "variant": source.variant,
                "files": {file.name: file.nbytes for file in source.files},
            },
            "plan": plan_to_json(manifest.plan),
            "missing": list(found.missing),
        }
    if found.header:
        document["file"] = {
            "nbytes": found.header.file_nbytes,
            "data_start": found.header.data_start,
            "metadata": dict(found.header.metadata),
            "about": dict(found.about),
            "tensors": len(found.tensors),
            "styles": found.style_nbytes(),
        }
    if tensors:
        document["tensors"] = [_tensor_json(tensor) for tensor in found.tensors]
    return document


def _tensor_json(tensor: Held) -> dict[str, object]:
    record: dict[str, object] = {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "style": tensor.style,
        "nbytes": tensor.nbytes,
        "rank_nbytes": tensor.rank_nbytes,
    }
    return record | ({"dim": tensor.cut.dim, "block_sizes": list(tensor.cut.block_sizes)} if tensor.cut else {})


def _as_text(found: Inspected, tensors: bool) -> Iterator[str]:
    manifest = found.manifest
    if found.header:
        yield f"{found.path}: {_what(found)}"
        for style, nbytes in found.style_nbytes().items():
            num = sum(tensor.style == style for tensor in found.tensors)
            yield f"  {style:<20} {num:>8} {human(nbytes):>10}"
    elif manifest:
        yield f"{found.path}: {manifest.model_class}, tp degree {manifest.tp_degree}"
    if manifest:
        yield from _about_set(manifest)
        if not found.header:
            yield from table(manifest.tp_degree, summarize(manifest))
            yield from (f"  {file.name:<36} {human(file.nbytes):>10}" for file in manifest.files)
    if found.missing:
        yield f"  not here: {', '.join(found.missing)}"
    if tensors:
        yield from map(_tensor_line, found.tensors)


def _what(found: Inspected) -> str:
    """What a file is."""
    assert found.header is not None
    num = f"{len(found.tensors)} tensors, {human(found.header.file_nbytes)}"
    if not found.about:
        return f"a safetensors file, not of a converted set; {num}"
    rank, tp = found.about.get("rank"), found.about.get("tp_degree")
    part = "what all ranks hold whole" if rank is None else f"rank {rank}"
    cls = f" of a {found.manifest.model_class}" if found.manifest else ""
    return f"{part}{cls}, tp degree {tp}, conversion {found.about.get('conversion_id')}; {num}"


def _about_set(manifest: Manifest) -> Iterator[str]:
    source = manifest.source
    origin = source.repo or "a local folder"
    named = {"revision": source.revision, "component": source.subfolder, "variant": source.variant}
    details = [f"{key} {value}" for key, value in named.items() if value]
    nbytes = sum(file.nbytes for file in source.files)
    yield f"  source: {', '.join([origin, *details])}; {len(source.files)} files, {human(nbytes)}"
    kept = f", {', '.join(manifest.keep_fp32)} kept in F32" if manifest.keep_fp32 else ""
    yield f"  dtype: {f'cast to {manifest.cast_to}{kept}' if manifest.cast_to else 'as stored in the source'}"
    yield f"  replicated tensors: {'in each rank file' if manifest.self_contained else 'once, in a file of their own'}"
    tools = f"shardconv {manifest.tool_version} with {manifest.library_name} {manifest.library_version}"
    yield f"  conversion {manifest.conversion_id}, by {tools}"
    yield "  plan:"
    for pattern, rule in manifest.plan.items():
        blocks = f" {list(rule.blocks)}" if rule.blocks else ""
        yield f"    {pattern:<48} {rule.style.value}{blocks}"


def _tensor_line(tensor: Held) -> str:
    how = f"{tensor.style} dim {tensor.cut.dim} {list(tensor.cut.block_sizes)}" if tensor.cut else tensor.style
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"  {tensor.name:<56} {tensor.dtype:>7} {shape:>14} {human(tensor.rank_nbytes):>9}  {how}"


def _chart(found: Inspected) -> Chart:
    manifest = found.manifest
    if manifest and not found.header:
        source = manifest.source
        title = f"{manifest.model_class}, tp degree {manifest.tp_degree}"
        origin = f"{source.repo} at {source.revision}" if source.repo else "a local source"
        dtype = f"cast to {manifest.cast_to}" if manifest.cast_to else "dtypes as stored"
        total = human(sum(tensor.nbytes for tensor in found.tensors))
        subtitle = f"{total} in {len(found.tensors)} tensors, {dtype}; from {origin}; {found.path}"
        bars = [f"rank {rank}" for rank in range(manifest.tp_degree)]
    else:
        title, subtitle, bars = found.path.name, _what(found), ["this file"]
    rows = [
        Row(each.name, each.style, f"{each.dtype} {'x'.join(map(str, each.shape))}", each.rank_nbytes)
        for each in found.largest()
    ]
    return Chart(title, subtitle, bars, found.style_nbytes(), rows)
