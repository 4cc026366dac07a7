"""The one rule for links: a person's are followed, a download's must not lead out of it.

Until now every link out of a component's folder was refused, in a source and in a set. That kept nobody from linking a
whole component, and refused what older clients of the Hub made of `--local-dir`; so the rule asks where a link stands.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import git_indexes
import pytest
import small_sets
import toys
from stand_in_hub import StandInHub
from toys import INDEX, SHARDS

import loader
import shardconv
from shardconv import CheckpointError, Manifest, SetError
from shardconv.cli.main import main
from shardconv.system import links
from shardconv.system.gitindex import tracked_links

COMMIT = "c" * 40
OUTSIDE = "a link that leads out of its folder, to {}; put the file itself there"


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toys.install(monkeypatch)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of the toy model, a text encoder and a VAE of a few bytes; tests work on copies."""
    folder = tmp_path_factory.mktemp("links") / "pipe"
    toys.save(toys.build(toys.ToyTransformer), folder / "transformer")
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", toys.NAME],
             "text_encoder": ["transformers", "T5EncoderModel"], "vae": ["diffusers", "AutoencoderKL"]}  # fmt: skip
    (folder / "model_index.json").write_text(json.dumps(index))
    for name in ("text_encoder/config.json", "text_encoder/model.safetensors", "text_encoder/more/vocab.txt",
                 "vae/config.json", "vae/diffusion_pytorch_model.safetensors", "LICENSE"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'{{"of": "{name}"}}')
    return folder


@pytest.fixture
def pipe(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "pipe"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in links.files_in(folder)}


def link(path: Path, target: Path, *, relative: bool = False) -> None:
    """Move what is at `path` to `target`, and leave a link to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path.rename(target)
    path.symlink_to(os.path.relpath(target, path.parent) if relative else target)


def whole_folders(pipe: Path, elsewhere: Path) -> None:
    for name in ("transformer", "text_encoder", "vae"):
        link(pipe / name, elsewhere / name, relative=name == "vae")


def every_file(pipe: Path, elsewhere: Path) -> None:
    for name in contents(pipe):
        link(pipe / name, elsewhere / name)


def one_file_of_each(pipe: Path, elsewhere: Path) -> None:
    for name in (f"transformer/{SHARDS[1]}", "transformer/config.json", f"transformer/{INDEX}", "LICENSE",
                 "text_encoder/model.safetensors", "vae/config.json", "model_index.json"):  # fmt: skip
        link(pipe / name, elsewhere / name.replace("/", "-"))


def a_folder_within(pipe: Path, elsewhere: Path) -> None:
    link(pipe / "text_encoder" / "more", elsewhere / "more")


def a_chain(pipe: Path, elsewhere: Path) -> None:
    link(pipe / "vae", elsewhere / "vae")
    link(elsewhere / "vae" / "config.json", elsewhere / "further" / "config.json")


def local_dir_of_an_older_client(pipe: Path, elsewhere: Path) -> None:
    """What `huggingface-cli download --local-dir` left before version 0.23: links into the blobs of a cache."""
    for position, name in enumerate(contents(pipe)):
        blob = elsewhere / "hub" / "models--org--tiny" / "blobs" / f"{position:064x}"
        link(pipe / name, blob, relative=position % 2 == 0)


def a_component_of_a_snapshot(pipe: Path, elsewhere: Path) -> None:
    """A person's link to a folder in the cache, whose files are links of the client."""
    repo = elsewhere / "hub" / "models--org--tiny"
    link(pipe / "text_encoder", repo / "snapshots" / COMMIT / "text_encoder")
    link(repo / "snapshots" / COMMIT / "text_encoder" / "config.json", repo / "blobs" / "0123", relative=True)


def through_a_linked_cache(pipe: Path, elsewhere: Path) -> None:
    """As before, where the blobs are on another disk."""
    a_component_of_a_snapshot(pipe, elsewhere)
    link(elsewhere / "hub" / "models--org--tiny" / "blobs", elsewhere / "large" / "blobs")


PERSONS: list[Callable[[Path, Path], None]] = [
    whole_folders, every_file, one_file_of_each, a_folder_within, a_chain, local_dir_of_an_older_client,
    a_component_of_a_snapshot, through_a_linked_cache,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("make", PERSONS, ids=lambda make: make.__name__)
def test_a_persons_links_are_followed(pipe: Path, pristine: Path, tmp_path: Path, make: Callable[..., None]) -> None:
    """Whatever a person has linked, the conversion is that of the files themselves, and OUT holds files."""
    make(pipe, tmp_path / "elsewhere")
    shardconv.convert(pristine, tmp_path / "expected", tp=2)
    shardconv.convert(pipe, tmp_path / "out", tp=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


def test_what_links_bring_in_is_said(pipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line tells how many files OUT gets from elsewhere: they go with it wherever it is published."""
    a_folder_within(pipe, tmp_path / "elsewhere")
    assert main(["convert", "--tp", "2", str(pipe), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == (
        f"{pipe}: 1 of its files come by links from elsewhere, such as text_encoder/more/vocab.txt from "
        f"{tmp_path / 'elsewhere' / 'more' / 'vocab.txt'}\n"
    )


# --- what a download brings ---


def a_clone(pipe: Path) -> Path:
    """The pipeline as `git clone` makes it."""
    git_indexes.make_clone(pipe)
    return pipe


def a_clone_in_the_dark(pipe: Path) -> Path:
    """One whose index cannot be read."""
    (pipe / ".git").write_text("gitdir: ../.git/modules/pipe\n")
    return pipe


def a_snapshot(pipe: Path) -> Path:
    """The pipeline in a Hub cache, its files in the blobs."""
    repo = pipe.parent / "hub" / "models--org--tiny"
    snapshot = repo / "snapshots" / COMMIT
    for position, name in enumerate(contents(pipe)):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (pipe / name).rename(snapshot / name)
        link(snapshot / name, repo / "blobs" / f"{position:064x}", relative=True)
    return snapshot


DOWNLOADS = [a_clone, a_clone_in_the_dark, a_snapshot]
UNTRACKED = [a_clone_in_the_dark, a_snapshot]  # where every link out is a stranger's
downloads = pytest.mark.parametrize("download", DOWNLOADS, ids=lambda make: make.__name__)


@downloads
def test_a_download_as_it_is_converts(
    pipe: Path, pristine: Path, tmp_path: Path, download: Callable[..., Path]
) -> None:
    """Links within a download are no way out: those of the cache, and one from a component to another."""
    source = download(pipe)
    (source / "vae" / "LICENSE").symlink_to("../LICENSE")
    shardconv.convert(source, tmp_path / "out", tp=2)
    assert (tmp_path / "out" / "vae" / "LICENSE").read_bytes() == (pristine / "LICENSE").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("download", "name"),
    [
        *((a_clone, name) for name in sorted(git_indexes.TRACKED_LINKS)),
        *(
            (download, name)
            for download in UNTRACKED
            for name in ("vae/notes.txt", "text_encoder/config.json", "LICENSE", "model_index.json",
                         "transformer/config.json", f"transformer/{INDEX}", f"transformer/{SHARDS[1]}")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)  # fmt: skip
def test_h1_a_file_that_a_download_links_from_elsewhere_is_refused(
    pipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], download: Callable[..., Path], name: str
) -> None:
    """Were it followed, a stranger's link would publish this person's keys, or the weights of a private model."""
    source, secret = download(pipe), tmp_path / "secret" / "id_rsa"
    if not (source / name).exists():
        (source / name).write_text("private")
    real = Path(os.path.realpath(source / name))
    secret.parent.mkdir()
    real.rename(secret)
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(os.path.relpath(secret, (source / name).parent))
    message = toys.refused(capsys, CheckpointError, source, tmp_path / "out", root=tmp_path, tp=2)
    assert OUTSIDE.format(secret) in message
    assert Path(name).name in message


@pytest.mark.slow
@pytest.mark.parametrize("download", UNTRACKED, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae/keys"])
def test_h1_a_folder_that_a_download_links_from_elsewhere_is_refused(
    pipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], download: Callable[..., Path], name: str
) -> None:
    """The same for a whole folder; what is in it is not so much as listed."""
    source = download(pipe)
    if (source / name).exists():
        (source / name).rename(tmp_path / "elsewhere")
    else:
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "id_rsa").write_text("private")
    (source / name).symlink_to(tmp_path / "elsewhere")
    message = toys.refused(capsys, CheckpointError, source, tmp_path / "out", root=tmp_path, tp=2)
    assert "a link that leads out of its folder, to " in message
    assert "id_rsa" not in message


@pytest.mark.slow
@pytest.mark.parametrize("make", PERSONS, ids=lambda make: make.__name__)
def test_what_a_person_links_in_a_clone_is_followed(
    pipe: Path, pristine: Path, tmp_path: Path, make: Callable[..., None]
) -> None:
    """Links that git does not keep were made here, such as those to weights that the clone left out."""
    make(pipe, tmp_path / "elsewhere")
    if (pipe / "LICENSE").is_symlink():  # which this clone would have brought
        link(pipe / "LICENSE", pipe / "words", relative=True)
        (pipe / "words").unlink()
        (pipe / "words").write_bytes((pristine / "LICENSE").read_bytes())
    a_clone(pipe)
    shardconv.convert(pristine, tmp_path / "expected", tp=2)
    shardconv.convert(pipe, tmp_path / "out", tp=2)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


@pytest.mark.parametrize("kind", git_indexes.INDEXES)
def test_contract_the_links_of_a_clone_are_told_by_its_index(tmp_path: Path, kind: str) -> None:
    """Whatever version git writes, and whatever it names its objects by."""
    git_indexes.make_clone(tmp_path, kind)
    assert tracked_links(tmp_path) == git_indexes.TRACKED_LINKS
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / ".git").write_text(f"gitdir: {tmp_path / '.git'}\n")
    assert tracked_links(tmp_path / "tree") == git_indexes.TRACKED_LINKS


@pytest.mark.parametrize("harm", [lambda data: data[:-150], lambda data: b"", lambda data: b"DIRX" + data[4:],
                                  lambda data: data[:7] + b"\5" + data[8:]])  # fmt: skip
def test_an_index_that_cannot_be_read_tells_nothing(tmp_path: Path, harm: Callable[[bytes], bytes]) -> None:
    """Cut short, empty, of another kind or of a version to come: nobody's links are taken for known."""
    git_indexes.make_clone(tmp_path)
    index = tmp_path / ".git" / "index"
    index.write_bytes(harm(index.read_bytes()))
    assert tracked_links(tmp_path) is None


def test_h1_a_persons_link_to_a_download_does_not_open_it(
    pipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A component linked from a clone is followed as far as the clone, not through a link that the clone brought."""
    clone = tmp_path / "clone"
    link(pipe / "vae", clone / "vae")
    git_indexes.make_clone(clone)
    (tmp_path / "id_rsa").write_text("private")
    (clone / "vae" / "notes.txt").symlink_to("../../id_rsa")
    message = toys.refused(capsys, CheckpointError, pipe, tmp_path / "out", root=tmp_path, tp=2)
    assert message == f"vae/notes.txt: {OUTSIDE.format(tmp_path / 'id_rsa')}"


def test_a_project_under_git_is_a_persons(pipe: Path, tmp_path: Path) -> None:
    """A project around the pipeline, that git knows nothing of its links, does not make them a stranger's."""
    git_indexes.make_clone(tmp_path)
    whole_folders(pipe, tmp_path.parent / f"{tmp_path.name}-elsewhere")
    shardconv.convert(pipe, tmp_path / "out", tp=2)


def test_h1_a_snapshot_may_not_take_the_files_of_another_repo(pipe: Path, tmp_path: Path) -> None:
    """Neither its blobs nor its snapshots, in the same cache."""
    snapshot = a_snapshot(pipe)
    other = snapshot.parents[2] / "models--org--private"
    for place in (other / "blobs" / "0123", other / "snapshots" / COMMIT / "config.json"):
        place.parent.mkdir(parents=True)
        place.write_text("{}")
        (snapshot / "vae" / "config.json").unlink()
        (snapshot / "vae" / "config.json").symlink_to(place)
        with pytest.raises(CheckpointError, match=r"vae/config\.json: a link that leads out of its folder, to "):
            shardconv.convert(snapshot, tmp_path / "out", tp=2)


# --- links that lead nowhere ---


@pytest.mark.parametrize("target", ["gone", "config.json"], ids=["dangling", "itself"])
def test_a_link_that_leads_nowhere_is_told(pipe: Path, tmp_path: Path, target: str) -> None:
    """A blob that was cleared away would otherwise be missing from OUT without a word."""
    (pipe / "vae" / "config.json").unlink()
    (pipe / "vae" / "config.json").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"^vae/config\.json: a link that leads nowhere, to .*; fetch the file$"):
        shardconv.convert(pipe, tmp_path / "out", tp=2)


def test_links_in_a_circle_are_walked_once(pipe: Path, tmp_path: Path) -> None:
    """A folder that links back to itself, or two that link to each other, bring each file along once and end."""
    (pipe / "vae" / "again").symlink_to(".")
    (pipe / "text_encoder" / "vae").symlink_to("../vae")
    (pipe / "vae" / "text_encoder").symlink_to("../text_encoder")
    found = sorted(str(path.relative_to(pipe / "vae")) for path in links.files_in(pipe / "vae"))
    assert found == [
        "config.json", "diffusion_pytorch_model.safetensors", "text_encoder/config.json",
        "text_encoder/model.safetensors", "text_encoder/more/vocab.txt",
    ]  # fmt: skip
    shardconv.convert(pipe, tmp_path / "out", tp=2)


# --- sets ---


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A component folder with a set for one process."""
    return small_sets.copied(small_sets.converted("qwenimage", 1), tmp_path / "out")


def link_set(out: Path, way: str) -> None:
    """Its files, its folder, or all of the component linked."""
    if way == "files":
        for position, path in enumerate([*sorted((out / "tp1").iterdir()), out / "config.json"]):
            link(path, out.parent / "elsewhere" / str(position))
    elif way == "local-dir":
        for position, path in enumerate([*sorted((out / "tp1").iterdir()), out / "config.json"]):
            link(path, out.parent / "hub" / "models--org--set" / "blobs" / str(position), relative=True)
    else:
        link(out / "tp1" if way == "folder" else out, out.parent / "elsewhere")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["files", "local-dir", "folder", "component"])
def test_a_set_that_a_person_linked_loads(out: Path, tmp_path: Path, way: str) -> None:
    """Rank files on a faster disk, and what older clients left: loaded, verified and merged as ever."""
    link_set(out, way)
    loader.load_model(out, device="cpu", verify=True)
    shardconv.verify(out)
    shardconv.merge(out, tmp_path / "merged")
    shardconv.reshard(out, tmp_path / "resharded", tp=2)


def test_a_link_to_a_set_alone_finds_its_config(out: Path, tmp_path: Path) -> None:
    """A link somewhere else to `tp1`, under whatever name: the config beside the folder itself goes with it."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "mine").symlink_to(out / "tp1")
    loader.load_model(tmp_path / "links" / "mine", device="cpu", verify=True)
    shardconv.verify(tmp_path / "links" / "mine")
    shardconv.merge(tmp_path / "links" / "mine", tmp_path / "merged")
    shardconv.reshard(tmp_path / "links" / "mine", tmp_path / "resharded", tp=2)


@pytest.mark.parametrize("name", ["tp1/shardconv.json", "tp1/rank-00000-of-00001.safetensors", "config.json"])
def test_h1_a_set_of_a_clone_must_hold_its_files(out: Path, name: str) -> None:
    """The manifest, a rank file or the config that a clone links from elsewhere is refused."""
    a_clone_in_the_dark(out)
    link(out / name, out.parent / "elsewhere" / "file")
    for use in (lambda: loader.load_model(out, device="cpu"), lambda: shardconv.verify(out)):
        with pytest.raises((SetError, CheckpointError), match="a link that leads out of its folder, to "):
            use()


def test_a_manifest_is_read_by_the_same_rule(out: Path) -> None:
    """`Manifest.read` follows a person's link and not a clone's."""
    link(out / "tp1" / "shardconv.json", out.parent / "elsewhere")
    assert Manifest.read(out / "tp1").tp_degree == 1
    a_clone_in_the_dark(out)
    with pytest.raises(SetError, match=r"shardconv\.json: a link that leads out of its folder"):
        Manifest.read(out / "tp1")


# --- push ---


@pytest.mark.parametrize("name", ["config.json", "tp1/rank-00000-of-00001.safetensors", "LICENSE"])
def test_h1_push_sends_nothing_through_a_link_that_leads_out(
    hub: StandInHub, client: dict[str, str], out: Path, name: str
) -> None:
    """Whoever made the link: what was published cannot be taken back. A link within the folder is sent as a file."""
    (out / "LICENSE").write_text("words")
    link(out / name, out.parent / "elsewhere")
    with pytest.raises(
        SetError, match=f"^{name}: a link that leads out of {out}, to {out.parent / 'elsewhere'}; not sent$"
    ):
        shardconv.push(out, "org/set")
    assert hub.log == []
    (out.parent / "elsewhere").rename(out / "kept")
    (out / name).unlink()
    (out / name).symlink_to(os.path.relpath(out / "kept", (out / name).parent))
    shardconv.push(out, "org/set")
    assert hub.repos["org/set"].files()[name].data == (out / "kept").read_bytes()
