"""Does a rank's part of a set fit together, and with the model? Headers only; every fault in one error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from shardconv.errors import PlanError, SetError
from shardconv.format.config import config_digest, read_config
from shardconv.format.cut import Cut
from shardconv.format.manifest import Manifest
from shardconv.format.sets import SetFile, component_of, open_files
from shardconv.libraries.skeleton import stored_tensors
from shardconv.plans.choice import other_plan
from shardconv.plans.resolve import Resolution, resolve
from shardconv.system.cores import usable_cores
from shardconv.system.crew import PATIENCE_S, Crew, check_stop

from ..group.ranks import ranks_of_node
from .locate import no_set_for

if TYPE_CHECKING:
    from torch import nn

HASHERS = 16  # threads at most, never more than this rank's share of the cores
HASHED_NBYTES = 256 << 20  # bytes hashed at once; between two parts a thread waits for the interpreter lock
FETCHED_NBYTES = 16 << 20  # bytes brought back from an accelerator at once, to be hashed; the host memory of one thread


@dataclass(frozen=True, slots=True)
class OpenSet:
    """One rank's view of a set."""

    folder: Path
    manifest: Manifest
    config: Mapping[str, Any]
    size: int  # of the group, which divides the set's tp degree
    files: tuple[SetFile, ...]

    @property
    def joined(self) -> tuple[SetFile, ...]:
        """The files whose slices make this rank's together, by rank; none when the set's degree is the group's."""
        own = self.manifest.tp_degree == self.size
        return tuple(file for file in self.files if file.rank is not None and not own)

    @property
    def single(self) -> tuple[SetFile, ...]:
        """The files that this rank takes as they are."""
        return tuple(file for file in self.files if file not in self.joined)


def open_set(folder: Path, rank: int, size: int) -> OpenSet:
    """Check manifest, config and headers of what `rank` of `size` needs. Raises `SetError` with every fault."""
    manifest = Manifest.read(folder)
    per_rank, rest = divmod(manifest.tp_degree, size)
    if rest:
        raise SetError(no_set_for(size, folder, {manifest.tp_degree: folder}))
    component = component_of(folder)
    config, _ = read_config(component)
    if config["_class_name"] != manifest.model_class:
        raise SetError(
            f"{component / 'config.json'}: expected a {manifest.model_class}, found a {config['_class_name']}; "
            "the config is of another model"
        )
    if config_digest(config) != manifest.config_digest:
        raise SetError(
            f"{component / 'config.json'}: not the config that was converted; the same weights would compute something "
            "else; put the source's config.json back, or convert again"
        )
    held = range(rank * per_rank, (rank + 1) * per_rank)
    return OpenSet(folder, manifest, config, size, open_files(folder, manifest, held))


def check_model(opened: OpenSet, model: nn.Module) -> Resolution:
    """The manifest against the model that this diffusers builds from the config. Raises `SetError`, every fault.

    A class may have changed between the version that converted and the one that loads; then the shapes, the plan or the
    way it resolves differ, and nothing is loaded.
    """
    manifest = opened.manifest
    expected = stored_tensors(model)
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    issues = [
        f"{name}: the model has it, the set does not; convert again with this diffusers"
        for name in expected
        if name not in stored and name not in manifest.aliases
    ]
    issues += [f"{name}: the set has it, the model does not" for name in stored if name not in expected]
    issues += [
        f"{name}: the model's shape is {list(expected[name])}, the set's {list(tensor.shape)}; convert again"
        for name, tensor in stored.items()
        if name in expected and expected[name] != tensor.shape
    ]
    try:
        resolution = resolve(model, manifest.plan, opened.size, other_plan(model))
    except PlanError as error:
        raise SetError(*issues, *error.issues) from None
    issues += [
        f"{name}: the set has it {_how(tensor.cut)}, this diffusers' model wants it "
        f"{_how(resolution.cuts.get(name, (None, None))[1])}; convert again"
        for name, tensor in stored.items()
        if resolution.cuts.get(name, (None, None))[1] != tensor.cut
    ]
    if issues:
        raise SetError(*issues)
    return resolution


def _how(cut: Cut | None) -> str:
    return "whole" if cut is None else f"cut on dim {cut.dim} in blocks {list(cut.block_sizes)}"


@contextmanager
def checking(
    opened: OpenSet, loaded: Sequence[Callable[[], Mapping[str, torch.Tensor]]], heed: Callable[[], None]
) -> Iterator[Callable[[], None]]:
    """Hash the tensors of `opened.files` against the manifest until left, on this rank's share of the cores, while
    other things go on.

    `loaded` gives the tensors of each file, waiting for them. Calling the value waits until all are hashed, and asks
    `heed` meanwhile; it raises `SetError`, every damaged tensor named.
    """
    files = zip(opened.files, loaded, strict=True)
    slices = enumerate((file, name, tensor) for file, take in files for name, tensor in take().items())
    lock = threading.Lock()

    def hash_some() -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        while True:
            with lock:
                check_stop()
                number, slice_ = next(slices, (-1, None))
            if slice_ is None:
                return found
            file, name, tensor = slice_
            known = opened.manifest.digests[name]
            if _digest(tensor) != known[file.rank if file.rank is not None and len(known) > 1 else 0]:
                found.append((number, f"{file.path.name}: {name} is damaged (its digest differs); fetch it again"))

    def check() -> None:
        issues = sorted(issue for found in crew.results(futures) for issue in found)
        if issues:
            raise SetError(*(text for _, text in issues))

    hashers = min(HASHERS, usable_cores(ranks_of_node()))
    with Crew(hashers, "loader-verify", heed=heed, patience_s=PATIENCE_S) as crew:
        futures = [crew.submit(hash_some) for _ in range(hashers)]
        yield check


def _digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of a tensor's bytes; from an accelerator they come back a part at a time."""
    hasher = xxhash.xxh3_128()
    data = tensor.flatten().view(torch.uint8)
    part = HASHED_NBYTES if data.is_cpu else FETCHED_NBYTES
    for start in range(0, data.nbytes, part):
        check_stop()
        hasher.update(data[start : start + part].cpu().numpy().data)
    return hasher.hexdigest()
