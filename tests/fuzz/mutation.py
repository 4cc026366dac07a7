"""Broken inputs made from sound ones: JSON changed as a tree, files as bytes, folders as lists of files.

A case is a folder: file name -> content. A mutation gives a new case; nothing here knows what the files are for, except
that a name ending in `.safetensors` has an 8-byte length and JSON at its head.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

Case = Mapping[str, bytes]

MAX_NBYTES = 1 << 18  # of one file; repetition stops there
HUGE = (2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -1, -(2**63), 65535, 65536, 65537)
TEXTS = (
    "", ".", "..", "/", "../x.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b.safetensors", "\0", "a\nb: c",
    "\x1b[2J", "\ud800", "\udc80", "\udfff.safetensors", "\u202e", "\ufeff", "é", "e\u0301", "💥", "x" * 300,
    "x" * 300 + ".safetensors", "b.safetensors", "replicated.safetensors", "rank-00000-of-00002.safetensors",
    "shardconv.json", "__metadata__", "F32", "F4", "F6_E2M3", "F8_E8M0", "C64", "BF16", "f32", "colwise", "rowwise",
    "packed_colwise", "replicated", "diagonal", "1", "-0", "None", "0" * 32,
)  # fmt: skip


class Raw(str):
    """A piece of JSON text that json.dumps would not write."""

    __slots__ = ()


class Pairs(list[Any]):
    """An object as a list of (key, value): a key may stand twice."""

    __slots__ = ()


_ODD = (
    "NaN", "Infinity", "-Infinity", "1e999", "-0", "0.0", "1.0", "1E2", "01", "'a'", "tru", "9" * 5000, "/**/1", "[1,]",
    '"\\ud800"', '"\\u0000"', '"\x01"', "1" + "0" * 4000, "[" * 2000,
    *("[" * depth + "]" * depth for depth in (60, 70, 200, 900, 940, 960, 970, 980, 2000)),
    *('{"a":' * depth + "1" + "}" * depth for depth in (60, 70, 200, 940, 970, 2000)),
)  # fmt: skip
RAWS = tuple(map(Raw, _ODD))


def _scalar(rng: random.Random) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(HUGE), lambda: rng.randrange(-2, 10), lambda: rng.choice(TEXTS), lambda: rng.choice(TEXTS),
        lambda: rng.choice(RAWS),
        lambda: rng.choice([None, True, False, 1.0, 0.5, -0.0, 1e300]), lambda: [], lambda: Pairs(), lambda: [0, 0],
    ]  # fmt: skip
    return rng.choice(kinds)()


def load(text: bytes) -> Any:
    """A tree of Pairs, lists and scalars. Raises ValueError or RecursionError."""
    return json.loads(text.decode("utf-8"), object_pairs_hook=Pairs)


def dump(value: Any) -> str:
    """The text of a tree; the opposite of `load`, but for what only `Raw` can say."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{dump(key)}:{dump(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


def _places(tree: Any, found: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """(container, position) of every value below `tree`."""
    if isinstance(tree, list):
        for position, item in enumerate(tree):
            found.append((tree, position))
            _places(item[1] if isinstance(tree, Pairs) else item, found)
    return found


def _put(holder: Any, position: int, value: Any) -> None:
    holder[position] = (holder[position][0], value) if isinstance(holder, Pairs) else value


def _get(holder: Any, position: int) -> Any:
    return holder[position][1] if isinstance(holder, Pairs) else holder[position]


def _near(value: Any, rng: random.Random) -> Any:
    """A value of the same kind, a little off."""
    if type(value) is int:
        return rng.choice([value + 1, value - 1, value * 2, -value, value + 2**62, value + 256, value // 2])
    if isinstance(value, str) and value:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(["", "\0", "é", "\ud800", "/", "..", "0", "\n", value]) + value[at + 1 :]
    return _scalar(rng)


def _change_tree(tree: Any, rng: random.Random) -> Any:
    places = _places(tree, [])
    if not places:
        return _scalar(rng)
    holder, position = rng.choice(places)
    value = _get(holder, position)
    match rng.randrange(11):
        case 0:
            del holder[position]
        case 1:
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[position]))
        case 2:
            _put(holder, position, _near(value, rng))
        case 3:
            _put(holder, position, rng.choice([[value], Pairs([("a", value)]), [value, copy.deepcopy(value)]]))
        case 4:
            _put(holder, position, copy.deepcopy(_get(*rng.choice(places))))
        case 5:
            other = rng.randrange(len(holder))
            holder[position], holder[other] = holder[other], holder[position]
        case 6 if isinstance(holder, Pairs):
            key = holder[position][0]
            holder[position] = (rng.choice([rng.choice(TEXTS), str(_near(key, rng)), holder[0][0]]), value)
        case 7 if isinstance(value, list) and value:
            _repeat(value, rng)
        case _:
            _put(holder, position, _scalar(rng))
    return tree


def _repeat(value: list[Any], rng: random.Random) -> None:
    """Lengthen a list by one of its own items, object keys made different. Copies: aliases would multiply later."""
    item = rng.choice(value)
    times = min(
        rng.choice([1, 3, 9, 30, 100, 100, 20_000]),
        MAX_NBYTES // (len(dump(item if isinstance(item, (str, list)) else [item])) + 9),
    )
    if isinstance(value, Pairs):
        value.extend((f"{item[0]}{position}", copy.deepcopy(item[1])) for position in range(times))
    else:
        value.extend(copy.deepcopy(item) for _ in range(times))


def change_json(text: bytes, rng: random.Random) -> bytes:
    """JSON changed in one to three places of its tree; as bytes when it is no JSON."""
    try:
        tree = load(text)
        for _ in range(rng.choice([1, 1, 2, 3])):
            tree = _change_tree(tree, rng)
        return dump(tree).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return change_bytes(text, rng)


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few bytes replaced, put in, taken out, cut off or added."""
    result = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(6):
            case 0:
                result[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                result[at:at] = rng.choice(
                    [b"\xff", b"\0", b"\xed\xa0\x80", b"\xef\xbb\xbf", b'"', b",", b"[", b"}", b"9", b"-", b" "]
                )
            case 2:
                del result[at : at + rng.choice([1, 2, 8, 64])]
            case 3:
                del result[at:]
            case 4:
                result += bytes(rng.choice([1, 8, 4096]))
            case _:
                result[at:at] = result[rng.randrange(len(result) + 1) :][: rng.choice([1, 8, 64])]
    return bytes(result)


def change_safetensors(data: bytes, rng: random.Random) -> bytes:
    """The header changed as JSON, the length in front of it and the data behind it mostly made to fit; or any bytes."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.2 or len(data) < 8 + length:
        return change_bytes(data, rng)
    header, payload = data[8 : 8 + length], data[8 + length :]
    header = change_json(header, rng) if rng.random() < 0.9 else change_bytes(header, rng)
    if rng.random() < 0.4:
        header, payload = _laid_out(header, payload, rng)
    header += b" " * rng.choice([0, 0, 1, 7, -(8 + len(header)) % 4096])
    declared = len(header)
    if rng.random() < 0.05:
        declared = rng.choice([0, 1, 2**63, 2**64 - 1, 10**8, len(header) + 1, max(0, len(header) - 1)])
    if rng.random() < 0.15:
        payload = rng.choice([payload[: rng.randrange(len(payload) + 1)], payload + bytes(rng.randrange(20))])
    return declared.to_bytes(8, "little") + header + payload


_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BF16": 16, "F16": 16, "F32": 32, "C64": 64}


def _laid_out(header: bytes, payload: bytes, rng: random.Random) -> tuple[bytes, bytes]:
    """Offsets that follow from dtypes and shapes, but for one tensor that may overlap or leave a gap; data to match."""
    try:
        document = json.loads(header)
        start = end = 0
        for name, value in document.items():
            if name != "__metadata__":
                if not all(type(num) is int for num in value["shape"]):
                    return header, payload
                start = end + rng.choice([0, 0, 0, 0, 0, 0, 0, -end, -1, 1, -8, 2])
                end = start + (math.prod(value["shape"]) * _BITS.get(value["dtype"], 8) + rng.choice([7, 0])) // 8
                value["data_offsets"] = [start, end]
        if not 0 <= end <= MAX_NBYTES:
            return header, payload
        return json.dumps(document).encode(), bytes(end)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return header, payload


def change(case: Case, rng: random.Random) -> dict[str, bytes]:
    """One file of the case changed; now and then removed, renamed, or given the content of another."""
    result = dict(case)
    name = rng.choice(sorted(result))
    match rng.randrange(12):
        case 0 if len(result) > 1:
            del result[name]
        case 1 if len(result) > 1:
            other = rng.choice(sorted(result))
            result[name], result[other] = result[other], result[name]
        case 2 if len(result) > 1:
            result[name] = result[rng.choice(sorted(result))]
        case 3:
            result[name] = rng.choice(
                [b"", b"version https://git-lfs.github.com/spec/v1\n", b"<!DOCTYPE html>", b"{}", b"[]", b"null"]
            )
        case _ if name.endswith(".safetensors"):
            result[name] = change_safetensors(result[name], rng)
        case _:
            result[name] = change_json(result[name], rng) if rng.random() < 0.85 else change_bytes(result[name], rng)
    return {key: value[: 4 * MAX_NBYTES] for key, value in result.items()}
