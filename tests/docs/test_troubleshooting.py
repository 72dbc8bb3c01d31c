"""Every message that the page of troubleshooting explains is a message of the code."""

import ast
import math
import re
from functools import cache
from pathlib import Path

from pages import DOCS, ROOT

SHARE = 0.5
"""Share of the longest text without a gap that must be in the code in one piece."""
NOT_CHECKED = (
    *("Connection refused", "terminate called without an active exception"),  # of torch
    *("rank 1 has protocol 2; rank 0 has protocol 1", "… has a, b: name one"),  # mostly names
)


def words(text: str) -> list[str]:
    """Return the words of a message. Each gap "…", number and name of code becomes "_"."""
    text = re.sub(r"…|\S*(?:\w_\w|\d|[=(]|\w\.\w)\S*|--\S+", " _ ", text)
    return re.findall(r"[^\W_][\w'-]*|_", text.lower())


@cache
def source() -> str:
    """Return the words of all strings in the package, with "_" for each inserted value."""
    found = []
    for path in sorted(Path(ROOT, "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (one.value if isinstance(one, ast.Constant) else "…" for one in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdrg]", "…", node.value))
    return " | ".join(f" {' '.join(words(text))} " for text in found)


def is_there(message: str) -> bool:
    """Return True if the longest text of the message without a gap is in the source."""
    run = max((one.split() for one in " ".join(words(message)).split("_")), key=len)
    length = math.ceil(SHARE * len(run))
    parts = (run[i : i + length] for i in range(len(run) - length + 1))
    return any(f" {' '.join(part)} " in source() for part in parts)


def messages() -> list[str]:
    """Return the messages in the first column of the tables of messages."""
    found, listed = [], False
    for line in (DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines():
        listed = line.startswith("| message |") or (listed and line.startswith("|"))
        if listed:
            found += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return [one for one in found if " " in one and one not in NOT_CHECKED]


def test_every_message_is_one_of_the_code() -> None:
    every = messages()
    assert len(every) > 150
    assert [one for one in every if not is_there(one)] == []
