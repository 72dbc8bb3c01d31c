"""Every Python block of the pages: run, or where its page says why it is not, checked by its names.

The blocks of a page run in their order, on four simulated workers that have a namespace each. What
simulates, and what uses that, runs once for all of them.
"""

import ast
import builtins
import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import offbeat
from cells import nightly
from docs.stage import IMPORTS, MODULES, SUPPLIES, Space, get
from pages import ROOT, WAYS, Block, blocks_in, blocks_of, files_of, pages
from worlds import simulated

WORKERS = 4
BLOCKS = blocks_in("python")
FIGURE = re.compile(r"\d+\.\d+")
MADE_ANEW = ("model", "optimizer", "scheduler")  # for each attach


def names(code: str, context: type[ast.expr_context]) -> set[str]:
    """Those that the code loads, or stores."""
    found = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name))
    return {node.id for node in found if isinstance(node.ctx, context)}


# The first page of the documentation says which names the blocks take for granted. The others are
# the rest of an ordinary script.
GRANTED = {
    *("model", "optimizer", "loss_fn", "loader", "dataset", "dist", "torch", "offbeat", "nn", "np"),
    *("x", "y", "sync", "sampler", "scheduler", "scaler", "evaluate", "validation", "module"),
    *("DataLoader", "DistributedDataParallel"),
}


def defined(code: str) -> set[str]:
    """Names that the code stores, imports, or has as functions, classes and arguments."""
    found = names(code, ast.Store)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


@pytest.mark.parametrize("page", sorted({one.page for one in BLOCKS}))
def test_a_page_defines_the_names_that_it_uses(page: str) -> None:
    """In the same block or one before it, except for names that every script has."""
    known = GRANTED | {*dir(builtins)}
    for block in blocks_of(page):
        if block.language == "python":
            known |= defined(block.code)
            assert names(block.code, ast.Load) - known == set(), f"{page}:{block.line}"


def split(blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
    """What every worker runs, and what runs once: simulations, and what uses their names."""
    workers, once = [], []
    made: set[str] = set()
    for block in blocks:
        if "simulate(" in block.code or made & names(block.code, ast.Load):
            once.append(block)
            made |= names(block.code, ast.Store)
        else:
            workers.append(block)
    return workers, once


def compiled(block: Block) -> CodeType:
    """With the page's own line numbers, so that an error tells where it is."""
    return compile("\n" * (block.line - 1) + block.code, str(ROOT / block.page), "exec")


def run_tests(space: Space) -> None:
    """Run the tests that a block has defined."""
    for name in [one for one in space if one.startswith("test_")]:
        space.pop(name)()


def run_on_worker(rank: int, size: int, blocks: Sequence[Block]) -> None:
    """One worker's way down a page. Where a block only attaches, two steps are trained after it."""
    torch.manual_seed(rank)
    space: Space = dict(IMPORTS)
    for block in blocks:
        used, attaches = names(block.code, ast.Load), "attach(" in block.code
        if (attaches or "sync" not in used) and "sync" in space:
            space["sync"].finish()
        if attaches:
            for name in MADE_ANEW:
                space.pop(name, None)
        for name in used & SUPPLIES.keys():
            get(space, name)
        dist.barrier()  # a block may read what others have written in the one before
        exec(compiled(block), space)
        run_tests(space)
        if attaches and ".step()" not in block.code and not space["sync"].stats.steps:
            for x, y in list(get(space, "loader"))[:2]:
                get(space, "loss_fn")(space["model"](x), y).backward()
                space["optimizer"].step()
                space["optimizer"].zero_grad()
    if "sync" in space:
        space["sync"].finish()


def after(block: Block) -> Block | None:
    """The page's next one."""
    blocks = blocks_of(block.page)
    place = blocks.index(block) + 1
    return blocks[place] if place < len(blocks) else None


def run_once(blocks: Sequence[Block]) -> None:
    """The simulations of a page, in its order; and the tests that it defines.

    What one prints is what the page shows as text after it, figures to a hundredth.
    """
    space: Space = dict(IMPORTS)
    for block in blocks:
        for name in names(block.code, ast.Load) & SUPPLIES.keys():
            get(space, name)
        wrong = pytest.raises(Exception) if block.way == "raises" else nullcontext()
        with redirect_stdout(io.StringIO()) as out, wrong as error:
            exec(compiled(block), space)
        if error is not None:
            assert error.typename == block.told
        elif (shown := after(block)) is not None and shown.language == "text":
            printed = out.getvalue()
            assert FIGURE.sub("#", printed) == FIGURE.sub("#", shown.code)
            got, want = ([float(x) for x in FIGURE.findall(one)] for one in (printed, shown.code))
            assert got == pytest.approx(want, rel=0.01)
        run_tests(space)


def run_page(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *ways: str | None) -> None:
    """Those of its blocks that are treated so, where its files are."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name, code in files_of(page).items():
        (folder / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    blocks = [one for one in blocks_of(page) if one.language == "python" and one.way in ways]
    on_workers, once = split(blocks)
    simulated(run_on_worker, on_workers, workers=WORKERS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_once(once)
    finally:
        torch.set_num_threads(threads)


LONG = ("docs/data.md", "docs/planning.md")  # some seconds each
OWN = ("docs/tutorial.md",)  # test_tutorial.py runs its programs
PAGES = sorted({one.page for one in BLOCKS if one.way != "not run"} - {*LONG, *OWN})


@pytest.mark.pages
@pytest.mark.parametrize("page", [*PAGES, *nightly(LONG)])
def test_what_a_page_shows_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, in an empty folder."""
    run_page(page, tmp_path, monkeypatch, None, "file", "raises")


@pytest.mark.nightly
@pytest.mark.parametrize("page", sorted({one.page for one in BLOCKS if one.way == "nightly"}))
def test_what_takes_longer_runs_too(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that has such blocks, with them."""
    run_page(page, tmp_path, monkeypatch, *WAYS[1:], None)


def imported(tree: ast.AST) -> Space:
    """What the imports of a block give; of what is not installed the names are looked up."""
    found: Space = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                module = importlib.import_module(one.name)
                whole = sys.modules[one.name.partition(".")[0]]
                found[one.asname or whole.__name__] = module if one.asname else whole
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in node.names:
                found[one.asname or one.name] = member(node.module, one.name)
    return found


def member(module: str, name: str) -> Any:
    """``from module import name``; None where a framework is missing that the module needs."""
    ours = module.startswith("offbeat")
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        if not ours:
            return None
        if (error.name or "offbeat").startswith("offbeat"):
            raise
        tree = ast.parse((ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text())
        assert name in {getattr(node, "name", None) for node in tree.body}, f"{module}.{name}"
        return None
    if hasattr(home, name):
        return getattr(home, name)
    return importlib.import_module(f"{module}.{name}")


def resolve(node: ast.expr, space: Space) -> Any:
    """What a dotted name stands for; None if it does not begin with something known."""
    if isinstance(node, ast.Name):
        return space.get(node.id)
    if isinstance(node, ast.Attribute):
        home = resolve(node.value, space)
        if isinstance(home, ModuleType | type):
            assert hasattr(home, node.attr), f"{ast.unparse(node)} is not there"
            found = inspect.getattr_static(home, node.attr)
            return None if isinstance(found, property) else getattr(home, node.attr)
    return None


def check_call(node: ast.Call, function: Callable[..., Any], bound: bool) -> None:
    """Its arguments are those that the function takes."""
    if any(isinstance(one, ast.Starred) for one in node.args):
        return
    keywords = {one.arg: None for one in node.keywords if one.arg is not None}
    arguments = [None] * (len(node.args) + bound)
    try:
        inspect.signature(function).bind_partial(*arguments, **keywords)
    except TypeError as error:
        raise AssertionError(f"{ast.unparse(node)}: {error}") from None


def check_names(code: str, space: Space) -> None:
    """Imports, attributes of modules and of ``sync``, and the arguments of Offbeat's calls."""
    tree = ast.parse(code)
    known = {**space, "sync": offbeat.Synchronizer, **imported(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            resolve(node, known)
        if isinstance(node, ast.Call):
            function = resolve(node.func, known)
            if getattr(function, "__module__", "").startswith("offbeat"):
                ours = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value)
                check_call(node, function, bound=ours == "sync")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_names_what_there_is(block: Block) -> None:
    """Run or not, it compiles, and modules, names and arguments exist."""
    compiled(block)
    homes = {name.removesuffix(".py") for name in files_of(block.page)}
    code = "\n".join(
        line for line in block.code.splitlines() if not any(f"from {one} " in line for one in homes)
    )
    check_names(code, dict(MODULES))


@pytest.mark.parametrize("page", pages())
def test_every_comment_belongs_to_a_block(page: str) -> None:
    """A misspelt one would be read by nobody."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count("<!-- ") == sum(one.way is not None for one in blocks_of(page))
