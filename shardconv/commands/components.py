"""Which components of a source become sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, PlanError, UsageError
from ..format.config import read_config
from ..format.names import CONFIG_NAME, MODEL_INDEX
from ..format.pipeline import pipeline_components
from ..format.plan import OWN
from ..format.weights import read_index, select_files
from ..libraries.choose import library_named, model_class
from ..plans.planner import Planner
from ..source.locate import Located
from ..system.jsonfile import parse, read_bounded
from .options import Options

PAYS_NBYTES = 10**9  # that a rank must save for an encoder to be sharded unasked: a narrow one gets slower when cut


def chosen_components(
    located: Located, subfolder: str | None, options: Options, planner: Planner
) -> tuple[list[str], list[str]]:
    """Names of the component folders to shard, "" for the source folder itself, in the order of `model_index.json`; and
    a sentence for each component that could be sharded but stays whole for a reason that people should know."""
    if subfolder is not None:
        if not (located.folder / subfolder).is_dir():
            raise CheckpointError(f"{located.folder}: no folder {subfolder!r} in it; check --subfolder")
        return [Path(subfolder).as_posix()], []
    if not located.is_pipeline:
        if options.only or options.whole:
            raise UsageError("--only, --whole: name components of a pipeline, the source is one; leave them out")
        return [""], []
    if not options.plan.is_own:
        raise UsageError("--plan: names modules of one model, the source is a pipeline; add --subfolder COMPONENT")
    listed = pipeline_components(located.folder)
    _check_folders(located, listed)
    unknown = [name for name in (*options.only, *options.whole) if name not in listed]
    if unknown:
        raise UsageError(f"{unknown[0]}: no component of {located.folder}, which has {', '.join(listed)}")
    planned = _with_plans(located, listed, planner)
    if options.only:
        return _named(located, options, planned, listed), []
    wanted = [name for name in planned if name not in options.whole]
    encoders = [name for name in wanted if not _is_denoiser(listed[name])]
    small = {name for name in encoders if _saved_nbytes(located.folder / name, options) < PAYS_NBYTES}
    large = {name: listed[name][0] for name in encoders if name not in small}
    unfit = {name: f"{library} is not installed" for name, library in large.items() if find_spec(library) is None}
    planner.start_for(listed[name][1] for name in large if name not in unfit)
    unfit |= {name: why for name in large if name not in unfit and (why := _misfit(located, name, options, planner))}
    chosen = [name for name in wanted if name not in small and name not in unfit]
    if not chosen:
        raise PlanError(_nothing(located, listed))
    return chosen, [f"{located.folder / name}: stays whole: {why}" for name, why in unfit.items()]


def _check_folders(located: Located, listed: Mapping[str, tuple[str, str]]) -> None:
    absent = [str(located.folder / name) for name in listed if not (located.folder / name).is_dir()]
    if absent:
        step = "tell its owner" if located.snapshot else "fetch it"
        raise CheckpointError(f"{located.folder}: {MODEL_INDEX} names {', '.join(absent)}, no such folder; {step}")


def _with_plans(located: Located, listed: Mapping[str, tuple[str, str]], planner: Planner) -> list[str]:
    """The components whose class has a plan. Raises `CheckpointError` for a denoiser whose class is unknown."""
    planned = {
        name: planner.has_plan(library, cls, config_of(located.folder / name))
        for name, (library, cls) in listed.items()
    }
    for name, (library, cls) in listed.items():
        config = located.folder / name / CONFIG_NAME
        is_known = _is_denoiser((library, cls)) and name.startswith("transformer")
        if planned[name] is None and is_known and config.is_file():
            model_class(cls, read_config(config.parent)[0])  # raises
    return [name for name in listed if planned[name]]


def _named(
    located: Located, options: Options, planned: Sequence[str], listed: Mapping[str, tuple[str, str]]
) -> list[str]:
    """The components that `--only` names. Raises `PlanError` for one without a plan."""
    without = [name for name in options.only if name not in planned]
    if without:
        name, cls = without[0], listed[without[0]][1]
        raise PlanError(f"{located.folder / name}: its class, {cls}, has no plan; leave it whole")
    return [name for name in listed if name in options.only and name not in options.whole]


def _is_denoiser(component: tuple[str, str]) -> bool:
    """A model whose library lets its classes carry plans; sharding one was asked for by whoever converts it."""
    library = library_named(component[0])
    return library is not None and library.has_plans


def _saved_nbytes(folder: Path, options: Options) -> float:
    """Bytes that a rank need not hold when a component is cut."""
    library = library_named("transformers")
    assert library is not None
    names = [path.name for path in folder.iterdir()]
    found = select_files(names, options.variant, library.weight_stem, library.prefers_single)
    if found is None:
        return 0
    files = {str(found.single)} if found.index is None else set(read_index(folder / found.index).values())
    nbytes = sum((folder / name).stat().st_size for name in files if (folder / name).is_file())
    return nbytes * (1 - 1 / options.tp)


def _misfit(located: Located, name: str, options: Options, planner: Planner) -> str:
    """Why an encoder cannot be cut for this degree; "" when it can."""
    config, _ = read_config(located.folder / name)
    return "; ".join(planner.facts(config, OWN, options.tp).plan_issues[:1])


def _nothing(located: Located, listed: Mapping[str, tuple[str, str]]) -> str:
    classes = ", ".join(f"{name} ({cls})" for name, (_, cls) in listed.items())
    return (
        f"{located.folder}: no component has a class with a _tp_plan, found {classes or 'none'}; give a plan with "
        "--subfolder COMPONENT --plan FILE"
    )


def config_of(folder: Path) -> dict[str, Any]:
    """What a component's config says; nothing where there is none, or one that others report."""
    try:
        config = parse(read_bounded(folder / CONFIG_NAME), unique=False)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
