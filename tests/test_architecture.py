"""The rules of the design that no type checker knows: layers, imports, names, docstrings.

Each test collects all violations; each violation names file and line.
"""

import ast
import functools
import graphlib
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import offbeat
import offbeat.extend
import offbeat_lab
from cells import nightly

ROOT = Path(offbeat.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
LAB = Path(offbeat_lab.__file__).parent
LAB_MODULES = sorted(LAB.rglob("*.py"))
REFERENCES = sorted((LAB / "baselines").rglob("*.py"))

# From the bottom up. A module imports only from levels below, or from its own unit: a file or
# folder of the package. A file inside a folder is a unit of its own if it is listed.
LEVELS = [
    {"errors", "units", "arguments", "display"},
    {"checkpoint/plain_values", "telemetry"},
    {"strategies"},
    {"transport"},
    {"quantization"},
    {"elastic"},
    {"nodes"},
    {"simulate"},
    {"averaging"},
    {"nodes/gradients", "nodes/shards"},
    {"training"},
    {"checkpoint/worker_state"},
    {"elastic/membership_changes"},
    {"training/assembly"},
    {"synchronizer"},
    {"attach", "checkpoint"},
    {"data"},
    {"plan"},
    {"__init__"},
    {"extend"},
    {"launcher"},
    {"integrations"},
    {"cli"},
    {"__main__"},
]
# A strategy decides with numbers alone, so that it reads like the paper and needs no tensors to be
# tested.
STRATEGIES_IMPORT = {
    *("abc", "collections", "dataclasses", "functools", "importlib", "logging", "math"),
    *("typing", "typing_extensions"),
    *("offbeat.strategies", "offbeat.arguments"),
}
NETWORKS_THREADS_AND_CLOCKS = {
    *("torch.distributed", "torch.multiprocessing", "asyncio", "concurrent", "datetime"),
    *("multiprocessing", "queue", "socket", "threading", "time"),
}
PRIVATE_ALLOWED = {
    "simulate/process_group.py",  # the default process group needs one
    "training/backward_hooks.py",  # the end of backward, as DDP and FSDP find it
}
# Lines, and code lines, which are those without docstrings, comments, blank lines and imports. A
# folder that has to grow names here what goes instead. `python tests/test_architecture.py` prints
# the table of today.
BUDGET: dict[str, tuple[int, ...]] = {
    "src/offbeat": (2220, 1103),
    "src/offbeat/averaging": (3422, 1875),
    "src/offbeat/checkpoint": (1013, 540),
    "src/offbeat/cli": (481, 247),
    "src/offbeat/data": (792, 386),
    "src/offbeat/display": (88, 42),
    "src/offbeat/elastic": (1705, 911),
    "src/offbeat/integrations": (303, 178),
    "src/offbeat/launcher": (786, 445),
    "src/offbeat/nodes": (501, 283),
    "src/offbeat/quantization": (1434, 826),
    "src/offbeat/simulate": (2264, 1207),
    "src/offbeat/strategies": (1390, 524),
    "src/offbeat/training": (2483, 1406),
    "src/offbeat/transport": (2619, 1283),
    "src/offbeat_lab": (9857, 5252),
    "benchmarks": (6274, 3890),
    "tests": (36259,),
}
Named = Iterator[tuple[str, int]]  # names in full, each with its line


def relative(path: Path) -> str:
    return path.relative_to(ROOT if path.is_relative_to(ROOT) else LAB.parent).as_posix()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def unit_of(module: str) -> str:
    """The file or folder of the design that a module belongs to, given its path without suffix."""
    module = module.removesuffix("/__init__") if module != "__init__" else module
    return module if any(module in units for units in LEVELS) else module.split("/")[0]


def unit_of_path(path: Path) -> str:
    return unit_of(relative(path).removesuffix(".py"))


def level_of(unit: str) -> int:
    return next(i for i, units in enumerate(LEVELS) if unit in units)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, without what is there for the type checker alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from walk(child)


def imports(tree: ast.AST, *, typing_too: bool = False) -> Named:
    """Every imported name in full: ``from torch import nn`` gives ``torch.nn``."""
    for node in ast.walk(tree) if typing_too else walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def aliases(tree: ast.AST) -> dict[str, str]:
    """What the names at the start of a dotted expression stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(tree: ast.AST) -> Named:
    """Every dotted expression on an imported name, in full: ``dist.group`` and so on."""
    known = aliases(tree)
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *reversed(parts)]), node.lineno


def uses(path: Path) -> Named:
    yield from imports(tree_of(path), typing_too=True)
    yield from dotted(tree_of(path))


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def units_imported(path: Path) -> Named:
    """Units of the design that ``path`` imports."""
    for name, line in imports(tree_of(path)):
        if within(name, "offbeat"):
            parts = name.split(".")[1:]
            while parts and not any(
                ROOT.joinpath(*parts).with_suffix(s).exists() for s in ("", ".py")
            ):
                parts.pop()  # a class or function in a module
            yield unit_of("/".join(parts) or "__init__"), line


def test_imports_point_only_downward() -> None:
    wrong = [
        f"{relative(path)}:{line} must not import {other}"
        for path in MODULES
        for other, line in units_imported(path)
        if other != unit_of_path(path) and level_of(other) >= level_of(unit_of_path(path))
    ]
    assert wrong == []


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def test_the_laboratory_uses_public_names_only() -> None:
    """Those of ``offbeat``, ``offbeat.data`` and ``offbeat.extend``, at run time and for types."""
    public = {
        *(f"offbeat.{name}" for name in (*offbeat.__all__, "__version__")),
        *(f"offbeat.data.{name}" for name in offbeat.data.__all__),
        *(f"offbeat.extend.{name}" for name in offbeat.extend.__all__),
    }
    used: dict[str, set[str]] = {}
    for path in LAB_MODULES:
        names = [name for name, _ in imports(tree_of(path), typing_too=True)]
        names += [name for name, _ in dotted(tree_of(path)) if name.startswith("offbeat.")]
        for name in names:
            parts = name.split(".")
            known = {".".join(parts[:length]) for length in range(2, len(parts) + 1)} & public
            if within(name, "offbeat") and name != "offbeat" and not known:
                used.setdefault(relative(path), set()).add(name)
    assert used == {}


def shown_to_type_checkers(path: Path) -> set[tuple[str, str]]:
    """Return the home and the name of each import for the type checker alone."""
    (checked,) = (one for one in tree_of(path).body if isinstance(one, ast.If))
    parts = [name.rpartition(".") for name, _ in imports(ast.Module(checked.body, []))]
    return {(home, name) for home, _, name in parts}


def test_there_is_no_circle_of_imports() -> None:
    """Not between any two modules, those of one package included; type checking alone counts."""
    modules = {module_name(path): path for path in [*MODULES, *LAB_MODULES]}

    def imported(path: Path) -> set[str]:
        found = set()
        for name, _ in imports(tree_of(path), typing_too=True):
            while name and name not in modules:  # a class or function in a module
                name = name.rpartition(".")[0]
            found.add(name)
        return found & set(modules) - {module_name(path)}

    graph = {name: imported(path) for name, path in modules.items()}
    order = graphlib.TopologicalSorter(graph)
    assert [*order.static_order()]  # raises CycleError, which names the circle


def test_the_layers_are_the_ones_of_the_design() -> None:
    """A renamed module must not slip out of its layer, and the reader of imports sees them."""
    there = {unit_of_path(path) for path in MODULES}
    assert there == set().union(*LEVELS)
    assert sum(len(units) for units in LEVELS) == len(there), "a unit is listed twice"

    def imported(name: str) -> set[str]:
        return {unit for unit, _ in units_imported(ROOT / name)}

    assert {"transport", "strategies"} <= imported("averaging/worker.py")
    assert "training/assembly" in imported("synchronizer.py")
    assert "synchronizer" in imported("checkpoint/save_load.py")
    assert "torch.distributed.PrefixStore" in dict(
        uses(ROOT / "transport" / "torch_backend" / "process_groups.py")
    )


def is_private(name: str) -> bool:
    """Pitfall 22: return True for what the next release of torch may remove."""
    parts = name.split(".")
    private = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return private and within(name, "torch", "numpy")


BANNED: dict[str, tuple[list[Path], Callable[[str], bool]]] = {
    "the library imports nothing of the laboratory": (
        MODULES,
        lambda name: within(name, "offbeat_lab"),
    ),
    "strategies are pure: no torch, network, thread or clock, and no input or output": (
        [path for path in MODULES if unit_of_path(path) == "strategies"],
        lambda name: not within(name, *STRATEGIES_IMPORT),
    ),
    "averaging asks the team and its host, so the simulator runs the same code": (
        [path for path in MODULES if unit_of_path(path) == "averaging"],
        lambda name: within(name, *NETWORKS_THREADS_AND_CLOCKS),
    ),
    "baselines do so, too, but servers need locks": (
        REFERENCES,
        lambda name: within(name, *NETWORKS_THREADS_AND_CLOCKS - {"threading"}),
    ),
    "only shards of servers need locks": (
        [path for path in REFERENCES if path.name != "shard.py"],
        lambda name: within(name, "threading"),
    ),
    "nothing that the next release of torch may remove": (
        [path for path in MODULES if relative(path) not in PRIVATE_ALLOWED],
        is_private,
    ),
}


@pytest.mark.parametrize("rule", BANNED)
def test_no_module_uses_banned_names(rule: str) -> None:
    paths, banned = BANNED[rule]
    wrong = [
        f"{relative(path)}:{line} uses {name}"
        for path in paths
        for name, line in uses(path)
        if banned(name)
    ]
    assert wrong == []


def test_no_code_asks_for_the_kind_of_communicator() -> None:
    """No isinstance of a concrete communicator: their differences are behind the seam."""
    concrete = {"TorchCommunicator", "SingleCommunicator", "SimulatedCommunicator"}
    wrong = [
        f"{relative(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in MODULES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("isinstance", "issubclass")
        and concrete & {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
    ]
    assert wrong == []


def test_the_team_alone_holds_the_communicator() -> None:
    """Flows and the training layer ask the team, whose communicator may change."""
    asking = {"averaging", "training", "synchronizer", "attach"}
    wrong = [
        f"{relative(path)}:{node.lineno}: {ast.unparse(target)}"
        for path in [*(path for path in MODULES if unit_of_path(path) in asking), *REFERENCES]
        for node in ast.walk(tree_of(path))
        for target in (node.targets if isinstance(node, ast.Assign) else [])
        if isinstance(target, ast.Attribute) and "communicator" in target.attr
    ]
    assert wrong == []


OPTIONAL = {
    # Importing offbeat needs torch and numpy alone: extras are imported where they are used.
    "__init__": {
        *("typer", "rich", "matplotlib", "tensorboard", "wandb", "lightning", "sklearn"),
        *("torchvision", "numba", "transformers", "accelerate"),
    },
    # Windows has none of these. A ``try`` around the import is fine: `offbeat plan` runs there.
    "cli": {
        *("crypt", "curses", "fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog"),
        *("termios", "tty", "msvcrt", "winreg"),
    },
}


@pytest.mark.parametrize("layer", OPTIONAL)
def test_modules_up_to_a_layer_can_be_imported_without(layer: str) -> None:
    wrong = [
        f"{relative(path)}:{line} imports {name}"
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name, line in imports(ast.Module([node], []))
        if level_of(unit_of_path(path)) <= level_of(layer) and within(name, *OPTIONAL[layer])
    ]
    assert wrong == []


def test_all_is_every_public_name() -> None:
    """``offbeat.__all__`` equals what a user sees, and what a type checker is told."""
    assert {name for name in dir(offbeat) if not name.startswith("_")} == set(offbeat.__all__)
    assert len(offbeat.__all__) == len(set(offbeat.__all__))
    for package, path in ((offbeat, "__init__.py"), (offbeat.extend, "extend.py")):
        shown = shown_to_type_checkers(ROOT / path)
        assert sorted(name for _, name in shown) == sorted(package.__all__)
        for home, name in shown:  # what a type checker sees is what there is
            assert getattr(package, name) is getattr(importlib.import_module(home), name), name
    assert not {*offbeat.extend.__all__} & {*offbeat.__all__, *offbeat.data.__all__}
    assert set(offbeat.data.__all__) == {
        name
        for name, value in vars(offbeat.data).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    submodules = {module.name for module in pkgutil.iter_modules(offbeat.__path__)}
    assert submodules & set(offbeat.__all__) == {"attach", "data", "plan", "simulate"}
    for function in (offbeat.attach, offbeat.plan, offbeat.simulate):
        assert callable(function), "the function hides the module of the same name"


@pytest.mark.parametrize(
    "code",
    [
        "import offbeat.simulate.run; offbeat.simulate.__name__; import offbeat.simulate.network; "
        "from offbeat import simulate; simulate.__name__; offbeat.simulate.__name__; "
        "import offbeat.attach; offbeat.attach.__kwdefaults__; from offbeat.attach import attach",
        *nightly(
            [
                "import offbeat.plan; offbeat.plan.__name__; "
                "from offbeat.plan import plan, Plan; "
                "assert offbeat.plan is plan; assert offbeat.Plan is Plan",
                "from offbeat import *; simulate.__name__, data.SelDPSampler; "
                "from offbeat_lab import *; recipe, Task",
            ]
        ),
    ],
)
def test_names_are_there_in_whatever_order_modules_are_imported(code: str) -> None:
    """Public names come at their first use; functions are never the modules of their names."""
    call = [sys.executable, "-c", code]
    ran = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    """As of any other module."""
    for package in ("offbeat", "offbeat.extend", "offbeat_lab"):
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such'"):
            _ = importlib.import_module(package).no_such


PUBLIC: dict[str, Any] = {
    **{name: getattr(offbeat, name) for name in offbeat.__all__ if name != "data"},
    **{f"data.{name}": getattr(offbeat.data, name) for name in offbeat.data.__all__},
}


def place_of(thing: Any) -> str:
    """File and line of a class, function or property."""
    code = inspect.unwrap(getattr(thing, "fget", None) or getattr(thing, "__func__", thing))
    path = Path(inspect.getsourcefile(code) or "")
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{shown}:{inspect.getsourcelines(code)[1]}"


def test_every_parameter_is_explained() -> None:
    """The docstring's Args name each parameter of a public function or class."""
    wrong = []
    for name in sorted(
        set(PUBLIC) - {"Forecast", "Plan", "Simulation", "Synchronizer", "Stats", "Strategy"}
    ):
        thing, text = PUBLIC[name], inspect.getdoc(PUBLIC[name]) or ""
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            continue
        parameters = [p for p in inspect.signature(thing).parameters if p not in ("args", "kwargs")]
        if len(parameters) > 1 or "Args:" in text:
            explained = text.partition("Args:")[2]
            wrong += [
                f"{place_of(thing)}: {name} does not explain {parameter}"
                for parameter in parameters
                if f"{parameter}: " not in explained
            ]
    assert wrong == []


def test_no_constructor_swallows_typos() -> None:
    """Pitfall 18: no ``**kwargs`` in the public interface."""
    wrong = []
    for name, thing in PUBLIC.items():
        if inspect.isclass(thing) and issubclass(thing, BaseException | offbeat.Strategy):
            if issubclass(thing, offbeat.Strategy) and not inspect.isabstract(thing):
                with pytest.raises(TypeError):
                    thing(no_such_setting=1)
            continue
        kinds = {p.kind for p in inspect.signature(thing).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            wrong.append(f"{place_of(thing)}: {name}")
    assert wrong == []
    with pytest.raises(TypeError, match="no_such"):
        offbeat.attach(None, None, no_such=1)  # type: ignore[call-arg, arg-type]


def test_all_modules_import() -> None:
    """Also those that no other test imports."""
    pytest.importorskip("typer")
    for path in [*MODULES, *LAB_MODULES]:
        package = path.stem.removesuffix("_kernels")  # of which `make triton` needs one
        optional = path.parent.name == "integrations" or package == "triton"
        if optional and importlib.util.find_spec(package) is None:
            continue  # tests/frameworks needs the others
        importlib.import_module(module_name(path))


def code_lines(path: Path) -> int:
    """Return the number of lines without docstrings, comments, blank lines and imports."""
    skipped: set[int] = set()
    for node in ast.walk(tree_of(path)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            docstring and isinstance(node.value.value, str)
        ):
            skipped.update(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    rest = (line.strip() for number, line in lines if number not in skipped)
    return sum(bool(line) and not line.startswith("#") for line in rest)


def measured_rooms() -> dict[str, tuple[int, ...]]:
    """Return the lines and code lines of each room; of the tests the lines alone.

    Rooms are the folders of the library, the laboratory, the benchmarks and the tests.
    """
    repository = Path(__file__).parent.parent
    files: dict[str, list[Path]] = {}
    for top in ("src", "benchmarks", "tests"):
        for path in sorted((repository / top).rglob("*.py")):
            parts = path.relative_to(repository).parts
            library = parts[:2] == ("src", "offbeat")
            room = "/".join(
                parts[: min(3, len(parts) - 1) if library else 2 if top == "src" else 1]
            )
            files.setdefault(room, []).append(path)
    measured = {}
    for room, paths in files.items():
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
        measured[room] = (lines,) if room == "tests" else (lines, sum(map(code_lines, paths)))
    return measured


def test_every_room_keeps_its_budget() -> None:
    """Lines and code lines only fall: a figure that the code has left behind is an error, too."""
    measured = measured_rooms()
    assert measured.keys() == BUDGET.keys(), "`python tests/test_architecture.py` prints the rooms"
    wrong = []
    for room, found in measured.items():
        for kind, has, most in zip(("lines", "code lines"), found, BUDGET[room], strict=False):
            if has > most:
                wrong.append(
                    f"{room} grew to {has} {kind}, of {most}: remove as much elsewhere, or say in "
                    "BUDGET what goes instead"
                )
            elif most - has > max(40, 0.02 * has):
                wrong.append(f"{room} shrank to {has} {kind}: lower the {most} in BUDGET")
    assert wrong == []


if __name__ == "__main__":
    for name, figures in measured_rooms().items():
        sys.stdout.write(f'    "{name}": {figures},\n')
