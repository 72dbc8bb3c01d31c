"""Code on the pages of the documentation, as a reader would copy it."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def code_on(page: str, containing: str) -> str:
    """The one Python block of ``docs/{page}.md`` with that text in it."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (found,) = (block for block in blocks if containing in block)
    return str(found)
