"""YAML with positions, variables, anchors and their limits."""

import pytest

from gateway.settings import yaml_tree
from gateway.settings.yaml_tree import Mark, Tree, parse


def tree(text: str, **environ: str) -> Tree:
    return parse(text, environ)


def test_values_and_keys_know_where_they_stand() -> None:
    found = tree("a: 1\nb:\n  - x\n  - {c: 2}\n")
    assert found.data == {"a": 1, "b": ["x", {"c": 2}]}
    assert found.value_mark(("a",)) == Mark(1, 4)
    assert found.key_mark(("b",)) == Mark(2, 1)
    assert found.value_mark(("b", 0)) == Mark(3, 5)
    assert found.key_mark(("b", 1, "c")) == Mark(4, 6)


def test_a_path_written_in_full_finds_its_short_form() -> None:
    found = tree("pools:\n  light: [one, two]\n")
    assert found.value_mark(("pools", "light", "backends", 1)) == Mark(2, 16)
    assert found.value_mark(("pools", "light", "timeouts", "idle_s")) == Mark(2, 10)


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        pytest.param("a: 1\na: 2\n", '"a" is given twice, first in line 1', 2, id="duplicate-key"),
        pytest.param("1: x\n", "a key must be text; put '1' in quotes", 1, id="number-as-key"),
        pytest.param("a: ${NOT_SET}\n", "environment variable NOT_SET is not set", 1, id="variable-not-set"),
        pytest.param("a:\n  b: x ${oops\n", "${ is no variable here", 2, id="unfinished-variable"),
        pytest.param("a: ${my-host}\n", "${ is no variable here; write ${NAME}", 1, id="no-name"),
        pytest.param("\na: [1\nb: 2\n", "a quote is missing after the [ in line 2", 3, id="an-open-list"),
        pytest.param(
            "\na: {b: 1\nc: 2\n", "a quote is missing after the { in line 2", 3, id="an-open-mapping"
        ),
        pytest.param("\na: 'b\nc: 2\n", "no end to the quote in line 2", 4, id="an-open-quote"),
        pytest.param("a: {b: ${X}}\n", 'in quotes, such as "${NAME}"', 1, id="braces-without-quotes"),
        pytest.param("a: b: c\n", "put a value with a colon in quotes", 1, id="a-second-colon"),
        pytest.param("a:\n  b: 1\n c: 2\n", "not indented like those before", 3, id="indentation"),
        pytest.param("a: !!python/object:os.system x\n", "tag", 1, id="foreign-tag"),
        pytest.param(
            "a:\n  b: 2001-99-99\n", "this is not a valid value: month", 2, id="a-date-that-is-none"
        ),
        pytest.param("a:\n  b: !!timestamp soon\n", "it is not a date", 2, id="a-text-called-a-date"),
        pytest.param(f"a: {'9' * 5000}\n", "this is not a valid value", 1, id="a-number-too-long-to-read"),
        pytest.param(f"a: 0x{'f' * 5000}\n", "this is not a valid value", 1, id="a-number-too-long-to-write"),
        pytest.param("a: 1\n? [x]\n: 2\n", "a key must be text", 2, id="a-list-as-key"),
        pytest.param("a: 1\nb: \x00\n", "the character U+0000 is not", 2, id="a-character-yaml-has-not"),
        pytest.param("a:\n  b: 0600\n", "for octal, which is 384; write 600", 2, id="an-octal-number"),
        pytest.param("a:\n  b: [1, -010]\n", "which is -8; write -10", 2, id="a-negative-octal-number"),
        pytest.param("a:\n  b: 1:30\n", "1:30 for base 60, which is 90; write 90, or", 2, id="minutes"),
        pytest.param("a:\n  b: 1:30.5\n", "which is 90.5; write 90.5, or", 2, id="minutes-with-a-fraction"),
        pytest.param('a: "\\U00110000"\n', "not YAML that can be used", 1, id="an-escape-beyond-unicode"),
        pytest.param('a: "\\UFFFFFFFF"\n', "not YAML that can be used", 1, id="an-escape-beyond-numbers"),
        pytest.param('a:\n  b: "x\\0y"\n', r"can have \0 in it", 2, id="an-escape-for-the-end-of-a-text"),
        pytest.param("a: " + "[" * 5000, "not YAML that can be used", 1, id="nested-too-deep"),
        pytest.param("a: 1\nb: !!int\n", "there is no number", 2, id="nothing-called-a-number"),
        pytest.param("a: 1\nb: !!float _\n", "there is no number", 2, id="a-blank-called-a-number"),
        pytest.param("a: 1\nb: !x {c: 1}\n", "there are no tags", 2, id="a-tag-of-a-mapping"),
        pytest.param("a: 1\nb: !x [c]\n", "there are no tags", 2, id="a-tag-of-a-list"),
        pytest.param("a: 1\n<<: {3: x}\n", "a key must be text; put '3'", 2, id="a-number-merged-in-as-key"),
        pytest.param(
            "a: 1\n<<: {b: 1,\n b: 2}\n", '"b" is given twice, first in line 2', 3, id="merged-in-twice"
        ),
        pytest.param("a: 1\n---\nb: 2\n", "single document", 2, id="two-documents"),
        pytest.param("", "the file is empty", 1, id="empty"),
        pytest.param("# only a comment\n", "the file is empty", 1, id="only-a-comment"),
        pytest.param("a: &a [*a]\n", "without end", 1, id="an-anchor-in-itself"),
        pytest.param("a: &a {x: 1}\nb:\n  <<: [*a, 5]\n", "<< takes a mapping", 3, id="merge-of-a-number"),
        pytest.param("a: &a {<<: *a}\n", "without end", 1, id="a-merge-of-itself"),
        pytest.param("a:\n  b: !!binary aGk=\n", "no binary values", 2, id="binary"),
        pytest.param('a:\n  b: "\\ud83d"\n', "half a character", 2, id="half-a-character"),
        pytest.param("a: ${LATIN}\n", "not UTF-8", 1, id="a-variable-in-latin-1"),
    ],
)
def test_what_is_wrong_with_the_text_itself(text: str, message: str, line: int) -> None:
    ((mark, said),) = tree(text, LATIN=b"caf\xe9".decode("utf-8", "surrogateescape")).problems
    assert message in said
    assert mark.line == line


def test_what_is_wrong_is_said_in_one_line() -> None:
    assert [message for _, message in tree("\0").problems if "\n" in message] == []


def test_more_values_than_a_configuration_has_are_not_read_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yaml_tree, "_VALUES_MAX", 10)
    assert tree("a: {b: [1, 2, 3, 4, 5, 6]}").data == {"a": {"b": [1, 2, 3, 4, 5, 6]}}
    found = tree("".join(f"- k{number}: x\n" for number in range(20)) + "- {unfinished")
    assert found.data is None
    assert found.problems == [(Mark(1, 1), "this is not YAML that can be used: it has more than 10 values")]


def test_anchors_that_multiply_are_stopped() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    ((_, said),) = tree("\n".join(lines)).problems
    assert "without end" in said


def test_anchors_and_merge_keys_work() -> None:
    found = tree("base: &base {url: u, drain: false}\nb: {<<: *base, drain: true}\nc: *base\n")
    assert not found.problems
    assert found.data["b"] == {"url": "u", "drain": True}
    assert found.data["c"] == {"url": "u", "drain": False}


def test_a_mapping_and_a_list_may_be_called_so() -> None:
    found = tree("a: !!map {b: !!seq [1]}\n")
    assert not found.problems
    assert found.data == {"a": {"b": [1]}}


def test_what_is_merged_in_may_merge_in_more_and_comes_first() -> None:
    text = "x: &x {a: 1, b: 1, c: 1}\ny: &y {<<: *x, b: 2, c: 2}\nz: {<<: *y, c: 3}\n"
    found = tree(text)
    assert not found.problems
    assert found.data["z"] == {"a": 1, "b": 2, "c": 3}
    assert found.value_mark(("z", "a")) == Mark(1, 11)


def test_merges_that_multiply_are_stopped() -> None:
    lines = ["x0: &x0 {a: 1}", *(f"x{n}: &x{n} {{<<: [*x{n - 1}, *x{n - 1}]}}" for n in range(1, 30))]
    ((_, said),) = tree("\n".join(lines)).problems
    assert "without end" in said


def test_one_mapping_that_is_merged_in_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing new comes of it, but each entry is looked at each time."""
    monkeypatch.setattr(yaml_tree, "_VALUES_MAX", 40)

    def problems(times: int) -> list[str]:
        text = f"a: &a {{b: 1, c: 1, d: 1, e: 1}}\nf: {{<<: [{', '.join(['*a'] * times)}]}}\n"
        return [said for _, said in tree(text).problems]

    assert problems(5) == []
    assert "without end" in problems(10)[0]


@pytest.mark.parametrize("text", ['a: "\\ud83d\\ude00"', "a: \U0001f600", "a: ${EMOJI}"])
def test_a_character_may_be_escaped_as_json_does(text: str) -> None:
    found = tree(text, EMOJI="\U0001f600")
    assert not found.problems
    assert found.data == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('"\\ud83d\\ude00": 1', ["\U0001f600"]),
        ('a: &a {"\\ud83d\\ude00": 1}\nb: {<<: *a}', ["a", "b", "\U0001f600"]),
    ],
)
def test_a_key_may_be_escaped_as_json_does(text: str, keys: list[str]) -> None:
    found = tree(text)
    assert not found.problems
    assert {str(path[-1]) for path in found.keys} == set(keys)
    assert str(found.data).encode()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        pytest.param("a: ${HOST}:80", "h:80", id="filled-in"),
        pytest.param("a: ${NONE:-d}:80", "d:80", id="default"),
        pytest.param("a: ${EMPTY:-d}", "d", id="empty-takes-the-default"),
        pytest.param("a: ${NONE:-}", "", id="empty-default"),
        pytest.param("a: x${EMPTY}", "x", id="empty-is-set"),
        pytest.param("a: $${HOST}", "${HOST}", id="escaped"),
        pytest.param("a: $HOST", "$HOST", id="bare-dollar"),
        pytest.param("a: ${INJECT}", "x, b: 1", id="a-value-cannot-change-the-structure"),
    ],
)
def test_variables(text: str, value: str) -> None:
    found = tree(text, HOST="h", EMPTY="", INJECT="x, b: 1")
    assert not found.problems
    assert found.data == {"a": value}
