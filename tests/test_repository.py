"""Files for the host of the repository: workflows, forms, containers and addresses."""

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PINNED = re.compile(r"actions/[\w-]+@v\d+|pypa/gh-action-pypi-publish@release/v1")


@cache
def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@cache
def make_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in read(workflow)["jobs"].values() for step in job.get("steps", [])]


def made(command: str) -> list[str]:
    """The targets that a shell command passes to make."""
    found = re.findall(r"^make (.*)$", command, re.MULTILINE)
    return [target for arguments in found for target in shlex.split(arguments)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_reads_by_default_and_ends(path: Path) -> None:
    """Jobs ask for further permissions by name, none of them uses a secret, actions are pinned."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    assert "secrets." not in path.read_text(encoding="utf-8")
    for job in workflow["jobs"].values():
        assert "uses" in job or 0 < job["timeout-minutes"] <= 240
        assert set(job.get("permissions", {})) <= {"pages", "id-token"}
        assert (ROOT / job.get("uses", ".")).exists()
    for step in steps(path):
        assert PINNED.fullmatch(step.get("uses", "actions/none@v0"))


def test_workflows_and_containers_call_targets_of_make() -> None:
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    commands = [step["run"] for path in WORKFLOWS for step in steps(path) if "run" in step]
    called = {target for one in [*commands, container["postCreateCommand"]] for target in made(one)}
    assert called == {"test", "nightly", "docs", "dist", "install"}
    assert called <= make_targets()


def test_make_names_files_that_exist() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.findall(r"(?:tests|examples|\.ci)/[\w./-]+", text)
    assert [name for name in names if not (ROOT / name).exists()] == []


ADDRESSES = ("pyproject.toml", "mkdocs.yml", "SECURITY.md", ".github/ISSUE_TEMPLATE/config.yml")


@pytest.mark.parametrize("name", ADDRESSES)
def test_the_address_of_the_repository_is_the_same_everywhere(name: str) -> None:
    """That of ``project.urls`` in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    owner, repository = project["urls"]["Repository"].removeprefix("https://github.com/").split("/")
    text = (ROOT / name).read_text(encoding="utf-8")
    found = re.findall(r"https://([\w-]+\.)?(github\w*)\.(com|io)/([\w-]+)(?:/([\w-]+))?", text)
    assert found
    for subdomain, _, domain, first, second in found:
        here = (subdomain[:-1], first) if domain == "io" else (first, second)
        assert here == (owner, repository)


PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_links_of_a_page_lead_to_files_and_headings(path: Path) -> None:
    """The documentation has no links to files that its site does not have."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", path.read_text(encoding="utf-8"))
    for name, anchor in links:
        to = (path.parent / name).resolve() if name else path
        assert to.exists(), name
        assert path.parent in to.parents, name
        if anchor:
            headings = re.findall(r"^#+ (.+)$", to.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings]
            assert anchor in slugs, f"{name}#{anchor}"


def test_the_readme_fits_on_two_screens() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert [line for line in lines if len(line) > 100] == []
