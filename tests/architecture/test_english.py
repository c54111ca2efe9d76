"""The prose of pages, docstrings, comments and messages is plain: phrases that were replaced do not come back."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes import REPO

FILES = [
    REPO / "README.md",
    REPO / "CHANGELOG.md",
    REPO / "CONTRIBUTING.md",
    *sorted((REPO / "tfps/docs").glob("*.md")),
]
MODULES = sorted((REPO / "tfps").rglob("*.py"))

# A phrase as a regular expression, and what to write.
PHRASES = {
    r"anew": "again",
    r"(?:is|are|was|were|be|been|being) told": "gets, is reported, the message says",
    r"(?:is|are|was|were) said": "is reported, the log says",
    r"tells? of": "names, shows",
    r"as ever": "(leave it out)",
    r"of (?:its|their) own accord": "without help",
    r"at once\b": "immediately, or: at the same time",
    r"for ever\b": "without end, forever",
    r"in silence": "without a message",
    r"in vain": "without result",
    r"who reads it": "readers",
    r"is (?:to be )?looked at": "is checked",
    r"(?:the )?\d+\. (?:time|run|step)\b": "the third time, restart 3",
    r"colour|behaviour|favour|neighbour|regularis|normalis|initialis|optimis|serialis": "American spelling",
    r"licence": "license",
}
# Of messages only: in other prose, these words may be the right ones.
MESSAGE_PHRASES = {
    r"meanwhile": "in the meantime",
    r"nobody|somebody": "no process, no host",
    r"mend": "fix",
    r"looks? at": "check",
    r"one more time": "again",
    r"com(?:e|es|ing) to rest": "ends, finishes",
    r"takes? no part": "does not take part, is not in",
    r"means? nothing": "is not supported",
}


def pattern_of(phrase: str) -> re.Pattern[str]:
    """Return what finds a phrase in any case, at the beginning of a word, and across the end of a line."""
    return re.compile(r"\b(?:" + phrase.replace(" ", r"\s+") + ")", re.IGNORECASE)


def _blanked(block: re.Match[str]) -> str:
    return "\n" * block[0].count("\n")  # so that the lines keep their numbers


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_phrase_comes_back(file: Path) -> None:
    """No phrase of the list is in a file, but for what a page quotes of a program's output."""
    text = re.sub(r"^```text\n(.*?)^```$", _blanked, file.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = [
        f"{file.name}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: write {instead}"
        for phrase, instead in PHRASES.items()
        for match in re.finditer(pattern_of(phrase), text)
    ]
    assert found == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_plain_characters(file: Path) -> None:
    """A file has no emoji, no curly quotes and no dashes that a keyboard does not have."""
    assert [character for character in file.read_text() if ord(character) > 0x17F or character in "\u00a0\u00ad"] == []


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield each docstring and comment of a module, with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(REPO)))
def test_no_phrase_comes_back_in_the_code(module: Path) -> None:
    """No phrase of the list is in a docstring or a comment of a module."""
    found = [
        f"line {line}: {match[0]!r}: write {instead}"
        for line, text in prose_of(module.read_text())
        for phrase, instead in PHRASES.items()
        for match in re.finditer(pattern_of(phrase), text)
    ]
    assert found == []


def messages_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield each string of a module that has a space and is no docstring, with its line; of an f-string, its parts."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and " " in node.value
            and id(node) not in alone
        ):
            yield node.lineno, node.value


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(REPO)))
def test_no_phrase_comes_back_in_a_message(module: Path) -> None:
    """No phrase of either list is in a string of a module that may be a message."""
    found = [
        f"line {line}: {match[0]!r}: write {instead}"
        for line, text in messages_of(module.read_text())
        for phrase, instead in {**PHRASES, **MESSAGE_PHRASES}.items()
        for match in re.finditer(pattern_of(phrase), text)
    ]
    assert found == []


def test_a_phrase_in_a_message_is_found() -> None:
    """A docstring and a word alone are no messages; a literal, the parts of an f-string and its pieces are."""
    source = '"""is told"""\nx = f"a {1} is told" "once"\ny = "anew"\nz = ("is " "told anew")\n'
    assert sorted(text for _, text in messages_of(source)) == [" is toldonce", "a ", "is told anew"]
