"""The code keeps its shape: imports point down, functions fit the head, the documents match the tree."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_sao"
OUTSIDE = {"launch": ("tools", "tests"), "tools": ("tests",)}  # what a folder outside the package never imports
LAYERS = {
    "types": 0,
    "config": 0,
    "metrics": 0,
    "trace": 0,
    "algorithm": 1,
    "channel": 1,
    "megatron": 2,
    "data": 2,
    "sync": 3,
    "rollout": 3,
    "roles": 4,
    "controller": 4,
}
NO_TORCH = ("types", "config", "metrics", "trace")
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
MAX_NESTING = 3
MAX_POSITIONAL = 5
SOURCES = sorted(
    path
    for folder in ("megatron_sao", "launch", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if path.stat().st_size
)
TREES = {
    path: ast.parse(path.read_text())
    for folder in ("megatron_sao", "launch", "tools")
    for path in (ROOT / folder).rglob("*.py")
}
"""Made once, before any test has left a thread at work: Python 3.11 cannot make two trees at a time."""
NESTING = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{ids(path)} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def depth(node: ast.AST, level: int = 0) -> int:
    deepest = level
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse
        deepest = max(deepest, depth(child, level + (isinstance(child, NESTING) and not is_elif)))
    return deepest


@pytest.mark.parametrize("path", [p for p in SOURCES if PACKAGE in p.parents], ids=ids)
def test_imports_point_down_never_sideways(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for name in imports(path):
        assert name.split(".")[0] not in ("launch", "tools", "tests"), f"{ids(path)} imports {name} from outside"
        if name.startswith("megatron_sao.") and (other := name.split(".")[1]) != own:
            assert LAYERS[other] < LAYERS[own], f"{ids(path)} ({own}) imports {name}"


@pytest.mark.parametrize("path", [p for p in SOURCES if PACKAGE not in p.parents], ids=ids)
def test_tools_import_launch_and_never_the_other_way_round(path: Path) -> None:
    for name in imports(path):
        forbidden = OUTSIDE[path.relative_to(ROOT).parts[0]]
        assert name.split(".")[0] not in forbidden, f"{ids(path)} imports {name}"


@pytest.mark.parametrize("name", NO_TORCH)
def test_records_and_config_import_without_torch(name: str) -> None:
    tree = TREES[PACKAGE / f"{name}.py"]
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in top for alias in node.names] + [getattr(node, "module", "") or "" for node in top]
    assert not [n for n in names if n.split(".")[0] in ("torch", "megatron", "sglang")]


@pytest.mark.parametrize("folder", ["controller", "rollout"])
def test_controller_and_rollout_never_see_megatron(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        bad = [n for n in imports(path) if n.startswith(("megatron.", "megatron_sao.megatron", "megatron_sao.roles"))]
        assert not bad, f"{ids(path)} imports {bad}"


@pytest.mark.parametrize("folder", ["megatron", "roles", "sync"])
def test_training_ranks_start_without_an_http_client(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        bad = [n for n in imports(path) if n.split(".")[0] in ("aiohttp", "httpx", "requests")]
        assert not bad, f"{ids(path)} imports {bad}"


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_files_and_functions_fit_the_head(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{ids(path)} has {lines} lines"
    for function in functions(path):
        where = f"{ids(path)}:{function.lineno} {function.name}"
        length = (function.end_lineno or 0) - function.lineno + 1
        assert length <= MAX_FUNCTION_LINES, f"{where} has {length} lines"
        assert depth(function) <= MAX_NESTING, f"{where} nests {depth(function)} deep"
        assert len(function.args.args) <= MAX_POSITIONAL + 1, f"{where} takes too many positional parameters"


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_no_swallowed_exception_and_nothing_unpickled(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ExceptHandler) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
            name = ast.unparse(node.type) if node.type else ""
            assert name not in ("", "Exception", "BaseException"), f"{ids(path)}:{node.lineno} swallows every exception"
    assert not re.search(r"^\s*(import|from) pickle", path.read_text(), re.MULTILINE), f"{ids(path)} uses pickle"


def test_only_one_module_reads_megatrons_global_parallel_state() -> None:
    users = {ids(p) for p in SOURCES if any("parallel_state" in n for n in imports(p))}
    assert users <= {"megatron_sao/megatron/parallel.py"}


def test_the_architecture_page_lists_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = set(re.findall(r"^\| `([\w/]+\.py|[\w/]+/)`", text, re.MULTILINE))
    tree = {str(p.relative_to(PACKAGE)) for p in SOURCES if PACKAGE in p.parents and p.name != "__init__.py"}
    covered = {name for name in tree if name in table or any(name.startswith(f) for f in table if f.endswith("/"))}
    assert tree - covered == set(), "modules that docs/architecture.md does not list"
    assert {name for name in table if not (PACKAGE / name).exists()} == set(), "listed modules that do not exist"


def test_the_method_page_names_functions_that_exist() -> None:
    text = (ROOT / "docs" / "method.md").read_text()
    names = re.findall(r"`([\w/]+\.py):(\w+)`", text)
    assert len(names) >= 10
    for file, name in names:
        assert re.search(rf"^(async )?(def|class) {name}\b", (PACKAGE / file).read_text(), re.MULTILINE), (
            f"{file}:{name}"
        )


def code_lines(path: Path) -> int:
    """Lines with code on them: no blank ones, comments or docstrings."""
    text = path.read_text()
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in layout]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node
        ):
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_the_package_stays_small() -> None:
    lines = sum(code_lines(path) for path in SOURCES if PACKAGE in path.parents)
    assert lines < 12_000, f"the package has {lines} lines of code"
