"""Imports the packages of a script before workers are forked, so that no worker has to."""

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path


def import_packages_of(script: str) -> None:
    """Run the import statements at the top of a script that import installed packages.

    An import that fails here fails again in the worker, which reports it. So errors are ignored.
    """
    with contextlib.suppress(Exception):  # such as a syntax error
        for statement in _package_imports(ast.parse(Path(script).read_bytes())):
            with contextlib.suppress(Exception, SystemExit):
                exec(compile(ast.Module([statement], []), script, "exec"), {})


def _package_imports(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements that import installed packages, up to the first that does other things.

    That one may set a variable which later packages read. It may also import a module of the
    user, which may do the same, and may be edited before a worker starts again.
    """
    for statement in tree.body:
        match statement:
            case ast.Expr(ast.Constant()):  # the docstring
                continue
            case ast.Import():
                names = [alias.name for alias in statement.names]
            case ast.ImportFrom(module=str(name), level=0):
                names = [name]
            case _:
                return
        packages = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
        if not all(map(_is_installed, packages)):
            return
        if packages:
            yield statement


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and not {"site-packages", "dist-packages"}.isdisjoint(
        Path(spec.origin or "").parts
    )
