"""What the packages never do: run what they read."""

from __future__ import annotations

import ast

import pytest

from tests.test_layers import PACKAGES, imports, modules

CALLS = {"eval", "exec", "compile", "__import__"}
MODULES = ["pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"]


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_evaluated(package: str) -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree, _ in modules(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS
    ]
    assert found == []


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_unpickled(package: str) -> None:
    found = [one for one in imports(package) if one.imported.partition(".")[0] in MODULES]
    assert [str(one) for one in found] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_shell_is_asked(package: str) -> None:
    found = [
        f"{name}:{node.value.lineno}"
        for name, tree, _ in modules(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "shell"
    ]
    assert found == []
