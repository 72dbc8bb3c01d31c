"""The rules of the design that no type checker knows: layers, imports, names, docstrings."""

import ast
import graphlib
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import offbeat
from cells import nightly

ROOT = Path(offbeat.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
every_module = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix()
)

# From the bottom up. A module imports only from below, or from its own package.
LEVELS = [
    {"errors", "units", "arguments", "kernels", "late", "table"},
    {"checkpoint", "costs", "significance", "telemetry", "schedule", "batchnorm", "plots"},
    {"fabric"},
    {"means", "simulate"},
    {"strategies"},
    {"training"},
    {"data", "plan"},
    {"__init__"},
    {"lab", "integrations"},
    {"cli", "__main__"},
]
NETWORKS_THREADS_AND_CLOCKS = {
    "torch.distributed",
    "torch.multiprocessing",
    "asyncio",
    "concurrent",
    "datetime",
    "multiprocessing",
    "queue",
    "socket",
    "threading",
    "time",
}
PRIVATE_ALLOWED = {"simulate/process_group.py"}  # the default process group needs one


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def unit_of(path: Path) -> str:
    """The file or package of the design that ``path`` belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def level_of(unit: str) -> int:
    return next(i for i, units in enumerate(LEVELS) if unit in units)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, without what is there for the type checker alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from walk(child)


def imports(tree: ast.AST, *, typing_too: bool = False) -> Iterator[str]:
    """Every imported name in full: ``from torch import nn`` gives ``torch.nn``."""
    for node in ast.walk(tree) if typing_too else walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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


def dotted(tree: ast.AST) -> Iterator[str]:
    """Every dotted expression on an imported name, in full: ``dist.group`` and so on."""
    known = aliases(tree)
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *reversed(parts)])


def uses(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {*imports(tree), *dotted(tree)}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def units_imported(path: Path) -> set[str]:
    """Files and packages of the design that ``path`` imports."""
    found = set()
    for name in imports(ast.parse(path.read_text())):
        if within(name, "offbeat"):
            first = name.split(".")[1] if "." in name else "__init__"
            inside = (ROOT / first).is_dir() or (ROOT / f"{first}.py").is_file()
            found.add(first if inside else "__init__")
    return found


@every_module
def test_imports_point_only_downward(path: Path) -> None:
    """Fabric below means below strategies below training below data, lab and the command line."""
    unit = unit_of(path)
    for other in units_imported(path) - {unit}:
        assert level_of(other) < level_of(unit), f"{relative(path)} must not import {other}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def test_there_is_no_circle_of_imports() -> None:
    """Not between any two modules, those of one package included; type checking alone counts."""
    modules = {module_name(path): path for path in MODULES}

    def imported(path: Path) -> set[str]:
        found = set()
        for name in imports(ast.parse(path.read_text()), typing_too=True):
            while name and name not in modules:  # a class or function in a module
                name = name.rpartition(".")[0]
            found.add(name)
        return found & set(modules) - {module_name(path)}

    graph = {name: imported(path) for name, path in modules.items()}
    order = graphlib.TopologicalSorter(graph)
    assert [*order.static_order()]  # raises CycleError, which names the circle


def test_the_layers_are_the_ones_of_the_design() -> None:
    """A renamed module must not slip out of its layer, and the reader of imports sees them."""
    for name in ("fabric", "means", "strategies", "training", "data", "simulate", "lab", "cli"):
        assert (ROOT / name / "__init__.py").is_file()
    there = {unit_of(path) for path in MODULES}
    assert there == set().union(*LEVELS) - {"__main__"}
    assert {"fabric", "means"} <= units_imported(ROOT / "strategies" / "worker.py")
    assert "strategies" in units_imported(ROOT / "training" / "attach.py")
    assert units_imported(ROOT / "means" / "replica.py") == set()
    assert "torch.distributed.PrefixStore" in uses(ROOT / "fabric" / "groups.py")


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if unit_of(p) in {"strategies", "means", "significance"}],
    ids=relative,
)
def test_strategies_know_no_network_thread_or_clock(path: Path) -> None:
    """A strategy cannot tell a cluster from the simulator; a mean asks its host for the time."""
    for name in uses(path):
        for banned in NETWORKS_THREADS_AND_CLOCKS:
            assert not within(name, banned), f"{relative(path)} uses {name}"


def test_nobody_asks_which_communicator_it_has() -> None:
    """No isinstance of a concrete communicator: what differs between them is behind the seam."""
    concrete = {"TorchCommunicator", "SingleCommunicator", "SimulatedCommunicator", "Accounting"}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
            ):
                asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                assert not asked & concrete, f"{relative(path)}: {ast.unparse(node)}"


def test_the_team_alone_holds_the_communicator() -> None:
    """Means, strategies and the front door ask the team, which may change."""
    for path in MODULES:
        if unit_of(path) in {"means", "strategies", "training"}:
            for node in ast.walk(ast.parse(path.read_text())):
                targets = node.targets if isinstance(node, ast.Assign) else []
                for target in targets:
                    if isinstance(target, ast.Attribute):
                        assert "fabric" not in target.attr, f"{relative(path)}:{node.lineno}"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if relative(p) not in PRIVATE_ALLOWED], ids=relative
)
def test_no_private_part_of_torch(path: Path) -> None:
    """Pitfall 22: nothing that the next torch release may take away."""
    for name in uses(path):
        first, *rest = name.split(".")
        if first in {"torch", "numpy"}:
            private = [part for part in rest if part.startswith("_") and not part.endswith("__")]
            assert not private, f"{relative(path)} uses {name}"


def imported_with_offbeat() -> Iterator[tuple[str, set[str]]]:
    """Each module of the library, and the packages that it imports at its top level."""
    for path in MODULES:
        if level_of(unit_of(path)) <= level_of("__init__"):
            yield (
                relative(path),
                {
                    name.split(".")[0]
                    for node in ast.parse(path.read_text()).body
                    for name in imports(ast.Module([node], []))
                    if isinstance(node, ast.Import | ast.ImportFrom)
                },
            )


def test_the_command_line_and_the_lab_are_optional() -> None:
    """Importing offbeat needs torch and numpy alone: extras are imported where they are used."""
    extras = {
        "typer",
        "rich",
        "matplotlib",
        "tensorboard",
        "wandb",
        "lightning",
        "sklearn",
        "torchvision",
    }
    for module, top in imported_with_offbeat():
        assert not top & extras, module


def test_importing_offbeat_needs_no_module_of_one_platform() -> None:
    """Windows has none of these; a ``try`` around the import is fine."""
    unix = {"crypt", "curses", "fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog"}
    for module, top in imported_with_offbeat():
        assert not top & {*unix, "termios", "tty", "msvcrt", "winreg"}, module


def test_all_is_every_public_name() -> None:
    """``offbeat.__all__`` equals what a user sees, and what a type checker is told."""
    assert {name for name in dir(offbeat) if not name.startswith("_")} == set(offbeat.__all__)
    assert len(offbeat.__all__) == len(set(offbeat.__all__))
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (checked,) = (one for one in tree.body if isinstance(one, ast.If))
    shown = {name.rpartition(".") for name in imports(ast.Module(checked.body, []))}
    assert {name for _, _, name in shown} == set(offbeat.__all__)
    for home, _, name in shown:  # what a type checker sees is what there is
        expected = getattr(importlib.import_module(home), name)
        assert getattr(offbeat, name) is expected, name
    assert set(offbeat.data.__all__) == {
        name
        for name, value in vars(offbeat.data).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    submodules = {module.name for module in pkgutil.iter_modules(offbeat.__path__)}
    assert submodules & set(offbeat.__all__) == {"data", "plan", "simulate"}
    for hidden in (offbeat.simulate, offbeat.plan):
        assert callable(hidden), "the function hides the package of the same name"


@pytest.mark.parametrize(
    "code",
    [
        "import offbeat.simulate.run; offbeat.simulate.__name__; import offbeat.simulate.network; "
        "from offbeat import simulate; simulate.__name__; offbeat.simulate.__name__",
        "import offbeat.plan.play; offbeat.plan.__name__; from offbeat.plan import plan, Plan; "
        "assert offbeat.plan is plan; assert offbeat.Plan is Plan",
        *nightly(
            [
                "from offbeat import *; simulate.__name__, data.SelDPSampler; "
                "from offbeat.lab import *; recipe, Task"
            ]
        ),
    ],
)
def test_names_are_there_in_whatever_order_modules_are_imported(code: str) -> None:
    """Public names come at their first use; the function ``simulate`` is never the package."""
    call = [sys.executable, "-c", code]
    ran = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("package", ["offbeat", "offbeat.lab"])
def test_a_name_that_is_not_there_is_an_attribute_error(package: str) -> None:
    """As of any other module."""
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such'"):
        _ = importlib.import_module(package).no_such


PUBLIC = {
    **{name: getattr(offbeat, name) for name in offbeat.__all__ if name != "data"},
    **{f"data.{name}": getattr(offbeat.data, name) for name in offbeat.data.__all__},
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_things_have_docstrings(name: str) -> None:
    """Every public class and function, and every public method and property of such a class."""
    thing = PUBLIC[name]
    text = thing.__doc__ or ""
    assert text.strip(), name
    assert not text.startswith(f"{thing.__name__}("), "a dataclass's own docstring says nothing"
    if inspect.isclass(thing):
        for attribute, value in vars(thing).items():
            is_code = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if is_code and not attribute.startswith("_"):
                documented = inspect.getdoc(getattr(thing, attribute)) or value.__doc__ or ""
                assert documented.strip(), f"{name}.{attribute}"


def settings_of(name: str) -> list[str]:
    thing = PUBLIC[name]
    if inspect.isclass(thing) and issubclass(thing, BaseException):
        return []
    return [p for p in inspect.signature(thing).parameters if p not in ("args", "kwargs")]


@pytest.mark.parametrize(
    "name",
    sorted(set(PUBLIC) - {"Forecast", "Plan", "Simulation", "Synchronizer", "Stats", "Strategy"}),
)
def test_every_parameter_is_explained(name: str) -> None:
    """The docstring's Args name each parameter of a public function or class."""
    parameters = settings_of(name)
    text = inspect.getdoc(PUBLIC[name]) or ""
    if len(parameters) > 1 or "Args:" in text:
        explained = text.partition("Args:")[2]
        for parameter in parameters:
            assert f"{parameter}: " in explained, f"{name} does not explain {parameter}"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_no_constructor_swallows_typos(name: str) -> None:
    """Pitfall 18: no ``**kwargs`` at the front door."""
    thing = PUBLIC[name]
    if inspect.isclass(thing) and issubclass(thing, BaseException | offbeat.Strategy):
        if issubclass(thing, offbeat.Strategy) and not inspect.isabstract(thing):
            with pytest.raises(TypeError):
                thing(no_such_setting=1)
        return
    kinds = {p.kind for p in inspect.signature(thing).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@every_module
def test_modules_begin_with_a_sentence_about_themselves(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert docstring.partition("\n")[0].endswith("."), relative(path)


def test_all_modules_import() -> None:
    """Nothing is broken that no test touches."""
    pytest.importorskip("typer")
    for path in MODULES:
        if unit_of(path) == "integrations" and importlib.util.find_spec(path.stem) is None:
            continue  # tests/frameworks needs its package
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        importlib.import_module(name.removesuffix(".__init__"))
