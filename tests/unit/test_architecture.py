"""The house's rules as tests: one import arrow, lean start, small functions and files."""

import ast
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "compressor"
FLOORS = [
    {"kernels"},
    {"core"},
    {"arch"},
    {"checkpoint", "calibration"},
    {"passes", "export", "transforms"},
    {"recipe", "eval", "models", "distill"},
    {"pipeline", "rounding", "finishing", "runkey"},
    {"cli"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
FREE = {"errors", "__init__", "__main__", "shipped", "patterns"}  # importable from anywhere


def sources():
    return sorted(path for path in ROOT.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


def imports(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def ours(path: Path):
    for name in imports(path):
        if name.startswith("compressor."):
            yield name.split(".")[1:]


def test_there_is_something_to_check():
    assert len(sources()) > 25


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path):
    room = room_of(path)
    if room in FREE:
        return
    for target in ours(path):
        if target[0] in FREE or target[0] not in FLOOR:
            continue
        assert FLOOR[target[0]] <= FLOOR[room], f"{path.name} imports {'.'.join(target)}"


@pytest.mark.parametrize("room", ["passes", "export"])
def test_neighbours_do_not_import_each_other(room):
    shared = {"base", "__init__"}
    files = [p for p in (ROOT / room).glob("*.py") if p.stem not in shared]
    assert files
    for path in files:
        for target in ours(path):
            if target[0] != room or len(target) < 2 or target[1] in shared:
                continue
            helper = target[1].startswith(path.stem + "_")  # gguf.py may use gguf_tokenizer.py
            assert helper, f"{room}/{path.name} imports {'.'.join(target)}"


def test_the_command_line_starts_lean():
    heavy = ("torch", "transformers", "numba")
    code = f"import sys, compressor.cli.app; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_comes_in_half_a_second():
    """Processor seconds: a busy machine must not fail it."""

    def once():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "compressor", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(once() for _ in range(5)) < 0.5


def functions():
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno - body[0].lineno + 1) if body else 0
                yield lines, f"{path.relative_to(ROOT)}:{node.name}"


def test_functions_and_files_stay_readable():
    lengths = sorted(functions())
    assert lengths[int(len(lengths) * 0.9)][0] <= 27, lengths[-10:]
    assert lengths[-1][0] <= 60, lengths[-3:]
    files = sorted((len(p.read_text().splitlines()), str(p.relative_to(ROOT))) for p in sources())
    assert files[-1][0] <= 420, files[-3:]


def test_only_the_command_line_prints():
    for path in sources():
        if room_of(path) == "cli":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                pytest.fail(f"{path}:{node.lineno} prints")
