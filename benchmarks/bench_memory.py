"""How much memory merging, resharding and verifying take, on a set of any size.

    python benchmarks/bench_memory.py --gb 20 --work /tmp/bench

The set is of zeros in sparse files, with the headers and digests of a real one, so that it takes no room and no source;
what is written from it is written for real and deleted before the next turn. Peaks are the system's (ru_maxrss), less
that of an interpreter that does nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
from pathlib import Path

import common
import xxhash
from common import GB, MIB

from shardconv import Manifest
from shardconv.engine.slices import write_headers
from shardconv.format.config import config_digest
from shardconv.format.cut import Cut
from shardconv.format.layout import StoredTensor, plan_layout
from shardconv.format.manifest import Source, SourceFileRecord
from shardconv.format.names import MANIFEST_NAME
from shardconv.format.plan import REPLICATED, Rule, Style

TP, NEW_TP = 4, 6
# A bare interpreter's peak. Its ru_maxrss would be that of the process which started it, when that was larger.
PEAK = "print(next(int(l.split()[1]) * 1024 for l in open('/proc/self/status') if l.startswith('VmHWM')))"
CONFIG = {"_class_name": "FluxTransformer2DModel"}


def tensors(nbytes: int) -> list[StoredTensor]:
    """Blocks with tensors of every style, until they have `nbytes`; wide enough that 20 GB are a few hundred."""
    width = 6144 if nbytes >= GB else 192
    result: list[StoredTensor] = []
    while sum(tensor.slice_nbytes(1) for tensor in result) < nbytes:
        block = f"blocks.{len(result) // 6}"
        result += [
            StoredTensor(f"{block}.q.weight", "BF16", (width, width), "colwise", Cut(0, (width,))),
            StoredTensor(f"{block}.out.weight", "BF16", (width, width), "rowwise", Cut(1, (width,))),
            StoredTensor(f"{block}.up.weight", "BF16", (8 * width, width), "packed_colwise", Cut(0, (4 * width,) * 2)),
            StoredTensor(f"{block}.down.weight", "BF16", (width, 4 * width), "rowwise", Cut(1, (4 * width,))),
            StoredTensor(f"{block}.fused.weight", "F32", (width, 2 * width), "packed_rowwise", Cut(1, (width,) * 2)),
            StoredTensor(f"{block}.mod.weight", "BF16", (3 * width, width), REPLICATED, None),
        ]
    return result


@functools.cache
def digest_of_zeros(nbytes: int) -> str:
    """xxh3-128 of so many zeros."""
    digest, chunk = xxhash.xxh3_128(), bytes(MIB)
    for start in range(0, nbytes, MIB):
        digest.update(chunk[: nbytes - start])
    return digest.hexdigest()


def build(component: Path, nbytes: int) -> Path:
    """A set of at least `nbytes`, all zeros, in sparse files; returns its folder."""
    stored = tensors(nbytes)
    layout = plan_layout(stored, TP, False)
    folder = component / f"tp{TP}"
    folder.mkdir(parents=True)
    (component / "config.json").write_text(json.dumps(CONFIG))
    manifest = Manifest(
        tool_version="0", conversion_id="",
        source=Source(None, None, None, None, (SourceFileRecord("a", 0, "", "", {}),)),
        model_class=CONFIG["_class_name"], config_digest=config_digest(CONFIG), tp_degree=TP,
        library_name="diffusers", library_version="0",
        self_contained=False, cast_to=None, keep_fp32=(), plan={"blocks.*.q": Rule(Style.COLWISE)}, head_counts=(48,),
        tensors=tuple(stored), aliases={}, left_out=(), files=(),
        digests={each.name: (digest_of_zeros(each.slice_nbytes(TP)),) * (TP if each.cut else 1) for each in stored},
    )  # fmt: skip
    fds = [os.open(folder / file.name, os.O_RDWR | os.O_CREAT, 0o644) for file in layout.files]
    manifest = write_headers(manifest, layout, fds)
    for fd, file in zip(fds, layout.files, strict=True):
        os.ftruncate(fd, file.nbytes)
        os.close(fd)
    (folder / MANIFEST_NAME).write_text(manifest.to_json())
    return folder


def run(nbytes: int, work: Path) -> list[dict[str, object]]:
    """A row for each verb: seconds, and the peak above that of a bare interpreter."""
    shutil.rmtree(work, ignore_errors=True)
    folder = build(work / "set", nbytes)
    total = sum(tensor.slice_nbytes(1) for tensor in Manifest.read(folder).tensors)
    bare = common.run_child(common.python("-c", PEAK)).result
    out = str(work / "out")
    turns = [
        ("verify", ["verify", str(folder)]),
        ("merge", ["merge", str(folder), out]),
        (f"reshard {TP} to {NEW_TP}", ["reshard", "--tp", str(NEW_TP), str(folder), out]),
        (f"verify tp{NEW_TP}", ["verify", out]),
    ]
    rows = []
    try:
        for name, argv in turns:
            child = common.run_child(common.python("-m", "shardconv", *argv, "--quiet"))
            above = (child.peak_rss_nbytes - bare) / MIB
            rows.append({"verb": name, "gb": total / GB, "seconds": child.seconds, "mib_above_interpreter": above})
            common.say(
                f"  {name:<16} {total / GB:6.2f} GB  {child.seconds:8.2f} s  {above:6.0f} MiB above {bare / MIB:.0f}"
            )
            if name == "merge":
                shutil.rmtree(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command line. Exit code 1 when a verb took more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="scratch folder, emptied at the end")
    parser.add_argument("--gb", type=float, default=20.0, help="of the set; as much free disk is needed")
    parser.add_argument("--limit-mib", type=float, default=300.0, help="above the interpreter")
    args = parser.parse_args(argv)
    rows = run(int(args.gb * GB), args.work / "memory")
    print(json.dumps({"cores": common.num_cores(), "rows": rows}, indent=2))
    return int(any(row["mib_above_interpreter"] > args.limit_mib for row in rows))  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
