"""`shardconv.format.plan`: what a class or a file may say becomes rules; all else is refused at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardconv.errors import PlanError
from shardconv.format.plan import Plan, Rule, Style, parse_plan, plan_to_json, read_plan_file

SUPPORTED = (
    "supported: colwise, rowwise, rowwise_split_input, packed_colwise, packed_rowwise, "
    "norm_across_heads, vocabulary, parameter, rowwise_rep"
)


def _issues(raw: object) -> tuple[str, ...]:
    with pytest.raises(PlanError) as caught:
        parse_plan(raw, "here")
    return caught.value.issues


def _one(value: object) -> str:
    """The only issue of a plan with one bad value."""
    (issue,) = _issues({"blocks.*.ff": value})
    return issue


# What is understood


@pytest.mark.parametrize("style", ["colwise", "rowwise", "rowwise_split_input", "packed_colwise", "packed_rowwise"])
def test_every_style_is_known_by_its_name(style: str) -> None:
    """Each of the five styles is understood bare and as a map, and written back by the same name."""
    bare, mapped = parse_plan({"a": style}, "here"), parse_plan({"a": {"style": style}}, "here")
    assert bare == mapped == {"a": Rule(Style(style))}
    assert plan_to_json(bare) == {"a": style}


def test_c10_the_name_transformers_uses() -> None:
    """`rowwise_rep`, a rowwise layer with a replicated input, is our `rowwise_split_input` (C10)."""
    plan = parse_plan({"a": "rowwise_rep", "b": {"style": "rowwise_rep"}}, "here")
    assert plan == {"a": Rule(Style.ROWWISE_SPLIT_INPUT), "b": Rule(Style.ROWWISE_SPLIT_INPUT)}
    assert plan_to_json(plan)["a"] == "rowwise_split_input"


@pytest.mark.parametrize("style", [Style.PACKED_COLWISE, Style.PACKED_ROWWISE])
def test_blocks_of_a_packed_style(style: Style) -> None:
    """A packed style takes proportions as list or tuple; without them the Linear carries the sizes."""
    raw = {"a": {"style": style.value, "blocks": [1, 1, 3]}, "b": {"style": style.value, "blocks": None},
           "c": {"style": style.value, "blocks": (2, 1)}}  # fmt: skip
    plan = parse_plan(raw, "here")
    assert plan == {"a": Rule(style, (1, 1, 3)), "b": Rule(style), "c": Rule(style, (2, 1))}


def test_the_objects_of_diffusers() -> None:
    """diffusers' packed objects are understood, with blocks and without, beside its strings."""
    from diffusers.hooks.tensor_parallel import PackedColwiseParallel, PackedRowwiseParallel

    raw = {
        "qkv": PackedColwiseParallel([1, 1, 1]),
        "mlp": PackedColwiseParallel(),
        "out": PackedRowwiseParallel(blocks=[1, 3]),
        "last": PackedRowwiseParallel(),
        "plain": "colwise",
    }
    assert parse_plan(raw, "here") == {
        "qkv": Rule(Style.PACKED_COLWISE, (1, 1, 1)),
        "mlp": Rule(Style.PACKED_COLWISE),
        "out": Rule(Style.PACKED_ROWWISE, (1, 3)),
        "last": Rule(Style.PACKED_ROWWISE),
        "plain": Rule(Style.COLWISE),
    }


@pytest.mark.slow
def test_every_plan_of_diffusers_is_understood() -> None:
    """The plan of every model class of the installed diffusers that carries one is understood in full."""
    import diffusers
    from diffusers import models

    names = [name for name in dir(models) if name[0].isupper()]
    plans = {name: getattr(getattr(diffusers, name, None), "_tp_plan", None) for name in names}
    carried = {name: plan for name, plan in plans.items() if plan}
    assert {"FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel"} <= set(carried)
    for name, raw in carried.items():
        assert set(parse_plan(raw, name)) == set(raw)


def test_rules_pass_as_they_are() -> None:
    """A plan that is parsed already is itself, in its order."""
    plan = {"b": Rule(Style.PACKED_COLWISE, (1, 2)), "a": Rule(Style.ROWWISE)}
    assert parse_plan(plan, "here") == plan
    assert list(parse_plan(plan, "here")) == ["b", "a"]


_packed = st.builds(
    Rule, st.sampled_from([Style.PACKED_COLWISE, Style.PACKED_ROWWISE]),
    st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=5).map(tuple),
)  # fmt: skip
_rules = st.builds(Rule, st.sampled_from([Style.COLWISE, Style.ROWWISE, Style.ROWWISE_SPLIT_INPUT])) | _packed


@given(st.dictionaries(st.text(max_size=10), _rules, min_size=1, max_size=5))
def test_written_and_read_again_is_the_same(plan: Plan) -> None:
    """A plan written as JSON and parsed again is the plan, patterns in their order."""
    again = parse_plan(json.loads(json.dumps(plan_to_json(plan))), "here")
    assert again == plan
    assert list(again) == list(plan)


@pytest.mark.parametrize(
    ("style", "dim", "is_packed", "takes_local_input"),
    [
        (Style.COLWISE, 0, False, False),
        (Style.ROWWISE, 1, False, True),
        (Style.ROWWISE_SPLIT_INPUT, 1, False, False),
        (Style.PACKED_COLWISE, 0, True, False),
        (Style.PACKED_ROWWISE, 1, True, True),
    ],
)
def test_what_a_style_means(style: Style, dim: int, is_packed: bool, takes_local_input: bool) -> None:
    """Each style cuts the dim, and takes the input, that the table of styles says."""
    assert (style.dim, style.is_packed, style.takes_local_input) == (dim, is_packed, takes_local_input)


# What is refused


class _ReplicatedWithGradAllReduce:
    """Stands for an object of a library that is newer than this one."""

    def __repr__(self) -> str:
        return "ReplicatedWithGradAllReduce()"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("embedding_rowwise", "'embedding_rowwise'"),
        ("replicate", "'replicate'"),
        ("replicated", "'replicated'"),
        ("Colwise", "'Colwise'"),
        ("", "''"),
        (_ReplicatedWithGradAllReduce(), "ReplicatedWithGradAllReduce()"),
        (None, "None"),
        (1, "1"),
        (["colwise"], "['colwise']"),
    ],
    ids=lambda value: str(value),
)
def test_c10_an_unknown_style_lists_the_known_ones(value: object, named: str) -> None:
    """An unknown style, a word or any object, is named with its key and all styles that are supported (C10)."""
    assert _one(value) == f"here: 'blocks.*.ff': unknown style {named}; {SUPPORTED}"
    assert _one({"style": value}) == f"here: 'blocks.*.ff': unknown style {named}; {SUPPORTED}"


@pytest.mark.parametrize("blocks", [[], [0], [1, -1], [1.0], [True], ["1"], "11", 2, {"1": 1}, [[1]]], ids=str)
def test_blocks_are_positive_integers(blocks: object) -> None:
    """Blocks that are not a list of positive integers are refused as they stand."""
    expected = f"here: 'blocks.*.ff': blocks must be a list of positive integers, found {blocks!r}"
    assert _one({"style": "packed_colwise", "blocks": blocks}) == expected


@pytest.mark.parametrize(
    ("style", "meant"),
    [
        ("colwise", "packed_colwise"),
        ("rowwise", "packed_rowwise"),
        ("rowwise_split_input", "packed_rowwise"),
        ("rowwise_rep", "packed_rowwise"),
    ],
)
def test_c2_blocks_on_a_plain_style(style: str, meant: str) -> None:
    """Blocks on a plain style are refused with the name of the packed style of that dim, one that there is (C2)."""
    issue = _one({"style": style, "blocks": [1, 1]})
    assert issue.startswith("here: 'blocks.*.ff': style ")
    assert issue.endswith(f"takes no blocks; use {meant}")


@pytest.mark.parametrize("value", [{}, {"blocks": [1]}, {"style": "colwise", "block": [1]}, {"kind": 1, 2: 3}], ids=str)
def test_a_map_of_other_keys(value: dict[object, object]) -> None:
    """A rule that is a map has a style and maybe blocks; other keys are listed."""
    keys = sorted(map(str, value))
    assert _one(value) == f'here: \'blocks.*.ff\': expected {{"style": ..., "blocks": [...]}}, found the keys {keys}'


def test_an_object_of_diffusers_with_bad_blocks() -> None:
    """Blocks inside one of diffusers' objects are checked as well."""
    from diffusers.hooks.tensor_parallel import PackedColwiseParallel

    style = PackedColwiseParallel([1, 1])
    style.blocks = [1, 0]
    assert _one(style) == "here: 'blocks.*.ff': blocks must be a list of positive integers, found [1, 0]"


def test_an_empty_plan_is_no_plan() -> None:
    """A plan that names nothing is refused, since nothing would be sharded."""
    assert _issues({}) == ("here: the plan is empty, so nothing would be sharded; name at least one module",)


@pytest.mark.parametrize(("raw", "kind"), [([], "list"), ("colwise", "str"), (None, "NoneType"), (3, "int")])
def test_a_plan_is_a_map(raw: object, kind: str) -> None:
    """Anything but a map is refused by what it is."""
    assert _issues(raw) == (f"here: expected a map of module pattern to style, found {kind}",)


def test_all_faults_are_in_one_error() -> None:
    """Every bad value of a plan is an issue of one error, in the order of the plan."""
    issues = _issues({"a": "diagonal", "b": "colwise", "c": {"style": "rowwise", "blocks": [1]}, "d": {}})
    assert [issue.split(":")[1] for issue in issues] == [" 'a'", " 'c'", " 'd'"]


# Plan files


def test_a_plan_file(tmp_path: Path) -> None:
    """A plan file in any language's letters is the plan its JSON spells."""
    path = tmp_path / "plan.json"
    raw = {"blocks.*.到": "colwise", "blocks.*.ff": {"style": "packed_rowwise", "blocks": [1, 1]}}
    path.write_text(json.dumps(raw, ensure_ascii=False), encoding="utf-8")
    assert read_plan_file(path) == read_plan_file(str(path)) == parse_plan(raw, "here")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected a JSON object of module pattern to style (Expecting value"),
        ("{'a': 'colwise'}", "expected a JSON object of module pattern to style (Expecting property name"),
        ('{"a": "colwise"} {}', "expected a JSON object of module pattern to style (Extra data"),
        (
            '{"a": "colwise", "a": "rowwise"}',
            "expected a JSON object of module pattern to style (the name 'a' ",
        ),
        ('["colwise"]', "expected a map of module pattern to style, found list"),
        ("{}", "the plan is empty, so nothing would be sharded"),
        ('{"a": "diagonal"}', f"'a': unknown style 'diagonal'; {SUPPORTED}"),
        ('{"a": ' + "9" * 5000 + "}", "expected a JSON object of module pattern to style ("),
        ('{"a": ' + "[" * 100_000, "expected a JSON object of module pattern to style ("),
    ],
    ids=["empty", "python", "two", "duplicate", "list", "no rules", "style", "huge number", "deep"],
)
def test_a_bad_plan_file_is_named(text: str, expected: str, tmp_path: Path) -> None:
    """Whatever is wrong with a plan file, the one error names the file first and then the fault."""
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_plan_file(path)
    (issue,) = caught.value.issues
    assert issue.startswith(f"{path}: {expected}")


def test_a_plan_file_that_is_no_text(tmp_path: Path) -> None:
    """A plan file of other bytes than UTF-8 is refused by name."""
    path = tmp_path / "plan.json"
    path.write_bytes(b'{"\xff": "colwise"}')
    with pytest.raises(PlanError, match=r"plan\.json: expected a JSON object of module pattern to style \("):
        read_plan_file(path)


def test_a_plan_file_that_is_not_there(tmp_path: Path) -> None:
    """A missing plan file, or a folder in its place, is refused by name with the system's reason."""
    with pytest.raises(PlanError, match=r"absent\.json: cannot read the plan file \(No such file or directory\)$"):
        read_plan_file(tmp_path / "absent.json")
    with pytest.raises(PlanError, match=r": cannot read the plan file \(Is a directory\)$"):
        read_plan_file(tmp_path)


def test_a_bare_parameter_has_a_dim() -> None:
    """The rule of a bare parameter gives its dim, with blocks where it is packed, and survives JSON."""
    raw = {"pos": {"style": "parameter", "dim": 1}, "experts": {"style": "parameter", "dim": 2, "blocks": [1, 1]}}
    plan = parse_plan(raw, "here")
    assert plan == {"pos": Rule(Style.PARAMETER, None, 1), "experts": Rule(Style.PARAMETER, (1, 1), 2)}
    assert plan_to_json(plan) == raw


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("parameter", 'expected {"style": "parameter", "dim": ...}'),
        ({"style": "parameter"}, "a dim is for the style 'parameter' and for no other, found None"),
        ({"style": "parameter", "dim": -1}, "a dim is for the style 'parameter' and for no other, found -1"),
        ({"style": "parameter", "dim": True}, "a dim is for the style 'parameter' and for no other, found True"),
        ({"style": "colwise", "dim": 0}, "a dim is for the style 'parameter' and for no other, found 0"),
    ],
)
def test_a_dim_elsewhere_is_an_error(value: object, said: str) -> None:
    """A dim that is missing, not a dim, or of another style."""
    assert _one(value) == f"here: 'blocks.*.ff': {said}"
