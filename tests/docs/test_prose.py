"""The prose of pages and docstrings: no phrase of ``PHRASES``, no sentence longer than ``LONGEST``.

``make lint`` looks for spelling mistakes (codespell).
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages import ROOT, pages

LONGEST = 40
"""Words of a sentence on a page."""

PHRASES = {
    r"whoever|those who|any who": "the worker, workers that",
    r"(is|are|was|were) told|told (by|of|for|that)": "receives, is notified, reports",
    r"(one's|of theirs|his|her) own": "custom, its",
    r"anew": "again, from scratch",
    r"rolls? of|ballots?": "vote, summed votes, round",
    r"hangs? up|hung up": "close the connections",
    r"farewells?": "shutdown",
    r"lifelines?": "heartbeat connection",
    r"companions?": "background task",
    r"beside": "next to, extra, in the background",
    r"under ?way": "in flight, running",
    r"takes? up|taken up": "restore",
    r"nobody": "no worker, no other process",
    r"at rest": "idle",
    r"(goes?|going) on(?! (the|a|top))": "continue",
    r"comes? in(?! (the|a|two|three|this))": "arrive",
    r"for good": "permanently",
    r"likewise": "the thing itself",
    r"put right": "repair",
    r"utilize|leverage|seamless(ly)?|simply|obviously|of course": "a plainer word, or none",
}
"""Phrases that readers had to decode, and what to write instead."""
_PHRASE = re.compile(rf"\b({'|'.join(f'(?:{one})' for one in PHRASES)})\b", re.IGNORECASE)


def without_code(text: str) -> str:
    """Return Markdown without blocks of code, comments, headings, figures and targets of links."""
    text = re.sub(r"^( *)```.*?^\1```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|^#.*$|^:::.*$|^    \S.*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "CODE", text)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a Markdown page. Items of lists and cells of tables end them, too."""
    for block in re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", without_code(text), flags=re.MULTILINE):
        for cell in block.split("|") if block.lstrip().startswith("|") else [block]:
            yield from re.split(r"(?<=[.!?:;])\s+(?=\W*[A-Z0-9])", " ".join(cell.split()))


def words(sentence: str) -> int:
    """Return the number of words. Numbers and symbols do not count."""
    return len(re.findall(r"[^\W\d_]{2,}|\ba\b|\bI\b", sentence))


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring and comment of a Python file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def found_in(text: str) -> list[str]:
    return [" ".join(found[0].split()) for found in _PHRASE.finditer(re.sub(r"`[^`]*`", "", text))]


# The table of benchmarks/README.md has names of benchmarks.
@pytest.mark.parametrize("page", sorted({*pages()} - {"benchmarks/README.md"}))
def test_a_page_has_no_phrase_to_avoid(page: str) -> None:
    assert found_in(without_code((ROOT / page).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", pages())
def test_the_sentences_of_a_page_are_short(page: str) -> None:
    every = sentences((ROOT / page).read_text(encoding="utf-8"))
    assert [one for one in every if words(one) > LONGEST] == []


def test_docstrings_and_comments_have_no_phrase_to_avoid() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {phrase}"
        for path in sorted(Path(ROOT, "src").rglob("*.py"))
        for line, text in prose_of(path.read_text(encoding="utf-8"))
        for phrase in found_in(text)
    ]
    assert found == []
