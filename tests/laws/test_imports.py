"""Law 9: imports go down, in no circle, and what answers before jax is there does not import it."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import longtrain

PACKAGE = Path(longtrain.__file__).parent

# A room is a file or a folder of the package. Each imports from its own floor and lower ones.
FLOORS = {
    0: ["__init__", "errors", "hardware", "config", "presets", "flops"],
    1: ["parallel"],
    2: ["layout"],
    3: ["ops"],
    4: ["model", "hf", "data"],
    5: ["optimizer", "guard", "state", "lora"],
    6: ["step", "build", "compilations"],
    7: [
        "plan",
        "checkpoint",
        "metrics",
        "evaluate",
        "probes",
        "generate",
        "compare",
        "convert",
        "accounting",
        "difference",
        "digests",
        "inventory",
        "resume",
        "runlock",
        "stopping",
        "stored",
        "profiling",
        "watchdog",
    ],
    8: ["trainer", "doctor", "bench"],
    9: ["cli", "__main__", "supervisor"],
}
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms}

# What a user waits for before jax is needed: a refused config, `longtrain config`, `data prepare`, any start.
WITHOUT_JAX = [
    "longtrain.cli",
    "longtrain.config",
    "longtrain.config.huggingface",
    "longtrain.data.huggingface",
    "longtrain.data.pool",
    "longtrain.data.prepare",
    "longtrain.data.prepared",
    "longtrain.data.readers",
    "longtrain.data.sources",
    "longtrain.data.tokenizers",
    "longtrain.flops",
    "longtrain.hardware",
    "longtrain.parallel.cluster",
    "longtrain.parallel.lifeline",
    "longtrain.parallel.process",
    "longtrain.plan.report",
    "longtrain.plan.targets",
    "longtrain.supervisor",
]


def modules() -> dict[str, Path]:
    """Dotted name -> file of each module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(module: str, *, top_level_only: bool = False) -> set[str]:
    """The modules of the package that a module imports, anywhere in its text or as it is loaded."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    found: set[str] = set()
    nodes = list(_loaded(tree)) if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write the whole name"
            base = node.module or ""
            # `from longtrain.config import reading` imports the module reading, or a name of config.
            names = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names
            ]
        else:
            continue
        found.update(names)
    return found


def _loaded(node: ast.AST):
    """The nodes that run when the module is loaded: not the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _loaded(child)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_its_floor_and_below(module: str):
    assert room(module) in FLOOR_OF, f"{module} has no floor: give it one in FLOORS"
    floor = FLOOR_OF[room(module)]
    upward = {
        name: FLOOR_OF[room(name)]
        for name in imports(module)
        if name in MODULES and FLOOR_OF[room(name)] > floor
    }
    assert not upward, f"{module} (floor {floor}) imports upward: {upward}"


def test_no_circle():
    """Among modules as they load. A package's own parts may be loaded by it, not it by them."""
    graph = {
        module: {name for name in imports(module, top_level_only=True) if name in MODULES and name != module}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_no_circle_of_rooms():
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        theirs = {room(name) for name in imports(module) if name in MODULES}
        graph.setdefault(room(module), set()).update(theirs - {room(module)})
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_loading_it_loads_no_jax(module: str):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules or 'jaxlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_floors_would_notice():
    """The reading of imports itself: what it must find is found."""
    assert "longtrain.config.checks" in imports("longtrain.config")
    assert "longtrain.errors" in imports("longtrain.config")
    assert FLOOR_OF[room("longtrain.ops.attention")] == 3
