"""The shape of the code: who may import whom, what is public, how long things may get.

A test here fails for a decision, not for a bug: change the code, or change the table and say why.
"""

import ast
import doctest
import functools
import graphlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

import autosched as asc

PACKAGE = Path(asc.__file__).parent

# Subpackages, and modules directly under autosched, in layers: what each may import, inside
# functions too. Inside one subpackage all may import each other, as long as neither modules nor its
# folders form a cycle.
FOUNDATION = ["_lib", "errors"]
INPUTS = [*FOUNDATION, "graph", "machine", "costs"]
PLACED = [*INPUTS, "placement"]
IR = [*PLACED, "program"]

MAY_IMPORT = {
    # foundation
    "errors": [],
    "_lib": ["errors"],
    # inputs
    "graph": FOUNDATION,
    "machine": FOUNDATION,
    "costs": [*FOUNDATION, "graph", "machine", "timeline"],  # learns from timelines
    "placement": [*FOUNDATION, "graph", "machine"],
    "coarsening": [*PLACED, "codegen"],
    "problem": PLACED,
    # intermediate representation
    "program": FOUNDATION,
    "timeline": [*FOUNDATION, "program"],
    "simulation": [*IR, "problem", "timeline"],
    "lowering": [
        *IR,
        "problem",
        "simulation",
    ],  # programs within memory limits: the footprint is what simulation predicts
    # planning
    "recomputation": [*PLACED, "problem"],
    "bounds": [*PLACED, "problem"],
    "policies": [*PLACED, "bounds", "problem"],
    # consumers of a program
    "verification": [*FOUNDATION, "graph", "machine", "program"],
    "codegen": [*FOUNDATION, "graph", "machine", "program"],
    "viz": [*FOUNDATION, "graph", "program", "timeline"],
    # explains by planning alternatives
    "explanation": [
        *[*IR, "bounds", "lowering", "policies", "problem", "simulation", "timeline"],
    ],
    # execution
    "runtime": [*FOUNDATION, "codegen", "graph", "lowering", "machine", "program", "timeline"],
    # user level
    "scheduling": [
        *[*IR, "bounds", "codegen", "explanation", "lowering", "policies", "problem", "runtime"],
        *["recomputation", "simulation", "timeline", "verification", "viz"],
    ],
    "comparison": [*INPUTS, "policies", "problem", "scheduling", "viz"],
    "measurement": [*IR, "policies", "problem", "runtime", "scheduling"],
    "fusion": [
        *[
            *IR,
            "codegen",
            "coarsening",
            "lowering",
            "measurement",
            "policies",
            "problem",
            "scheduling",
        ],
        "timeline",
    ],
    # futures of submitted calls are those of runs
    "frontends": [*INPUTS, "coarsening", "fusion", "policies", "runtime", "scheduling"],
    "testing": [
        *[*IR, "policies", "problem", "runtime", "sanitizer", "scheduling", "simulated_gpus"],
        "simulation",
    ],
    # what runs on them starts with no streams and graphs of its own
    "simulated_gpus": ["_lib", "errors", "graph", "runtime"],
    "sanitizer": [*FOUNDATION, "graph", "simulated_gpus", "viz"],
    # the public API, and helpers; settings of optimizers as inputs; the ranks that were joined
    "parallel": [
        "_lib",
        "autosched",
        "costs",  # warns of what cannot be estimated
        "errors",
        "frontends",
        "machine",
        "runtime",
        "viz",  # draws a curve
    ],
    "demo": ["autosched", "runtime", "viz"],
    "cli": [
        *[
            *INPUTS,
            "autosched",
            "comparison",
            "demo",
            "explanation",
            "frontends",
            "measurement",
            "parallel",
            "policies",
            "scheduling",
        ],
        *["sanitizer", "testing", "timeline", "viz"],
    ],
    "__main__": ["cli"],
}
# autosched/__init__ has the public names of all of these; those that need torch are imported when
# asked for.
MAY_IMPORT["autosched"] = sorted(set(MAY_IMPORT) - {"autosched", "cli", "demo", "__main__"})

# Planning works without torch, so the modules below torch-free ones are named one by one.
MAY_IMPORT_TORCH = {
    *["cli", "demo", "frontends", "fusion", "measurement", "parallel", "sanitizer"],
    *["simulated_gpus", "testing"],
    *["_lib.aten", "_lib.fake_tensors", "_lib.holders", "_lib.process_group"],
    *["costs.estimate", "graph.gradients"],
    *["runtime.backends", "runtime.execute", "runtime.ranks", "runtime.replay"],
    *["machine.machine", "machine.hardware"],  # Machine.local, inside functions
    "graph.files",  # to read a file, inside functions
    "machine.cluster",  # inside functions
    "recomputation.rewrite",  # to repeat random numbers, inside functions
}

MOST_LINES = 900
MOST_LINES_OF_A_FUNCTION = 100
LONGER_MODULES: dict[str, str] = {}  # each with a reason

# Modules that one other module of their folder imports and that are a concept of their own, each
# with the reason. Any other such module is a part of the one that imports it.
CONCEPTS = {
    "frontends.every_rank": "what is for several ranks; functions of one process need none of it",
    "frontends.replacements": "what is set in torch, with reasons; tracing knows none of it",
    "frontends.side_effects": "what changes besides tensors; tracing refuses it",
    "frontends.tracing": "functions to operators; capture makes tasks of operators",
    "explanation.advice": "what would help, each change as simulated; report has facts and text",
    "explanation.facts": "what spans waited for, in seconds; report has the texts",
    "fusion.candidates": "which tasks can be fused, and groups of them; fusing chooses a grouping",
    "parallel.checkpoints": "the state of a step in a folder",
    "parallel.controlled_memory": "patterns that repeat, in units of time",
    "parallel.order_search": "annealing, compiled; named_orders chooses what to anneal",
    "parallel.zero_bubbles": "orders made by simulation; named_orders has those of papers",
    "parallel.stages": "where a model is cut; pipelined chooses orders and micro-batches",
    "policies.constraint_programming.cpsat": "the model; the proof asks it for a bound",
    "policies.local_search.annealer": "annealing, compiled; the search chooses what to anneal",
    "runtime.ranks": "what is for several processes is one layer",
    "recomputation.annealing": "annealing, compiled; the sequence chooses what to anneal",
    "recomputation.chains": "a dynamic programme over the cuts of a chain",
    "scheduling.kept_state": "copies of tensors, and when they are out of date",
    "simulation.sharing": "processor sharing, event by event; the rest is one pass over instructions",
    "sanitizer.lines": "the user's lines and names, found in frames",
    "sanitizer.order": "vector clocks and memory, which know neither torch nor the user",
    "simulated_gpus.allocator": "torch's caching allocator, which knows no stream's work",
    "verification.loops": "laws of runs in flight",
    "viz.layered_layout": "an algorithm on nodes and edges, without pictures",
}

# Modules that set attributes of torch's modules, with the reason. CONTRIBUTING.md has this list, too.
PATCHING = {
    "frontends.replacements": "while a function is traced, torch must choose as it does eagerly",
    "simulated_gpus": "while GPUs are simulated, torch must find them",
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


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def import_statements(node: ast.AST, when: str = "loading") -> Iterator[tuple[ast.AST, str]]:
    """Yield import statements, and when they are executed; do not look into expressions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, when
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from import_statements(child, "typing" if when == "typing" else "calling")
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from import_statements(child, "typing")
        elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from import_statements(child, when)


def imports_of(who: str, module: ast.Module) -> list[Import]:
    """Return what a module imports of autosched and torch, at its head and inside its functions alike."""
    found = []
    for node, when in import_statements(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{who}:{node.lineno}: write imports with their full name"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [
                name if name.removeprefix("autosched.") in MODULES else str(node.module)
                for name in inner
            ]
        for name in dict.fromkeys(names):
            if name.partition(".")[0] in ("autosched", "torch"):
                whom = "torch" if name.startswith("torch") else name.removeprefix("autosched.")
                found.append(Import(who, whom, node.lineno, when))
    return found


@functools.cache
def imports() -> list[Import]:
    return [found for name in MODULES for found in imports_of(name, tree(name))]


def part(module: str) -> str:
    return module.partition(".")[0]


def folder(module: str) -> str:
    """Return the folder of a module; a package is in itself."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def may_import_torch(module: str) -> bool:
    names = module.split(".")
    return any(".".join(names[: i + 1]) in MAY_IMPORT_TORCH for i in range(len(names)))


def is_allowed(found: Import) -> bool:
    who, whom = part(found.who), part(found.whom)
    if whom == "torch":
        return found.when == "typing" or may_import_torch(found.who)
    return who == whom or found.when == "typing" or whom in MAY_IMPORT[who]


def test_every_part_has_a_row():
    assert sorted({part(name) for name in MODULES} - set(MAY_IMPORT)) == []


def test_imports_keep_to_the_table():
    wrong = [
        found.where
        for found in imports()
        if part(found.who) in MAY_IMPORT and not is_allowed(found)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("who", "source", "allowed"),
    [
        ("policies.heft", "from autosched.graph.graph import Graph", True),
        ("policies.heft", "from autosched import graph, viz", False),
        ("policies.heft", "def late():\n    import autosched.runtime.execute", False),
        ("viz.gantt", "from autosched.viz.svg import rect", True),
        ("viz.gantt", "from autosched.simulation.simulate import simulate", False),
        ("parallel.data", "from autosched import Graph", True),
        ("parallel.data", "from autosched.graph.graph import Graph", False),
        ("costs.costs", "def late():\n    from torch.utils import flop_counter", False),
        ("costs.costs", "if TYPE_CHECKING:\n    import torch", True),
        ("machine.machine", "def local():\n    import torch", True),
        ("machine.device", "import torch", False),
    ],
)
def test_the_walk_sees_each_kind_of_import(who, source, allowed):
    assert all(map(is_allowed, imports_of(who, ast.parse(source)))) is allowed


def test_or_tools_is_asked_for_in_one_place():
    asking = [path.stem for path in sorted(PACKAGE.rglob("*.py")) if "ortools" in path.read_text()]
    assert asking == ["cpsat", "proof"]


def cycle_in(names: Iterable[str], imports: Iterable[tuple[str, str]]) -> list[str]:
    imported = {name: set() for name in names}
    for who, whom in imports:
        if who != whom:
            imported[who].add(whom)
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_subpackages_import_each_other():
    parts = {part(name) for name in MODULES}
    among = [(part(found.who), part(found.whom)) for found in imports() if found.when != "typing"]
    # A lazy public name of the package itself is a way up that only users take: demo, cli and
    # parallel.
    below = [(who, whom) for who, whom in among if who != "autosched" and whom in parts]
    assert cycle_in(parts, below) == []


def test_no_folders_inside_a_subpackage_import_each_other():
    among = [
        (folder(f.who), folder(f.whom))
        for f in imports()
        if f.when != "typing" and part(f.who) == part(f.whom)
    ]
    nested = [
        (who, whom) for who, whom in among if not who.startswith(whom) and not whom.startswith(who)
    ]
    assert cycle_in({folder(name) for name in MODULES}, nested) == []


def test_no_modules_import_each_other_when_loaded():
    """A class may open a sibling of its folder when called, as ``run_serial`` of graphs does."""
    loaded = [(f.who, f.whom) for f in imports() if f.when == "loading" and f.whom in MODULES]
    assert cycle_in(MODULES, loaded) == []


def test_the_package_has_few_entries():
    entries = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len([path for path in entries if path.suffix == ".py"]) <= 8
    assert len([path for path in entries if path.is_dir()]) <= 27


def test_dir_lists_the_public_names():
    assert sorted(dir(asc)) == sorted([*PUBLIC, "parallel", "testing", "viz"])


def test_modules_are_short():
    long = {
        name
        for name, path in MODULES.items()
        if len(path.read_text(encoding="utf-8").splitlines()) > MOST_LINES
    }
    assert long == set(LONGER_MODULES) & set(MODULES)


def test_a_module_that_one_other_imports_is_a_part_of_it():
    names = {getattr(getattr(asc, name), "__module__", "") for name in PUBLIC}
    constants = (
        node.value
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    names.update(text.partition(":")[0] for text in constants if text.startswith("autosched."))
    importers: dict[str, set[str]] = {}
    for found in imports():
        importers.setdefault(found.whom, set()).add(found.who)
    slices = []
    for whom, path in MODULES.items():
        who, *others = importers.get(whom, {""})
        is_named = f"autosched.{whom}" in names or {whom, folder(whom)} & {*CONCEPTS}
        if others or is_named or who not in MODULES or folder(who) != folder(whom):
            continue
        texts = [found.read_text(encoding="utf-8") for found in (MODULES[who], path)]
        length = sum(len(text.splitlines()) for text in texts)
        if MODULES[who].name != "__init__.py" and length <= MOST_LINES:
            slices.append(f"only {who} imports {whom}")
    assert slices == []


SETTING = re.compile(r"(^|\.)(setattr|delattr|replaced|patch|patch\.object|patch\.dict)$")


def attributes_set(module: ast.Module) -> Iterator[ast.AST]:
    """Yield what sets or replaces attributes of modules and classes of torch, as far as it is written so."""
    of_torch = set()
    for node, _ in import_statements(module):
        if isinstance(node, ast.Import):
            some = [alias.asname or alias.name for alias in node.names if "torch" in alias.name]
            of_torch.update(name.partition(".")[0] for name in some)
        elif str(node.module).partition(".")[0] == "torch":
            of_torch.update(alias.asname or alias.name for alias in node.names)

    def is_of_torch(node: ast.AST) -> bool:
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        return isinstance(node, ast.Name) and node.id in of_torch

    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if is_of_torch(node):
                yield node
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            given = [part for arg in node.args for part in ast.walk(arg)]
            texts = [str(part.value) for part in given if isinstance(part, ast.Constant)]
            named = "patch" in called and any(text.startswith("torch.") for text in texts)
            if SETTING.search(called) and (named or any(map(is_of_torch, given))):
                yield node


@pytest.mark.parametrize(
    ("source", "sets"),
    [
        ("import torch\ntorch.overrides.f = 1", True),
        ("from torch.nn import functional as F\nF.relu, y = 1, 2", True),
        ("def f():\n    import torch.random\n    del torch.random.seed", True),
        ("from torch import nn\nsetattr(nn.Module, 'forward', f)", True),
        ("import torch\nwith replaced((torch, 'add', f)):\n    pass", True),
        ("from torch import optim\nmock.patch.object(optim, 'Adam')", True),
        ("mock.patch('torch.add', f)", True),
        ("import torch\nx = torch.add\nobject.__setattr__(self, 'x', torch.add(x, 1))", False),
        ("import torch\nself.dtype = torch.float32\ntorch.manual_seed(0)", False),
        ("from torch._inductor import config\nwith config.patch(threads=1):\n    pass", False),
    ],
)
def test_the_walk_sees_what_sets_attributes_of_torch(source, sets):
    assert bool(list(attributes_set(ast.parse(source)))) is sets


def test_attributes_of_torch_are_set_for_a_reason():
    setting = {name for name in MODULES if any(attributes_set(tree(name)))}
    assert setting == {*PATCHING}
    rules = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [name for name in PATCHING if f"`{name}`" not in rules] == []


def test_functions_fit_a_glance():
    functions = [
        (f"{name}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)
        for name in MODULES
        for node in ast.walk(tree(name))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    assert [found for found in functions if found[1] > MOST_LINES_OF_A_FUNCTION] == []


def test_modules_say_what_they_are():
    bare = [name for name in MODULES if tree(name).body and not ast.get_docstring(tree(name))]
    assert bare == []


def test_the_docstring_of_a_subpackage_names_its_modules():
    inside = [name.rpartition(".") for name in MODULES if "." in name]
    unnamed = [
        f"{above}.{module}"
        for above, _, module in inside
        if not re.search(rf"\b{module}\b", ast.get_docstring(tree(above)) or "")
    ]
    assert unnamed == []


PUBLIC = getattr(asc, "__all__", [])


def test_public_names_are_sorted_and_there():
    constants_classes_functions = sorted(
        PUBLIC, key=lambda name: (not name.isupper(), name.islower(), name)
    )
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
    assert any(found.examples for found in doctest.DocTestFinder().find(item, name)), (
        f"{name} has no doctest"
    )


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
