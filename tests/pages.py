"""Read the blocks of code on the pages of the documentation.

A comment in the line before a block changes how the tests treat it:

- ``<!-- not run: WHY -->``: its names are checked, and it is not run;
- ``<!-- nightly: WHY -->``: only ``make nightly`` runs it;
- ``<!-- file: NAME -->``: the reader stores it in that file;
- ``<!-- raises: ERROR -->``: it shows an error.

A ``diff`` is read as the Python code after the change.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SHELL = ("sh", "bash", "console")
WAYS = ("not run", "nightly", "file", "raises")

_BLOCK = re.compile(
    rf"^(?: *<!-- (?P<way>{'|'.join(WAYS)}): (?P<told>.+?) -->\n)?"
    r"(?P<indent> *)```(?P<language>\w+)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block of code.

    Attributes:
        page: Path of the page, relative to the root of the repository.
        line: First line of the code.
        language: Language named on the page.
        code: The code, without the page's indentation.
        way: Treatment, one of ``WAYS``. None: the default.
        told: Text of the comment after the treatment.
    """

    page: str
    line: int
    language: str
    code: str
    way: str | None
    told: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return the paths of all pages: the README, CONTRIBUTING, and those in docs/."""
    below = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.glob("*.md"))
    return ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", *below]


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """Return all blocks of a page that name their language, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return tuple(
        Block(
            page,
            text.count("\n", 0, found.start("code")) + 1,
            "python" if found["language"] == "diff" else found["language"],
            _after(found["code"]) if found["language"] == "diff" else dedent(found["code"]),
            found["way"],
            found["told"],
        )
        for found in _BLOCK.finditer(text)
    )


def _after(diff: str) -> str:
    return "".join(line[1:] or "\n" for line in diff.splitlines(True) if line[0] != "-")


def blocks_in(*languages: str) -> list[Block]:
    """Return the blocks of all pages in one of ``languages``."""
    return [one for page in pages() for one in blocks_of(page) if one.language in languages]


def files_of(page: str) -> dict[str, str]:
    """Return the files that a page tells its reader to store: name → content."""
    return {one.told or "": one.code for one in blocks_of(page) if one.way == "file"}


def code_on(page: str, containing: str) -> str:
    """Return the one Python block of ``docs/{page}.md`` that contains the text."""
    blocks = blocks_of(f"docs/{page}.md")
    (found,) = (one for one in blocks if one.language == "python" and containing in one.code)
    return found.code
