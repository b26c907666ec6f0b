"""The shape of the code: who may import whom, what is public, how long things may get.

A test here fails for a decision, not for a bug: change the code, or change the table and say why.
"""

import ast
import doctest
import graphlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

import autosched as asc

PACKAGE = Path(asc.__file__).parent
EVERYTHING = ["*"]
DATA = "errors graph machine costs placement program timeline tree".split()
WALKING = ["clocks", "parts", "standing"]  # what lowering and verify both mean by "before", "overlaps" and "is there"

# A part is a module of autosched, or a package in it; inside a package everyone may import everyone.
MAY_IMPORT = {
    # what, and what is given and decided: plain data
    "errors": [],
    "allowed": [],  # one rule for names and numbers, for all that take some
    "tree": [],
    "collecting": [],
    "logs": [],
    "parts": ["tree"],
    "standing": [],
    "effects": ["parts", "tree"],
    "layout": ["tree"],
    "readers": ["errors"],  # of JSON, which a machine, too, is kept as
    "device": ["allowed", "errors"],
    "machine": ["allowed", "device", "errors", "readers"],
    "program": ["errors"],
    "timeline": ["costs", "errors", "program"],  # spans lie on the program's streams; of costs it names the type
    "task": ["composite", "parts", "tree"],
    "composite": ["task", "tree", "value"],  # what merged tasks call; a task may be one
    "value": ["errors", "graph", "parts"],  # value, task, tree and effects are parts of what a graph is
    "graph": ["allowed", "composite", "errors", "effects", "including", "parts", "task", "tree", "value"],
    "costs": ["allowed", "errors", "machine", "graph", "readers", "tree"],
    "flow": ["graph"],
    "placement": ["errors", "flow", "machine", "graph"],
    # other graphs that say the same
    "including": ["effects", "errors", "graph", "parts", "task", "tree", "value"],  # graph calls it
    "marked": ["errors", "tree", "value"],
    "folding": ["effects", "graph"],
    "merging": ["composite", "folding", "graph", "including", "task", "tree", "value"],
    "grouping": ["costs", "errors", "folding", "graph", "machine", "merging", "task"],
    # deciding, pure
    "jit": [],  # numba comes in here alone
    "bounds": ["collecting", "errors", "jit", "graph", "machine", "costs", "placement"],  # sees what a policy sees
    # robust asks what plans take
    "policies": ["collecting", "errors", "flow", "jit", "graph", "machine", "costs", "placement", "bounds", "noise"],
    "moments": ["jit"],
    "clocks": ["moments", "program"],  # which go on from where kernels have come
    "lowering": ["errors", "flow", "graph", "jit", "machine", "moments", "placement", "program", *WALKING],
    # reading a program
    "columns": ["program"],
    "plain": ["columns", "flow", "graph", "jit", "moments", "program"],
    "verify": [*DATA, *WALKING, "plain"],
    "simulate": [*DATA, "columns", "jit"],
    "noise": [*DATA, "allowed", "lowering", "simulate"],
    "footprint": [*DATA, "collecting", "standing"],
    "fitting": [*DATA, "footprint", "lowering"],  # what fits into memory is what footprint counts
    "hosting": ["graph", "tree"],
    "learning": DATA,
    "traces": [*DATA, "allowed"],
    # what would be otherwise it places, lowers and simulates; times are written as in pictures
    "explaining": [*DATA, "bounds", "collecting", "fitting", "policies", "simulate", "tables", "task", "viz"],
    "codegen": [*DATA, "composite", "standing", "task", "value"],  # spells a call as values do
    "viz": [*DATA, "allowed", "task"],
    "drawing": [*DATA, "files", "viz"],  # pictures into files and notebooks
    # running a program
    "segments": ["lowering", "program"],  # events between segments are inserted as those between runs are
    "outgoing": ["tree"],
    "recording": [*DATA, "backends", "memory", "outgoing", "segments", "workers"],
    "replaying": ["outgoing", "program", "recording", "tree", "workers"],
    "workers": ["errors"],
    "straight": ["workers"],
    "crew": ["straight", "workers"],
    "interleaver": ["crew", "workers"],  # a crew's thread plays the others where there is a deadline
    "forks": [],
    "nesting": ["errors", "forks"],
    "progress": ["errors", "graph", "program", "workers"],
    "check": ["effects", "errors", "graph", "layout", "tree"],
    "memory": [*DATA, "backends", "effects", "layout", "standing"],
    "inline": ["codegen", "workers"],
    "execute": [
        *[*DATA, "backends", "check", "codegen", "inline", "memory", "profile", "progress", "workers"],
        *["forks", "nesting", "recording", "replaying", "segments"],
    ],
    "profile": [*DATA, "backends"],  # wraps steps for execute
    "gradients": ["effects", "errors", "graph", "tree"],  # knows autograd, and nothing of how tasks are run
    # keeping a schedule as text
    "files": [],
    "saved": [*DATA, "allowed", "check", "backends", "readers"],  # of backends the names alone
    "rebuilding": ["costs", "errors", "graph", "saved", "task", "value"],
    # the outside world
    "backends": [
        "collecting",
        "errors",
        "layout",
        "machine",
        "program",
        "tree",
        "workers",
        "crew",
        "interleaver",
        "forks",
    ],
    # estimate makes costs of a graph; captures are merged, for a device
    "frontends": [
        *"allowed collecting effects errors graph costs logs task tree".split(),
        *"grouping machine marked merging".split(),
    ],
    "parallel": ["autosched"],  # the public API alone
    "testing": EVERYTHING,  # looks at all of it, as tests do
    # putting it together
    "arguments": ["allowed", "backends", "costs", "errors", "graph"],  # the kinds of what schedule and runs are given
    "schedule": EVERYTHING,
    "planning": EVERYTHING,
    "tables": [],
    "bar": ["viz"],  # times are written as in pictures
    "comparison": ["tables", "viz"],
    "compare": EVERYTHING,  # plans again and again
    "measuring": EVERYTHING,  # runs schedules of its own
    "compiled": EVERYTHING,
    "dynamo": EVERYTHING,  # traces and schedules, as compiled does
    "cli": EVERYTHING,
    "demo": EVERYTHING,
    "__main__": EVERYTHING,
    "autosched": EVERYTHING,
}
MAY_IMPORT_TORCH = [
    "backends",
    "frontends",
    "profile",
    "parallel",
    "demo",
    "testing",
    "compiled",
    "dynamo",
    "gradients",
    "measuring",
]

# (who, whom) -> why this one may, inside a function
EXCEPTIONS = {
    ("graph", "frontends.networkx"): "Graph.to_networkx and from_networkx are doors to it, opened when called",
    ("graph", "gradients"): "Graph.run_serial asks it, where torch is in use, what autograd would have followed",
    ("graph", "drawing"): "Graph.draw, and what a notebook shows of it, are doors to it, opened when called",
    ("timeline", "drawing"): "what a notebook shows of a timeline is a door to it, opened when called",
    ("costs", "frontends.estimate"): "Costs.estimate is a door to it, opened when called",
    ("timeline", "traces"): "Timeline.from_chrome_trace is a door to it, opened when called",
    ("cli.devices", "torch"): "it shows what torch sees; other commands come without",
    ("cli.run", "torch"): "it seeds random numbers; other commands come without",
    ("costs", "measuring"): "Costs.measure is a door to it, opened when called",
    ("machine", "measuring"): "Machine.measured is a door to it, opened when called",
    ("machine", "torch"): "Machine.local asks torch what is in this computer",
}

MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60
LONGER_MODULES = {
    "graph": "one class with a method for each thing a user does; a third of it is docstrings and blank lines"
}


class Import(NamedTuple):
    """``who`` imports ``whom``, both without the leading ``autosched.``; torch stands for itself."""

    who: str
    whom: str
    line: int
    when: Literal["loading", "calling", "typing"]

    @property
    def where(self) -> str:
        return f"{self.who}:{self.line} imports {self.whom}"


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "autosched"


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imports_of(who: str, tree: ast.Module) -> list[Import]:
    """Return what a module imports of autosched and torch, at its head and inside its functions alike."""
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    typing = {child for guard in guards for statement in guard.body for child in ast.walk(statement)}
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    calling = {child for function in functions for child in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{who}:{node.lineno}: write imports with their full name"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("autosched.") in MODULES else str(node.module) for name in inner]
        else:
            continue
        when = "typing" if node in typing else "calling" if node in calling else "loading"
        for name in dict.fromkeys(names):
            if name.partition(".")[0] in ("autosched", "torch"):
                whom = "torch" if name.startswith("torch") else name.removeprefix("autosched.")
                found.append(Import(who, whom, node.lineno, when))
    return found


IMPORTS = [found for name, tree in TREES.items() for found in imports_of(name, tree)]


def part(module: str) -> str:
    return module.partition(".")[0]


def is_exception(found: Import) -> bool:
    return found.when == "calling" and (found.who, found.whom) in EXCEPTIONS


def is_allowed(found: Import) -> bool:
    who, whom = part(found.who), part(found.whom)
    if who == whom or is_exception(found):
        return True
    if whom == "torch":
        return found.when == "typing" or who in MAY_IMPORT_TORCH
    return MAY_IMPORT[who] is EVERYTHING or whom in MAY_IMPORT[who]


def test_every_part_has_a_row():
    assert sorted({part(name) for name in MODULES} - set(MAY_IMPORT)) == []


def test_imports_keep_to_the_table():
    wrong = [found.where for found in IMPORTS if part(found.who) in MAY_IMPORT and not is_allowed(found)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("who", "source", "allowed"),
    [
        ("policies.heft", "from autosched.graph.graph import Graph", True),
        ("policies.heft", "from autosched import graph, program", False),
        ("policies.heft", "def late():\n    import autosched.simulation.simulate", False),
        ("viz.gantt", "from autosched.viz.svg import rect", True),
        ("viz.gantt", "from autosched.simulation.simulate import simulate", False),
        ("parallel.data", "from autosched import Graph", True),
        ("parallel.data", "from autosched.graph.graph import Graph", False),
        ("costs", "def late():\n    from torch.utils import flop_counter", False),
        ("costs", "if TYPE_CHECKING:\n    import torch", True),
        ("machine", "def local():\n    import torch", True),
        ("machine", "import torch", False),
    ],
)
def test_the_walk_sees_each_kind_of_import(who, source, allowed):
    assert all(map(is_allowed, imports_of(who, ast.parse(source)))) is allowed


def test_or_tools_is_asked_for_in_one_place():
    asking = [path.stem for path in sorted(PACKAGE.rglob("*.py")) if "ortools" in path.read_text()]
    assert asking == ["cpsat", "proof"]


def test_exceptions_are_in_use():
    assert set(EXCEPTIONS) == {(found.who, found.whom) for found in IMPORTS if is_exception(found)}


def test_no_import_goes_in_a_circle():
    imported = {name: set() for name in MODULES}
    for found in IMPORTS:
        if found.when != "typing" and not is_exception(found):
            imported[found.who].add(found.whom)
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError, which shows the circle


def test_modules_are_short():
    long = {name for name, path in MODULES.items() if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES}
    assert long == set(LONGER_MODULES) & set(MODULES)


def test_functions_fit_a_glance():
    functions = [
        (f"{name}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert [found for found in functions if found[1] > MOST_LINES_OF_A_FUNCTION] == []


def test_modules_say_what_they_are():
    assert [name for name, tree in TREES.items() if tree.body and not ast.get_docstring(tree)] == []


PUBLIC = getattr(asc, "__all__", [])


def test_public_names_are_sorted_and_there():
    constants_classes_functions = sorted(PUBLIC, key=lambda name: (not name.isupper(), name.islower(), name))
    assert list(PUBLIC) == constants_classes_functions
    assert [name for name in PUBLIC if not hasattr(asc, name)] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    item = getattr(asc, name)
    if not inspect.isclass(item) and not inspect.isroutine(item):
        return
    assert inspect.getdoc(item)
    if inspect.isclass(item) and issubclass(item, Exception):
        return  # an error's example is the test of its message
    assert any(found.examples for found in doctest.DocTestFinder().find(item, name)), f"{name} has no doctest"


PLAN = """
import sys
sys.modules["torch"] = None  # from here on, importing torch raises

import networkx
import autosched as asc

dag = networkx.DiGraph([("a", "b"), ("a", "c"), ("b", "d"), ("c", "d")])
networkx.set_node_attributes(dag, {name: {"seconds": 1.0, "nbytes": 8} for name in dag})
schedule = asc.schedule(asc.Graph.from_networkx(dag), asc.Machine.emulated(gpus=2), policy="heft")
schedule.verify()
print(schedule.makespan)
assert "autosched.testing" not in sys.modules
"""


def test_planning_works_without_torch():
    done = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 3 <= float(done.stdout) < 4
