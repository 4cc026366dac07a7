"""Tokens: taken as people have them, and never shown, in whatever form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hub_clients
import huggingface_hub
import pytest
import small_sets
from stand_in_hub import Repo, StandInHub

import loader
import shardconv
from shardconv import HubError, UsageError
from shardconv.remote.tokens import without_secrets

REPO = "org/tiny-tp"
SOURCE = "their/flux"
RANK = "transformer/tp1/rank-00000-of-00001.safetensors"


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def filled(hub: StandInHub, client: Any) -> Repo:
    """A repo whose component `transformer` has a set for one rank."""
    out = small_sets.converted("flux", 1)
    paths = [path for path in out.rglob("*") if path.is_file()]
    return hub.add_repo(REPO, {f"transformer/{path.relative_to(out)}": path.read_bytes() for path in paths})


def load(**options: Any) -> Any:
    """The model of the repo, in this process."""
    return loader.load_model(REPO, device="cpu", subfolder="transformer", **options)


@pytest.mark.slow
@pytest.mark.parametrize("token", ["hf_alice\n", "  hf_alice \r\n", "hf_alice"])
def test_a_token_out_of_a_file_is_taken(hub: StandInHub, filled: Repo, token: str, monkeypatch: Any) -> None:
    """What a file or a variable has around a token does not matter."""
    monkeypatch.delenv("HF_TOKEN")
    filled.private = True
    load(token=token)
    assert {request.user for request in hub.log if "/storage/" not in request.path} == {"alice"}


@pytest.mark.parametrize("token", ["", " \n", None, True])
def test_no_token_is_the_saved_one(hub: StandInHub, filled: Repo, token: Any) -> None:
    """An empty token, None and True stand for the one that is saved."""
    filled.private = True
    load(token=token)


def test_false_sends_none(hub: StandInHub, filled: Repo) -> None:
    """`token=False` asks as nobody."""
    load(token=False)
    assert {request.user for request in hub.log} == {""}
    filled.private = True
    with pytest.raises(HubError, match="log in"):
        load(token=False, revision="main")


def test_true_without_a_saved_one_says_how_to_log_in(hub: StandInHub, filled: Repo, monkeypatch: Any) -> None:
    """`token=True` where nobody is logged in, and any error with it, is an ordinary error of the Hub."""
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="hf auth login"):
        load(token=True)
    with pytest.raises(HubError, match="hf auth login"):
        shardconv.push(small_sets.converted("flux", 1), REPO, token=True)


@pytest.mark.parametrize("token", ["hf_ab\ncdefghi", "hf_abcd efghi", "hf_abcdefghü"])
def test_a_token_that_cannot_be_sent_is_not_quoted(filled: Repo, token: str) -> None:
    """What no header can hold is refused before anything is asked, and no part of it is printed."""
    with pytest.raises(UsageError, match=r"^token: expected printable ASCII") as caught:
        load(token=token)
    for part in token.split():
        assert part not in str(caught.value)


@pytest.mark.parametrize("secret", ["hf_secret12345", "plain/se+cret=7", "tok'en\"9\\8"])
def test_a_secret_is_blotted_out_in_every_form(secret: str) -> None:
    """As it is, as Python prints it in text and in bytes, in a URL, with a newline, twice in a line."""
    from base64 import b64encode
    from urllib.parse import quote

    line = f"{secret + chr(10)!r} {secret.encode()!r} {secret!r} {quote(secret, safe='')} {b64encode(secret.encode())}"
    told = without_secrets(f"Bearer {secret}: {line} {secret}{secret}", (f"{secret}\n",))
    for form in (secret, repr(secret)[1:-1], quote(secret, safe=""), b64encode(secret.encode()).decode()):
        assert form not in told
    assert "***" in told


def test_an_unknown_token_is_blotted_out_too() -> None:
    """What looks like a token of the Hub is never printed, whoever's it is, nor passwords in addresses and signed
    queries; other words, and repos that are called so, stay."""
    words = "hf_hub_download org/hf_internal_testing_model hf_transfer1"
    assert without_secrets(f"b'Bearer hf_AbCdEfGh12' {words} hf_{'aB3' * 11}", ()) == f"b'***' {words} ***"
    address = "https://me:word@mirror.org/x?X-Signature=abc&Expires=1 http://127.0.0.1:80/y"
    assert without_secrets(address, ()) == "https://***@mirror.org/x?*** http://127.0.0.1:80/y"


@pytest.mark.parametrize("before", ["", "a", "me", "you"])
@pytest.mark.parametrize("behind", ["", "\n", ":x"])
def test_a_secret_is_blotted_out_in_base64(before: str, behind: str) -> None:
    """Wherever it stands in what was encoded, in either alphabet: nothing of it can be read back."""
    from base64 import b64encode, urlsafe_b64encode

    secret = "hf_a?b>c~9"
    for encode in (b64encode, urlsafe_b64encode):
        coded = encode(f"{before}:{secret}{behind}".encode()).decode()
        assert without_secrets(f"Basic {coded}, says x", (secret,)) == "Basic ***, says x"


@pytest.mark.parametrize("token", [5, b"hf_alice", ["hf_alice"]])
def test_a_token_of_another_kind_is_refused(filled: Repo, token: Any) -> None:
    """Bytes, numbers and lists are no token, and are not quoted."""
    with pytest.raises(
        UsageError, match=r"^token: expected text, True, False or None, found (int|bytes|list)"
    ) as caught:
        load(token=token)
    assert "alice" not in str(caught.value)


@pytest.mark.slow
def test_a_saved_token_that_cannot_be_had_is_said(hub: StandInHub, filled: Repo, client: Any, monkeypatch: Any) -> None:
    """The file of the login cannot be read, or HF_TOKEN holds what cannot be sent: one sentence, nothing is asked; with
    a token given, and offline, it does not matter."""
    load()
    hub.log.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_\u00e4lice")
    with pytest.raises(HubError, match="holds what no token does; copy it again: hf auth login") as caught:
        load()
    assert "lice" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    Path(client["HF_HOME"], "token").mkdir()
    with pytest.raises(HubError, match=r"the saved token cannot be had \(.*/token: Is a directory\); log in"):
        load()
    assert hub.log == []
    load(token="hf_alice")
    load(token=False)
    load(local_files_only=True)


def test_pushing_without_a_token_makes_no_sense(hub: StandInHub, client: Any) -> None:
    """`token=False`, or one that cannot be sent, is refused before anything is read."""
    for token, words in ((False, "without one nothing can be pushed"), ("hf_a b", "expected printable ASCII")):
        with pytest.raises(UsageError, match=f"^token: .*{words}"):
            shardconv.push("nowhere", REPO, token=token)


def chain(error: BaseException | None) -> list[str]:
    """The texts of an error and of all that led to it, shown or not."""
    said = []
    while error is not None:
        said += [str(error), repr(error), *map(str, getattr(error, "__notes__", ()))]
        error = error.__cause__ or error.__context__
    return said


@pytest.mark.parametrize("status", [403, 418])
def test_nothing_raised_with_an_error_shows_a_token(
    hub: StandInHub, filled: Repo, client: Any, monkeypatch: Any, status: int
) -> None:
    """A server that repeats the tokens that it could know: the one given, that of HF_TOKEN and the saved one."""
    Path(client["HF_HOME"]).mkdir()
    Path(client["HF_HOME"], "token").write_text("hf_saved12\n")
    hub.users["hf_given34"] = hub.users["hf_alice"]
    secrets = ("hf_given34", "hf_alice", "hf_saved12")
    hub.fail("GET", "/api/models/", status=status, text=f"no {' '.join(secrets)}")
    with pytest.raises(HubError) as caught:
        load(token="hf_given34\n")
    assert not [text for text in chain(caught.value) for secret in secrets if secret in text]


def test_an_unforeseen_fault_comes_with_its_traceback(hub: StandInHub, filled: Repo, monkeypatch: Any) -> None:
    """What the client did is there for SHARDCONV_DEBUG=1, without the token in it."""

    def fail(*args: Any, **options: Any) -> None:
        raise LookupError("hf_alice did what nobody foresaw")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(HubError, match=r"the Hub's client failed \(LookupError: \*\*\* did what") as caught:
        load()
    assert "in fail\n" in str(caught.value.__cause__)
    assert not [text for text in chain(caught.value) if "hf_alice" in text]


@pytest.mark.slow
def test_no_traceback_shows_a_token(hub: StandInHub, tmp_path: Path) -> None:
    """With SHARDCONV_DEBUG=1 the whole traceback of a failed request is free of the token."""
    settings = hub.settings(tmp_path, token="hf_mallory_12345") | {"SHARDCONV_DEBUG": "1"}
    done = hub_clients.command(settings, "convert", "--tp", "2", "org/nope", tmp_path / "out")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "mallory" not in done.stderr
