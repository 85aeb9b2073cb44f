"""Imports point down; what is heavy is imported in few places (the rest: `lint-imports`)."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    name: path
    for name, path in {
        "kvd": ROOT / "kvd",
        "kvd_tiers": ROOT / "plugins/kvd_tiers",
        "kvd_client": ROOT / "clients/kvd_client",
        "kvd_ctl": ROOT / "clients/kvd_ctl",
        "kvd_infer": ROOT / "clients/kvd_infer",
    }.items()
    if path.is_dir()
}

# What each package may import of the others, besides `kvd.__version__`.
MAY_IMPORT = {
    "kvd": ["kvd"],
    "kvd_tiers": ["kvd_tiers", "kvd.tiers", "kvd.protocol", "kvd.arena"],
    "kvd_client": ["kvd_client", "kvd.protocol", "kvd.arena"],
    "kvd_ctl": ["kvd_ctl", "kvd_client", "kvd.arena", "kvd.protocol", "kvd.config", "kvd.loading"],
    "kvd_infer": ["kvd_infer", "kvd_client", "kvd.sdk"],
}

# The only modules, or packages, that may import these.
IMPORTED_BY = {
    "zmq": [
        "kvd.actors.doors",
        "kvd.actors.router",
        "kvd.actors.publisher",
        "kvd.protocol.certificates",
        "kvd_client.transport",
        "kvd_client.events",
    ],
    "torch": [
        "kvd_tiers.torch",
        "kvd.arena.device",
        "kvd_client.binding",
        "kvd_client.views",
        "kvd_infer",
    ],
    "transformers": ["kvd_infer"],
    "starlette": ["kvd_infer.server"],
    "uvicorn": ["kvd_infer.server"],
    "opentelemetry.sdk": ["kvd.sdk"],
    "opentelemetry.exporter": ["kvd.sdk"],
    "prometheus_client": ["kvd.actors.http"],
    "kvd.sdk": ["kvd.__main__", "kvd.check", "kvd_infer.__main__"],
    "pickle": [],
}

DOING = ["os", "time", "socket", "threading", "multiprocessing", "asyncio", "anyio", "trio"]


class Import(NamedTuple):
    module: str  # the module that imports
    imported: str  # the module, or the name in it: `kvd.arena.base.Arena`
    line: int
    when_imported: bool  # not in a function, not for types only

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.imported}"


def within(name: str, packages: list[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def modules(package: str) -> Iterator[tuple[str, ast.Module, bool]]:
    """Each module's import name, its tree, and whether it is a package's __init__."""
    folder = PACKAGES[package]
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        yield name, ast.parse(path.read_text(), path), is_package


def is_lazy(node: ast.AST) -> bool:
    """Whether what stands in the node runs later than the import of its module, or never."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    yield node, lazy
    for child in ast.iter_child_nodes(node):
        yield from walk(child, lazy or is_lazy(node))


def imports(package: str) -> Iterator[Import]:
    for name, tree, is_package in modules(package):
        for node, lazy in walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(name, alias.name, node.lineno, not lazy)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = name.split(".")[: (1 if is_package else 0) - node.level or None]
                    base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(name, f"{base}.{alias.name}", node.lineno, not lazy)


ALL_IMPORTS = [found for package in PACKAGES for found in imports(package)]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_lies_below_it(package: str) -> None:
    ours = [
        found
        for found in ALL_IMPORTS
        if within(found.module, [package]) and within(found.imported, list(MAY_IMPORT))
    ]
    allowed = [*MAY_IMPORT[package], "kvd.__version__"]
    assert [str(found) for found in ours if not within(found.imported, allowed)] == []


@pytest.mark.parametrize("heavy", IMPORTED_BY)
def test_heavy_package_is_imported_in_named_modules_only(heavy: str) -> None:
    found = [found for found in ALL_IMPORTS if within(found.imported, [heavy])]
    assert [str(one) for one in found if not within(one.module, IMPORTED_BY[heavy])] == []


def test_client_works_without_torch() -> None:
    found = [found for found in ALL_IMPORTS if within(found.imported, ["torch"])]
    client = [one for one in found if within(one.module, ["kvd_client"])]
    assert [str(one) for one in client if one.when_imported] == []


def test_cache_decides_and_does_nothing() -> None:
    cache = [found for found in ALL_IMPORTS if within(found.module, ["kvd.cache"])]
    assert [str(found) for found in cache if within(found.imported, DOING)] == []


@pytest.mark.parametrize("part", ["kvd.cache", "kvd.protocol"])
def test_plain_part_has_no_await(part: str) -> None:
    awaits = ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith
    found = [
        f"{name}:{node.lineno}"
        for name, tree, _ in modules("kvd")
        if within(name, [part])
        for node in ast.walk(tree)
        if isinstance(node, awaits) or (isinstance(node, ast.comprehension) and node.is_async)
    ]
    assert found == []


def test_importing_kvd_imports_nothing() -> None:
    assert [str(found) for found in ALL_IMPORTS if found.module == "kvd"] == []
