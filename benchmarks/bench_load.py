"""How long one rank of several takes to have its weights, against every other way to get the same bytes.

    python benchmarks/bench_load.py --gb 5 --files 3 --model flux --tp 4 --rank 1 --rounds 6 --work /tmp/bench

On the CPU. Each contestant is a fresh process: imports and the (fake) process group first, not counted but reported;
then the load and one byte read of every page, timed; then its memory; then the digest of every tensor, which must be
what oracle.py expects. `dd` reads our files and holds nothing: the floor of reading. What verifying costs is asked
apart, warm, with every byte read after the load: whoever uses weights reads them all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import GB, MIB, Contestant, Sample

OURS, VERIFIED, DD = "ours", "ours, verify=True", "dd of our files"
MODES = ("warm", "cold", "verified")
PAGE_NBYTES = 4096


# --- in the child processes ---


def child_load(name: str, every: str, job_text: str) -> dict[str, Any]:
    """Load once as the contestant `name`, read one byte of `every` so many; figures, and digests of what was loaded."""
    start = time.perf_counter()
    import peers
    from oracle import describe

    job = _job(json.loads(job_text))
    load = peers.PEERS[name].prepare(job)
    imports_s = time.perf_counter() - start
    before = common.memory()
    start = time.perf_counter()
    tensors, alive = load()
    loaded = time.perf_counter()
    touched = sum(touch(tensor, int(every)) for tensor in tensors.values())
    done = time.perf_counter()
    after = common.memory()
    result = {
        "seconds": done - start,
        "load_s": loaded - start,
        "touch_s": done - loaded,
        "imports_s": imports_s,
        **{f"{key}_mib": (after[key] - before[key]) / MIB for key in after},
    }
    described = {key: describe(tensor) for key, tensor in tensors.items()}
    del alive
    return {"figures": result, "described": described, "touched": touched}


def touch(tensor: Any, every: int = PAGE_NBYTES) -> int:
    """Read one byte of every page of a tensor, so that its memory is really there; with `every=1` all its bytes."""
    import torch

    flat = tensor.detach().reshape(-1).view(torch.uint8)
    if every == 1 and flat.numel() % 8 == 0 and flat.data_ptr() % 8 == 0:
        return int(flat.view(torch.int64).sum())  # at the speed of memory
    return int(flat[::every].sum(dtype=torch.int64))


def _job(fields: dict[str, Any]) -> Any:
    import peers
    import torch

    paths = {key: Path(fields[key]) for key in ("source", "out", "packed")}
    return peers.Job(**(fields | paths | {"device": torch.device(fields["device"])}))


def child_pack(job_text: str) -> dict[str, Any]:
    """Write the files of the contestants with formats of their own."""
    import peers

    peers.pack(_job(json.loads(job_text)))
    return {}


def child_list(device_type: str, job_text: str) -> dict[str, Any]:
    """Which contestants can take part and what they read, and why the others cannot."""
    import peers

    job = _job(json.loads(job_text))
    reasons = {name: peer.left_out(device_type) for name, peer in peers.PEERS.items()}
    return {
        "reads": {name: list(map(str, peers.PEERS[name].reads(job))) for name, reason in reasons.items() if not reason},
        "left_out": {name: reason for name, reason in reasons.items() if reason},
        "about": {name: peer.about for name, peer in peers.PEERS.items()},
    }


# --- in the measuring process ---


class Bench:
    """One checkpoint, one rank, and what must come out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.source = common.checkpoint(args)
        self.out = common.converted(self.source, args.tp)
        packed = args.work / f"packed-{self.source.name}"
        fields = {"tp": args.tp, "rank": args.rank, "device": "cpu"}
        fields |= {"source": str(self.source), "out": str(self.out), "packed": str(packed)}
        self.job = json.dumps(fields)
        common.run_child(common.python(__file__, "--child", "pack", self.job))
        self.listed = common.run_child(common.python(__file__, "--child", "list", "cpu", self.job)).result
        ranks, replicated = common.expected_slices(self.source, args.tp)
        self.expected = ranks[args.rank] | replicated
        self.files = common.rank_files(self.out, args.tp, args.rank)
        self.nbytes = common.nbytes_of(self.files)

    def contestants(self, mode: str) -> list[Contestant]:
        """All that can take part in `mode`: warm, cold, or verified (warm, every byte read)."""
        ready, _ = common.READY["cold" if mode == "cold" else "warm"]
        every = 1 if mode == "verified" else PAGE_NBYTES
        found = [
            Contestant(name, partial(self._load, name, every), partial(self._prepare, ready, list(map(Path, paths))))
            for name, paths in self.listed["reads"].items()
            if (name in (OURS, VERIFIED) if mode == "verified" else self._asked(name))
        ]
        if mode != "verified":
            found.append(Contestant(DD, self._dd, partial(self._prepare, ready, self.files)))
        return found

    def _asked(self, name: str) -> bool:
        return name != VERIFIED and (not self.args.only or name in self.args.only)

    def _prepare(self, ready: Callable[[list[Path]], Sample], paths: list[Path]) -> Sample:
        common.settle()
        return ready(paths)

    def _load(self, name: str, every: int) -> Sample:
        child = common.run_child(common.python(__file__, "--child", "load", name, every, self.job))
        common.check_equal(name, child.result["described"], self.expected)
        figures: Sample = child.result["figures"]
        return figures | self._rates(child, figures["seconds"])

    def _dd(self) -> Sample:
        child = common.run_child(["sh", "-c", common.READ, "sh", *map(str, self.files)])
        return {"seconds": child.seconds} | self._rates(child, child.seconds)

    def _rates(self, child: common.Child, seconds: float) -> Sample:
        return {"disk_read_gb": child.disk_read_nbytes / GB, "gb_per_s": self.nbytes / GB / seconds}


def figures(samples: dict[str, dict[str, list[Sample]]]) -> list[dict[str, Any]]:
    """What issue 3, points 2 and 6, set limits to."""
    streaming = "diffusers streaming"
    warm, cold, checked = (samples.get(mode, {}) for mode in MODES)
    found = [
        common.figure("cold: ours over dd of the same files", common.paired(cold, OURS, [DD]), 1.15),
        common.figure("warm: ours over diffusers streaming", common.paired(warm, OURS, [streaming]), 0.2),
        common.figure("cold: ours over diffusers streaming", common.paired(cold, OURS, [streaming]), 0.5),
        common.figure("verify=True over verify=False, every byte read", common.paired(checked, VERIFIED, [OURS]), 1.2),
    ]
    for mode, taken in samples.items():
        if OURS in taken:
            most = max(sample["anonymous_mib"] for sample in taken[OURS])
            found.append(common.figure(f"{mode}: our private memory above the same imports, MiB", most, 64))
    return [each for each in found if each["value"] is not None]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_checkpoint_flags(parser, "load")
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants (and dd)")
    args = parser.parse_args()
    bench = Bench(args)
    samples, tables = {}, []
    for mode in args.modes:
        common.say(f"load, {mode}")
        samples[mode] = common.take_turns(bench.contestants(mode), args.rounds)
        title = f"Load of rank {args.rank} of {args.tp}, {mode}"
        title += " against not, warm, every byte read" if mode == "verified" else ", every page touched"
        note = common.READY["cold" if mode == "cold" else "warm"][1]
        tables.append(common.table(title, samples[mode], OURS if mode == "verified" else DD, note))
    report = common.document(
        "What does one rank's load cost against reading its bytes?",
        args.work,
        checkpoint=common.checkpoint_record(args, bench.source),
        rank={"tp": args.tp, "rank": args.rank, "nbytes": bench.nbytes},
        rounds=args.rounds,
        tables=tables,
        figures=figures(samples),
        left_out=bench.listed["left_out"],
        about=bench.listed["about"],
        memory="growth over the same process just before the load; anonymous: of no file, so it cannot be dropped; "
        "uss: mapped by no other process, which counts page-cache pages that only this one maps; rss: all of it",
        verified="every tensor, every round, by xxh3-128 against slices cut with torch; dd's bytes are not looked at",
    )
    common.write(args.results, args.name, report)


def child(arguments: list[str]) -> None:
    """`WHAT ARGUMENTS...` in a child process; prints JSON."""
    print(json.dumps(CHILDREN[arguments[0]](*arguments[1:])))


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {"load": child_load, "pack": child_pack, "list": child_list}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        main()
