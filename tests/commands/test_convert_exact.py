"""Acceptance: what a set holds is, bit for bit, what torch and diffusers would slice from the same checkpoint."""

from __future__ import annotations

import functools
import json
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import safetensors
import safetensors.torch
import torch
import toys
from diffusers.hooks.tensor_parallel import (
    PackedColwiseParallel,
    PackedRowwiseParallel,
    _local_shard,
    resolve_tp_shard_specs,
)
from small_minimax import MINIMAX_PLAN, build_minimax

from shardconv import Manifest, PlanError, convert
from shardconv.format.plan import parse_plan
from shardconv.libraries.skeleton import skeleton, stored_tensors
from shardconv.plans.catalogue import small_models
from shardconv.plans.resolve import resolve

DEGREES = (1, 2, 4)
LAYOUTS = pytest.mark.parametrize("self_contained", [False, True], ids=["shared", "self-contained"])
MODELS = pytest.mark.parametrize("name", small_models.NAMES)
TP = pytest.mark.parametrize("tp", DEGREES)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each small model as an ordinary sharded diffusers folder; flux2 in bf16, the others in fp32."""
    folders = {}
    for name in small_models.NAMES:
        folder = tmp_path_factory.mktemp(name)
        model = small_models.build(name).to(torch.bfloat16 if name == "flux2" else torch.float32)
        model.save_pretrained(folder, max_shard_size="1MB")
        assert (folder / toys.INDEX).exists()
        folders[name] = folder
    return folders


@dataclass
class Case:
    """One model, its checkpoint and one set of it."""

    model: Any
    source: Path
    manifest: Manifest
    folder: Path  # of the set

    @functools.cached_property
    def whole(self) -> dict[str, torch.Tensor]:
        return source_tensors(self.source)

    @functools.cached_property
    def states(self) -> list[dict[str, torch.Tensor]]:
        return toys.rank_states(self.folder)


@pytest.fixture(scope="module")
def case(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Case]:
    """Converts a small model, once for all tests that ask for the same set."""
    model = functools.cache(small_models.build)

    @functools.cache
    def make(name: str, tp: int, self_contained: bool) -> Case:
        out = tmp_path_factory.mktemp("out")
        manifest = convert(sources[name], out, tp=tp, self_contained=self_contained)
        return Case(model(name), sources[name], manifest, out / f"tp{tp}")

    return make


def source_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of an ordinary checkpoint folder."""
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(path).items()
    }


def torch_slice(model: Any, plan: Mapping[str, Any], name: str, tensor: torch.Tensor, rank: int, tp: int) -> Any:
    """What `rank` holds of the parameter `name`, by nothing but the text of the plan and torch's split and chunk."""
    for pattern, style in plan.items():
        dots = re.escape(pattern).replace(r"\*", r"\d+")
        found = re.fullmatch(rf"({dots})\.(weight|bias)", name)
        if not found:
            continue
        module, leaf = model.get_submodule(found[1]), found[2]
        blocks = style.get("blocks") if isinstance(style, dict) else getattr(style, "blocks", None)
        if isinstance(style, PackedColwiseParallel) or (isinstance(style, dict) and style["style"] == "packed_colwise"):
            dim, blocks = 0, blocks or module._tp_packed_col_blocks
        elif isinstance(style, PackedRowwiseParallel):
            dim, blocks = 1, blocks or module._tp_packed_row_blocks
        else:
            dim, blocks = (0 if style == "colwise" else 1), [1]
        if leaf == "bias" and dim == 1:
            return tensor
        unit = tensor.shape[dim] // sum(blocks)
        parts = torch.split(tensor, [block * unit for block in blocks], dim)
        return torch.cat([part.chunk(tp, dim)[rank] for part in parts], dim)
    return tensor


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes."""
    return a.dtype == b.dtype and a.shape == b.shape and toys.raw(a) == toys.raw(b)


@dataclass
class StandInMesh:
    """The two questions that diffusers asks a device mesh when it slices."""

    rank: int
    degree: int

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.degree


@LAYOUTS
@TP
@MODELS
def test_every_slice_equals_plain_torch_slicing(
    case: Callable[..., Case], name: str, tp: int, self_contained: bool
) -> None:
    """Each rank holds of every parameter exactly the rows or columns that the plan says, to the bit."""
    made = case(name, tp, self_contained)
    plan = type(made.model)._tp_plan
    assert len(made.states) == tp
    for rank, state in enumerate(made.states):
        assert set(state) == set(made.whole)
        for key, tensor in made.whole.items():
            assert same(state[key], torch_slice(made.model, plan, key, tensor, rank, tp)), key


@pytest.mark.slow
@LAYOUTS
@TP
@MODELS
def test_every_slice_equals_what_diffusers_slices(
    case: Callable[..., Case], name: str, tp: int, self_contained: bool
) -> None:
    """Each rank holds what diffusers' own code, reading the same checkpoint lazily, would give that rank."""
    made = case(name, tp, self_contained)
    specs = resolve_tp_shard_specs(made.model, type(made.model)._tp_plan, tp)
    index = json.loads((made.source / toys.INDEX).read_text())["weight_map"]
    num_cut = 0
    for key, file_name in index.items():
        with safetensors.safe_open(made.source / file_name, "pt") as file:
            for rank, state in enumerate(made.states):
                spec = specs.get(key)
                if spec is None or spec.dim is None:
                    expected = file.get_tensor(key)
                else:
                    expected = _local_shard(file.get_slice(key), spec.dim, spec.block_sizes, StandInMesh(rank, tp))
                    num_cut += 1
                assert same(state[key], expected), key
    assert num_cut > 10 * tp


@TP
@MODELS
def test_a_set_holds_every_source_tensor_exactly_once(case: Callable[..., Case], name: str, tp: int) -> None:
    """With a shared file, a whole tensor stands in one file, a cut one in a slice per rank, and no byte is double."""
    made = case(name, tp, False)
    files = {path.name: toys.read_weights(path) for path in made.folder.glob("*.safetensors")}
    assert set(files) == {f"rank-{r:05d}-of-{tp:05d}.safetensors" for r in range(tp)} | {"replicated.safetensors"}
    cut = {tensor.name for tensor in made.manifest.tensors if tensor.cut is not None}
    for key in made.whole:
        holders = {file for file, tensors in files.items() if key in tensors}
        assert holders == (set(files) - {"replicated.safetensors"} if key in cut else {"replicated.safetensors"})
    held = sum(len(data) for tensors in files.values() for _, _, data in tensors.values())
    assert held == sum(tensor.nbytes for tensor in made.whole.values())


@TP
@MODELS
def test_a_self_contained_set_holds_every_whole_tensor_once_per_rank(
    case: Callable[..., Case], name: str, tp: int
) -> None:
    """With `self_contained` there is one file a rank and nothing else, and each holds every name of the model."""
    made = case(name, tp, True)
    whole = made.whole
    files = {path.name: toys.read_weights(path) for path in made.folder.glob("*.safetensors")}
    assert set(files) == {f"rank-{rank:05d}-of-{tp:05d}.safetensors" for rank in range(tp)}
    assert all(set(tensors) == set(whole) for tensors in files.values())
    replicated = sum(whole[tensor.name].nbytes for tensor in made.manifest.tensors if tensor.cut is None)
    held = sum(len(data) for tensors in files.values() for _, _, data in tensors.values())
    assert held == sum(tensor.nbytes for tensor in whole.values()) + (tp - 1) * replicated


@pytest.mark.slow
@LAYOUTS
@MODELS
def test_a11_two_conversions_are_byte_identical(
    case: Callable[..., Case], tmp_path: Path, name: str, self_contained: bool
) -> None:
    """Converting the same source twice gives the same bytes in every file, manifest included."""
    made = case(name, 2, self_contained)
    convert(made.source, tmp_path, tp=2, self_contained=self_contained)
    first = toys.contents(tmp_path)
    assert first == toys.contents(made.folder.parent)
    assert {"config.json", "tp2", "tp2/shardconv.json"} < set(first)


@LAYOUTS
@MODELS
def test_any_safetensors_reader_opens_every_file(case: Callable[..., Case], name: str, self_contained: bool) -> None:
    """Every weight file of a set is plain safetensors with `format: pt`, as other readers want it."""
    paths = list(case(name, 2, self_contained).folder.glob("*.safetensors"))
    assert len(paths) == (2 if self_contained else 3)
    for path in paths:
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert all(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118 (no mapping)


@pytest.mark.parametrize(("mask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700),
                                                                (0o002, 0o664, 0o775)])  # fmt: skip
def test_e11_file_modes_follow_the_umask(
    sources: dict[str, Path], tmp_path: Path, mask: int, file_mode: int, folder_mode: int
) -> None:
    """Everything written has the mode that the umask of the person who converts gives."""
    out = tmp_path / "deep" / "out"
    with toys.umask(mask):
        convert(sources["qwenimage21"], out, tp=2)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [out.parent, out, *out.rglob("*")]}
    assert len(modes) == 8
    assert {modes[path] for path in modes if path.is_file()} == {file_mode}
    assert {modes[path] for path in modes if path.is_dir()} == {folder_mode}


@MODELS
def test_config_json_is_copied_byte_for_byte(case: Callable[..., Case], name: str) -> None:
    """OUT stays an ordinary component folder: its config.json is the source's, unchanged."""
    made = case(name, 2, False)
    assert (made.folder.parent / "config.json").read_bytes() == (made.source / "config.json").read_bytes()


@MODELS
def test_contract_the_resolver_agrees_with_diffusers(name: str) -> None:
    """For every parameter of every supported class, our resolver and diffusers' name the same dim and blocks."""
    model = small_models.build(name)
    for tp in DEGREES:
        theirs = resolve_tp_shard_specs(model, type(model)._tp_plan, tp)
        ours = resolve(model, parse_plan(type(model)._tp_plan, "plan"), tp).cuts
        assert {key: (cut.dim, list(cut.block_sizes)) if cut else (None, None) for key, (_, cut) in ours.items()} == {
            key: (spec.dim, spec.block_sizes) for key, spec in theirs.items()
        }


@pytest.mark.slow
@MODELS
def test_contract_the_resolver_refuses_what_diffusers_refuses(name: str) -> None:
    """A degree at which diffusers would cut a block unevenly is refused here too."""
    model = small_models.build(name)
    plan = parse_plan(type(model)._tp_plan, "plan")
    refused = []
    for tp in range(1, 17):
        try:
            resolve_tp_shard_specs(model, type(model)._tp_plan, tp)
        except ValueError:
            refused.append(tp)
            with pytest.raises(PlanError, match=f"not divisible by tp degree {tp}"):
                resolve(model, plan, tp)
    assert {3, 5, 7} < set(refused)


@pytest.mark.slow
@LAYOUTS
@TP
def test_a_plan_for_minimax_h3_slices_as_torch_does(tmp_path: Path, tp: int, self_contained: bool) -> None:
    """A class without a `_tp_plan` is cut by a given one: packed halves each on their own, rowwise biases whole."""
    model = build_minimax()
    model.save_pretrained(tmp_path / "in", max_shard_size="1MB")
    convert(tmp_path / "in", tmp_path / "out", tp=tp, plan=MINIMAX_PLAN, self_contained=self_contained)
    whole = source_tensors(tmp_path / "in")
    styles = set()
    for rank, state in enumerate(toys.rank_states(tmp_path / "out" / f"tp{tp}")):
        assert set(state) == set(whole)
        for key, tensor in whole.items():
            expected = torch_slice(model, MINIMAX_PLAN, key, tensor, rank, tp)
            assert same(state[key], expected), key
            styles.add(expected.shape == tensor.shape)
    assert styles == ({True} if tp == 1 else {True, False})


@pytest.mark.slow
def test_contract_the_skeleton_has_the_names_and_shapes_of_the_real_model() -> None:
    """The meta-device model that conversions are checked against has the state dict of the real one, to the shape."""
    for name in small_models.NAMES:
        real = small_models.build(name)
        built = skeleton(getattr(diffusers, small_models.class_name(name)), dict(real.config))
        assert all(parameter.is_meta for parameter in built.parameters())
        assert stored_tensors(built) == {key: tuple(t.shape) for key, t in real.state_dict().items()}
