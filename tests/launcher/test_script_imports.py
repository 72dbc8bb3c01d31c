"""Packages that a script imports are imported by the server, once for all its workers."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from offbeat.launcher.forking import AVAILABLE, ForkServer
from offbeat.launcher.script_imports import import_packages_of

PACKAGES = ("before", "after", "failing", "threaded", "local")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, and one with a module of the user."""
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for name in ("before", "after"):
        (installed / f"{name}.py").write_text("part = 1\n")
    (installed / "failing.py").write_text("raise SystemExit(3)\n")
    (installed / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    (tmp_path / "local.py").touch()
    for path in (tmp_path, installed):
        monkeypatch.syspath_prepend(path)
    for name in PACKAGES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(installed), *sys.path]))
    return tmp_path


@pytest.mark.parametrize(
    ("script", "imported"),
    [
        ("'''About.'''\nimport os\nimport before as b\nfrom after import part", "before after"),
        ("import before\nx = 1\nimport after", "before"),
        ("import before\nimport local\nimport after", "before"),
        ("import before, local\nimport after", ""),
        ("from . import before\nimport after", ""),
        ("import before\nimport no_such_package\nimport after", "before"),
        ("import failing\nfrom before import no_such_name\nimport after", "before after"),
        ("import before\n(", ""),
    ],
)
def test_packages_before_anything_else_are_imported(
    script: str, imported: str, folder: Path
) -> None:
    """A statement in between may set a variable that the later packages read."""
    (folder / "train.py").write_text(script)
    import_packages_of(str(folder / "train.py"))
    assert [name for name in PACKAGES if name in sys.modules] == imported.split()


def test_a_script_that_does_not_exist_is_ignored(folder: Path) -> None:
    import_packages_of(str(folder / "none.py"))


@pytest.mark.skipif(not AVAILABLE, reason="forks")
@pytest.mark.parametrize(
    ("script", "modules"),
    [
        pytest.param("import before", ["before"], id="imported"),
        pytest.param("import before\nimport threaded", [], id="threads", marks=pytest.mark.nightly),
    ],
)
def test_a_server_forks_without_threads(script: str, modules: list[str], folder: Path) -> None:
    """If a package starts a thread, the server begins again without the script's packages."""
    (folder / "train.py").write_text(script)
    (folder / "site-packages" / "worker_function.py").write_text(
        "import sys, threading\n"
        "def main():\n"
        f"    print([name for name in {PACKAGES} if name in sys.modules], "
        "threading.active_count())\n"
        "    sys.stdout.flush()\n"
    )
    server = ForkServer([], os.environ, str(folder / "train.py"))
    try:
        with tempfile.TemporaryFile() as out:
            worker = server.fork("worker_function:main", [], os.environ, out.fileno(), 2)
            assert worker.wait() == 0
            out.seek(0)
            assert out.read().decode() == f"{modules} 1\n"
    finally:
        server.close()
