"""One run of a few minutes that says how the accelerator path does: copy rates, loads warm and cold, two ranks.

    python benchmarks/gpu_check.py --gb 5 --files 3 --model flux --work /tmp/bench

Prints a short table last. Where there is no accelerator the same code runs on the CPU, with plain memory for pinned,
which shows only that it runs. One process is rank 0 of `--tp` without the others (fake process group); two gloo ranks
on the one device check the wrapped modules against the unsharded model.

Rates count decimal gigabytes of our files of the rank. What a contestant loaded is hashed once and must be what
oracle.py expects.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import GB, Contestant, Sample

BANDWIDTH_NBYTES = 256 << 20  # of the pinned buffer
COPIES = 8
DIRECT_NBYTES, DIRECT_THREADS = 16 << 20, 4  # as loader.transfer reads
ROUNDS = 3  # on an accelerator, where minutes are dear; one on the CPU, where only running to the end is asked
TOLERANCE = 1e-4  # of the largest output of the two-rank check, fp32
COPY, DIRECT = "pinned host-to-device copy", "O_DIRECT reads"
FLAGS = ("cold_confirmed", "warm_confirmed")
OURS, TRANSFER = "ours", "ours, read_file alone"
SLOW = ("diffusers, then shard", "tensorizer", "flashpack", "ours, verify=True")  # left to bench_load.py


# --- in child processes ---


def child_bandwidth(device_text: str) -> dict[str, Any]:
    """Seconds for one byte from pinned memory to the device, over a few copies of a large buffer."""
    import torch

    device = torch.device(device_text)
    pinned = device.type != "cpu"
    host = torch.ones(BANDWIDTH_NBYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(BANDWIDTH_NBYTES, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(COPIES + 1):
        start = time.perf_counter()
        target.copy_(host, non_blocking=True)
        if pinned:
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - start)
    return {"gb_per_s": BANDWIDTH_NBYTES / GB / statistics.median(taken[1:])}


def child_load(name: str, mode: str, job_text: str) -> dict[str, Any]:
    """Load as the contestant `name`, drop or warm its files first; a digest when asked for."""
    import peers
    import torch
    from bench_load import touch
    from oracle import describe

    fields = json.loads(job_text)
    check = fields.pop("check")
    paths = {key: Path(fields[key]) for key in ("source", "out", "packed")}
    job = peers.Job(**(fields | paths | {"device": torch.device(fields["device"])}))
    load = peers.PEERS[name].prepare(job)
    if job.device.type != "cpu":
        torch.empty(1, device=job.device)  # the device's own start-up is nobody's fault
        torch.accelerator.synchronize(job.device)
    result = common.READY[mode][0](peers.PEERS[name].reads(job))
    start = time.perf_counter()
    tensors, alive = load()
    if job.device.type == "cpu":
        sum(map(touch, tensors.values()))
    else:
        torch.accelerator.synchronize(job.device)
    result["seconds"] = time.perf_counter() - start
    described = {key: describe(tensor) for key, tensor in tensors.items()} if check else None
    del alive
    return {"figures": result, "described": described}


def child_list(device_text: str) -> dict[str, Any]:
    """Why contestants cannot take part, None for those that can; and what the device is called."""
    import peers
    import torch

    device = torch.device(device_text)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"left_out": {name: peer.left_out(device.type) for name, peer in peers.PEERS.items()}, "device": name}


def child_device() -> dict[str, Any]:
    """The accelerator's type, or cpu."""
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {"device": f"{found.type}:0" if found else "cpu"}


def child_ranks(device_text: str, name: str, out: str) -> dict[str, Any]:
    """One of two gloo ranks on one device: loads the small model and compares with the unsharded one."""
    import torch
    import torch.distributed as dist

    import loader
    from shardconv.plans.catalogue import small_models

    device = torch.device(device_text)
    dist.init_process_group("gloo")
    given = {key: value.to(device) if isinstance(value, torch.Tensor) else value
             for key, value in small_models.inputs(name).items()}  # fmt: skip
    model = loader.load_model(out, device=device)
    with torch.inference_mode():
        output = model(**given, return_dict=False)[0]
        whole = small_models.build(name).to(device)(**given, return_dict=False)[0]
    dist.destroy_process_group()
    return {"difference": float((output - whole).abs().max() / whole.abs().max())}


# --- in the measuring process ---


def read_direct(paths: list[Path]) -> float:
    """Seconds to read files past the page cache, several threads taking chunks in turn; into memory used again."""
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    with contextlib.ExitStack() as stack:
        pieces = []
        for path in paths:
            try:
                fd = os.open(path, flags)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                fd = os.open(path, os.O_RDONLY)  # a file system without direct I/O
            stack.callback(os.close, fd)
            pieces += [(fd, offset) for offset in range(0, path.stat().st_size, DIRECT_NBYTES)]
        todo, lock = iter(pieces), threading.Lock()

        def read_some() -> None:
            buffer = mmap.mmap(-1, DIRECT_NBYTES)  # on a page boundary, as direct I/O wants
            while True:
                with lock:
                    piece = next(todo, None)
                if piece is None:
                    return
                os.preadv(piece[0], [buffer], piece[1])

        threads = [threading.Thread(target=read_some) for _ in range(DIRECT_THREADS)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start


class Check:
    """One checkpoint, rank 0 of a few, one device."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = args.device or self._child("device")["device"]
        self.source = common.checkpoint(args)
        self.out = common.converted(self.source, args.tp)
        self.files = common.rank_files(self.out, args.tp, 0)
        self.nbytes = common.nbytes_of(self.files)
        ranks, replicated = common.expected_slices(self.source, args.tp)
        self.expected = ranks[0] | replicated
        listed = self._child("list", self.device)
        self.device_name, self.left_out = listed["device"], {}
        for name, reason in listed["left_out"].items():
            if name in SLOW:
                reason = "not measured here, see bench_load.py"
            if reason:
                self.left_out[name] = reason
        self.checked: set[str] = set()
        self.names = [name for name in listed["left_out"] if name not in self.left_out]

    def _child(self, what: str, *arguments: str) -> Any:
        return common.run_child(common.python(__file__, "--child", what, *arguments)).result

    def contestants(self, mode: str) -> list[Contestant]:
        """Every load that is possible here, and the rate that sets the limit."""
        found = [Contestant(name, partial(self._load, name, mode)) for name in self.names]
        limit = Contestant(DIRECT, self._direct) if mode == "cold" else Contestant(COPY, self._bandwidth)
        return [limit, *found]

    def _load(self, name: str, mode: str) -> Sample:
        fields = {"tp": self.args.tp, "rank": 0, "device": self.device, "check": name not in self.checked}
        fields |= {"source": str(self.source), "out": str(self.out), "packed": str(self.args.work)}
        common.settle()
        result = self._child("load", name, mode, json.dumps(fields))
        if result["described"] is not None:
            common.check_equal(name, result["described"], self.expected)
            self.checked.add(name)
        figures: Sample = result["figures"]
        return figures | {"gb_per_s": self.nbytes / GB / figures["seconds"]}

    def _bandwidth(self) -> Sample:
        rate = self._child("bandwidth", self.device)["gb_per_s"]
        return {"seconds": self.nbytes / GB / rate, "gb_per_s": rate}

    def _direct(self) -> Sample:
        flags = common.drop(self.files)
        seconds = read_direct(self.files)
        return flags | {"seconds": seconds, "gb_per_s": self.nbytes / GB / seconds}

    def drop_unfit(self) -> None:
        """Try each contestant of others once; one that fails here is left out, with what it said."""
        for name in list(self.names):
            try:
                self._load(name, "warm")
            except RuntimeError as error:
                if name.startswith("ours"):
                    raise
                self.names.remove(name)
                self.left_out[name] = f"failed here: {str(error).strip().splitlines()[-1][:200]}"
            common.say(f"  checked {name}: {'bytes equal' if name in self.checked else 'left out'}")

    def two_ranks(self) -> dict[str, float]:
        """Largest difference of the wrapped modules from the unsharded model, on two gloo ranks sharing the device."""
        found = {}
        for name in self.args.small:
            flags = argparse.Namespace(work=self.args.work, model=f"small32-{name}", gb=0, files=1)
            out = common.converted(common.checkpoint(flags), 2)
            ends = common.run_ranks(common.python(__file__, "--child", "ranks", self.device, name, str(out)), 2)
            found[name] = max(end.result["difference"] for end in ends)
            if not found[name] <= TOLERANCE:
                raise RuntimeError(f"{name}: two ranks differ from the unsharded model by {found[name]}")
        return found


def figures(warm: dict[str, list[Sample]], cold: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """What issue 3, point 5, sets limits to."""
    ours, streaming = OURS, "diffusers streaming"
    share = common.paired({**warm, "x": warm[COPY]}, "x", [ours])
    cold_share = common.paired({**cold, "x": cold[DIRECT]}, "x", [ours])
    found = [
        common.figure("warm: our load as a share of the pinned copy rate", share, 0.85, at_most=False),
        common.figure("cold: our load as a share of the O_DIRECT rate", cold_share, 0.90, at_most=False),
    ]
    if TRANSFER in warm:
        alone = common.paired({**warm, "x": warm[COPY]}, "x", [TRANSFER])
        found.append(common.figure("warm: read_file as a share of the pinned copy rate", alone, 0.85, at_most=False))
    for mode, samples in (("warm", warm), ("cold", cold)):
        for name in samples:
            if name not in (COPY, DIRECT) and not name.startswith("ours"):
                # A model against a model, bare tensors against bare tensors.
                limit, mine = (2.0, ours) if name == streaming else (1.0, TRANSFER)
                faster = common.paired(samples, name, [mine])
                found.append(common.figure(f"{mode}: {name} over {mine}, time", faster, limit, at_most=False))
    return [each for each in found if each["value"] is not None]


def print_table(check: Check, report: dict[str, Any]) -> None:
    """The short table, last."""
    print(f"\n{check.device_name}: rank 0 of {check.args.tp}, {check.nbytes / GB:.2f} GB, {check.args.rounds} rounds")
    if check.device == "cpu":
        print("no accelerator: the same code on the CPU, which shows that it runs and nothing else")
    for one in report["tables"]:
        print(f"\n{one['title']:<36}{'median s':>10}{'min':>10}{'max':>10}{'GB/s':>8}")
        for row in one["rows"]:
            times = "".join(f"{row['seconds'][key]:>10.3f}" for key in ("median", "min", "max"))
            print(f"{row['name']:<36}{times}{row['gb_per_s']['median']:>8.2f}")
    print()
    for each in report["figures"]:
        word = "    " if check.device == "cpu" else "ok  " if each["held"] else "MISS"
        print(f"{word} {each['what']:<66} {each['value']['median']:7.3f}  wanted >= {each['limit']}")
    if any(row.get(flag) is False for one in report["tables"] for row in one["rows"] for flag in FLAGS):
        print("not every turn's files were cold or warm as meant: mincore did not confirm it")
    for name, reason in check.left_out.items():
        print(f"left out: {name}: {reason}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_checkpoint_flags(parser, "gpu")
    parser.set_defaults(rounds=None)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument("--small", nargs="+", default=["flux", "qwenimage"], help="small models of the two-rank check")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants")
    args = parser.parse_args()
    check = Check(args)
    args.rounds = args.rounds or (ROUNDS if check.device != "cpu" else 1)
    if args.only:
        check.names = [name for name in check.names if name in args.only]
    differences = check.two_ranks()
    common.say(f"two gloo ranks on {check.device}: differences {differences}")
    check.drop_unfit()
    samples, tables = {}, []
    for mode, base in (("warm", COPY), ("cold", DIRECT)):
        common.say(f"load to {check.device}, {mode}")
        samples[mode] = common.take_turns(check.contestants(mode), args.rounds)
        tables.append(common.table(f"Load to {check.device}, {mode}", samples[mode], base, common.READY[mode][1]))
    report = common.document(
        "What does a load cost against the bus and the disk?" if check.device != "cpu" else "Does the device path run?",
        args.work,
        device=check.device_name,
        checkpoint=common.checkpoint_record(args, check.source),
        rank={"tp": args.tp, "rank": 0, "nbytes": check.nbytes},
        rounds=args.rounds,
        tables=tables,
        figures=figures(samples["warm"], samples["cold"]),
        two_gloo_ranks_on_one_device=differences,
        left_out=check.left_out,
        verified="every contestant's tensors once, copied back, by xxh3-128 against slices cut with torch",
    )
    common.write(args.results, args.name if check.device != "cpu" else f"{args.name}-on-cpu", report)
    print_table(check, report)


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    "bandwidth": child_bandwidth, "load": child_load, "list": child_list, "device": child_device, "ranks": child_ranks,
}  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
