"""Make ``examples/tutorial.ipynb`` from the page of the tutorial.

From the root of the repository: ``PYTHONPATH=tests python tests/docs/notebook.py``.
"""

import json
import re
from typing import Any

from pages import ROOT, SHELL, Block, blocks_of

PAGE = "docs/tutorial.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"

Cell = dict[str, Any]


def code_of(block: Block) -> str:
    """Return the cell that stores the file of a block, or runs its commands."""
    code = block.code.rstrip("\n")
    if block.way == "file":
        return f"%%writefile {block.told}\n{code}"
    assert block.language in SHELL, block
    return re.sub(r"(?<!\\\n)^", "!", code, flags=re.MULTILINE)


def cells() -> list[Cell]:
    """Return the cells: text, files and commands. The text after a command is its output."""
    lines = (ROOT / PAGE).read_text(encoding="utf-8").splitlines()
    found: list[Cell] = []

    def add(kind: str, source: str, **more: Any) -> None:
        cell = {"cell_type": kind, "id": f"cell-{len(found)}", "metadata": {}}
        found.append({**cell, "source": source.splitlines(True), **more})

    def add_markdown(start: int, end: int) -> None:
        text = "\n".join(lines[start:end]).strip()
        if text:
            add("markdown", re.sub(r"\]\((?=[\w-]+\.md)", "](../docs/", text))

    end = 0  # of the block before
    for block in blocks_of(PAGE):
        add_markdown(end, block.line - 2 - (block.way is not None))
        end = block.line + block.code.count("\n")
        if block.language == "text":
            output = {"name": "stdout", "output_type": "stream"}
            found[-1]["outputs"] = [{**output, "text": block.code.splitlines(True)}]
        else:
            add("code", code_of(block), execution_count=None, outputs=[])
    add_markdown(end, len(lines))
    return found


def notebook() -> str:
    """Return the content of the notebook."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {
        "cells": cells(),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
