"""Check manifests against the published schemas: those of the clients of Kubernetes and Kubeflow.

    python examples/launchers/kubernetes/check.py FILE ...

Needs the packages kubernetes, kubeflow-training and pyyaml, and no cluster. A field that the schema
does not know, one that it asks for and that is missing, and a value of another type are errors.
"""

import re
import sys
from pathlib import Path
from typing import Any

import kubernetes.client
import yaml
from kubeflow.training import models

KINDS = {
    ("v1", "Service"): "V1Service",
    ("apps/v1", "Deployment"): "V1Deployment",
    ("batch/v1", "Job"): "V1Job",
    ("kubeflow.org/v1", "PyTorchJob"): "KubeflowOrgV1PyTorchJob",
}
PLAIN = {"str": str, "int": int, "bool": bool, "float": float, "object": object}


def check(value: Any, kind: str, path: str) -> None:
    """Raise ValueError if ``value`` is not what the client calls ``kind``."""
    if found := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        require(isinstance(value, list), path, "a list")
        for place, one in enumerate(value):
            check(one, found[1], f"{path}[{place}]")
    elif found := re.fullmatch(r"(?:dict\(|Dict\[)(\w+), (.+)[)\]]", kind):
        require(isinstance(value, dict), path, "a mapping")
        for name, one in value.items():
            check(name, found[1], path)
            check(one, found[2], f"{path}.{name}")
    elif kind in PLAIN:
        require(isinstance(value, PLAIN[kind]), path, kind)
    else:
        check_fields(value, kind, path)


def check_fields(value: Any, kind: str, path: str) -> None:
    """The same, of a kind that has fields."""
    model = getattr(models, kind, None) or getattr(kubernetes.client, kind)
    require(isinstance(value, dict), path, f"a {kind}")
    attributes = {shown: name for name, shown in model.attribute_map.items()}
    for shown, one in value.items():
        require(shown in attributes, f"{path}.{shown}", f"a field of {kind}, which is unknown")
        check(one, model.openapi_types[attributes[shown]], f"{path}.{shown}")
    model(**{attributes[shown]: one for shown, one in value.items()})  # what it asks for is there


def require(condition: bool, path: str, what: str) -> None:
    if not condition:
        raise ValueError(f"{path}: should be {what}")


def main(paths: list[str]) -> None:
    for path in paths:
        for manifest in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")):
            kind = manifest["apiVersion"], manifest["kind"]
            check(manifest, KINDS[kind], f"{Path(path).name}: {kind[1]}")
            print(f"{path}: {kind[1]} {manifest['metadata']['name']} is as its schema says")


if __name__ == "__main__":
    main(sys.argv[1:])
