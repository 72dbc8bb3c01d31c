"""Code on the pages of the documentation, as a reader would copy it.

A comment in the line before a block says that it is treated in a way of its own:

- ``<!-- not run: WHY -->``: it is only checked without being run;
- ``<!-- nightly: WHY -->``: only ``make nightly`` runs it;
- ``<!-- file: NAME -->``: the reader keeps it in that file;
- ``<!-- raises: ERROR -->``: it shows how that error looks.

Of a ``diff`` the text after the change is taken, as Python.
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
        page: Its path below the root of the repository.
        line: Where its code begins.
        language: As on the page.
        code: Without the page's indentation.
        way: How it is treated, of ``WAYS``; None: as any.
        told: What the comment says of that.
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
    """What a reader is told: the README, how to contribute, and everything below docs/."""
    below = sorted(path.relative_to(ROOT).as_posix() for path in DOCS.glob("*.md"))
    return ["README.md", "CONTRIBUTING.md", "benchmarks/README.md", *below]


@cache
def blocks_of(page: str) -> tuple[Block, ...]:
    """All blocks of a page that name their language, in their order."""
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
    """Those of all pages in one of these languages."""
    return [one for page in pages() for one in blocks_of(page) if one.language in languages]


def files_of(page: str) -> dict[str, str]:
    """What the page's reader keeps in files, by their names."""
    return {one.told or "": one.code for one in blocks_of(page) if one.way == "file"}


def code_on(page: str, containing: str) -> str:
    """The one Python block of ``docs/{page}.md`` with that text in it."""
    blocks = blocks_of(f"docs/{page}.md")
    (found,) = (one for one in blocks if one.language == "python" and containing in one.code)
    return found.code
