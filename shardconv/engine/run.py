"""Moves bytes: reads each tensor once, in order, from one file or from the slices of some ranks, and appends every
rank's share to its file.

Knows nothing of models. Each worker thread takes one tensor at a time and holds at most three chunks of memory.
Reading, hashing, gathering and writing all release the interpreter lock, so two workers keep two cores busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ..errors import CheckpointError
from ..format.layout import StoredTensor
from ..system.pagecache import drop
from ..system.progress import Progress
from .pool import READERS, Reader, Result, SliceWriter, Workers, chunks
from .records import ConvertPlan, Extent, RouteDigests, RoutePlan, TensorDigests
from .route import route
from .transform import Cast

_NOTHING: Mapping[str, TensorDigests] = {}


def run(
    plan: ConvertPlan,
    outputs: Sequence[int] | None,
    progress: Progress,
    cold: Collection[Path] = (),
    done: Mapping[str, TensorDigests] = _NOTHING,
    add: Callable[[str, TensorDigests], None] = lambda name, digests: None,
) -> Mapping[str, TensorDigests]:
    """Carry out `plan`. `outputs` are writable file descriptors, one for each file of the layout; None writes nothing
    and only takes the digests. `cold` are source files that need not stay in memory once they are used. Tensors in
    `done` are left as they are; `add` is called, by the worker, with each other one as soon as it is written.

    Returns the digests by tensor name. Memory: WORKERS times two chunks. Raises `CheckpointError` when a source file
    changes under the reader or cannot be read, `OSError` when the system refuses a write; nothing is retried.
    """
    workers = Workers({source.extent.path for source in plan.sources.values()}, progress)

    def work(tensor: StoredTensor) -> TensorDigests:
        slices = _slices(tensor, plan.layout.starts[tensor.name], outputs)
        source = plan.sources[tensor.name]
        extent = source.extent
        reader = Reader(workers, extent, workers.buffer())
        route(tensor, source.transform, [reader], slices)
        if extent.path in cold:
            drop(workers.fds[extent.path], extent.offset, extent.nbytes)
        digests = TensorDigests(reader.digest.hexdigest(), tuple(each.digest.hexdigest() for each in slices))
        add(tensor.name, digests)
        return digests

    left = [tensor for tensor in plan.layout.tensors if tensor.name not in done]
    return {**done, **_by_name(left, workers.each(left, work))}


def _slices(
    tensor: StoredTensor, starts: Sequence[tuple[int, int]], outputs: Sequence[int] | None
) -> list[SliceWriter]:
    """Of a cut tensor one a rank; of a whole one a single one, for all its copies."""
    places = [[] if outputs is None else [(outputs[index], offset)] for index, offset in starts]
    return (
        [SliceWriter(place) for place in places]
        if tensor.cut
        else [SliceWriter([each for place in places for each in place])]
    )


def _by_name(tensors: Sequence[StoredTensor], results: Sequence[Result]) -> dict[str, Result]:
    return {tensor.name: result for tensor, result in zip(tensors, results, strict=True)}


def digest_sources(plan: ConvertPlan, progress: Progress) -> Mapping[str, str]:
    """xxh3-128 of every source tensor of `plan`, by name; reads everything, writes nothing."""
    workers = Workers({source.extent.path for source in plan.sources.values()}, progress)
    found = workers.each(plan.layout.tensors, lambda tensor: _digest(workers, plan.sources[tensor.name].extent))
    return _by_name(plan.layout.tensors, found)


def digests(extents: Sequence[Extent], progress: Progress) -> list[str | OSError | CheckpointError]:
    """xxh3-128 of each extent, in order; in place of one that cannot be read, the error that says why.

    Memory: READERS times one chunk.
    """
    workers = Workers({extent.path for extent in extents}, progress, READERS)

    def work(extent: Extent) -> str | OSError | CheckpointError:
        try:
            return _digest(workers, extent)
        except CheckpointError as error:
            return error.__cause__ if isinstance(error.__cause__, OSError) else error

    return workers.each(extents, work)


def _digest(workers: Workers, extent: Extent) -> str:
    reader = Reader(workers, extent, workers.buffer())
    for nbytes in chunks(extent.nbytes):
        reader.take(nbytes)
    return reader.digest.hexdigest()


def reroute(plan: RoutePlan, outputs: Sequence[int], progress: Progress) -> Mapping[str, RouteDigests]:
    """Carry out `plan`; the digests by tensor name. Memory: WORKERS times three chunks. Raises as `run` does."""
    workers = Workers({extent.path for extents in plan.slices.values() for extent in extents}, progress)

    def work(tensor: StoredTensor) -> RouteDigests:
        slices = _slices(tensor, plan.starts[tensor.name], outputs)
        readers = [Reader(workers, extent, workers.buffer()) for extent in plan.slices[tensor.name]]
        route(tensor, Cast(tensor.dtype, tensor.dtype), readers, slices)
        return RouteDigests(
            tuple(reader.digest.hexdigest() for reader in readers), tuple(each.digest.hexdigest() for each in slices)
        )

    return _by_name(plan.tensors, workers.each(plan.tensors, work))
