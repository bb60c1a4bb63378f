"""The house: imports go downward, opt-in rooms are entered by their doors only, files and functions stay small.

Reads the source with `ast`; nothing of it is imported. CLAUDE.md shows the floors to people.
"""

import ast
import re
from functools import cache
from itertools import pairwise

import pytest

from utils.system.files import PROJECT_ROOT

# Packages and single modules from the ground up. One may import what stands on a lower floor, and itself.
FLOORS = (
    ("utils.system",),
    ("utils.ops", "utils.config", "utils.data.images"),
    ("utils.data.labels",),
    ("utils.head_config", "utils.data", "utils.loss", "utils.metrics"),
    ("utils.data.fast", "utils.plots", "utils.export"),
    ("utils.datasets", "utils.data.gpu"),
    ("utils.engine", "utils.loggers", "utils.detect"),
    ("models", "utils.fast"),
    ("utils.run",),
    ("utils.general", "utils.torch_utils"),
    ("test", "detect", "export", "hubconf", "tools"),
    ("train",),
)
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
OPT_IN = ("utils.fast", "utils.data.fast", "utils.data.gpu", "utils.loss.batched", "utils.loss.batched_assigner",
          "utils.loss.candidates", "utils.loss.gradients", "utils.loss.on_gpu", "utils.loss.assign_kernels",
          "utils.loss.loss_kernels", "models.fused")  # fmt: skip
# Besides the opt-in modules themselves, these may import them, and only inside of functions: a run without flags
# loads none. Tools may measure what they like.
DOORS = ("utils.run.fast_paths", "utils.datasets")
FACES = ("utils.loss", "utils.metrics", "utils.plots")  # packages whose __init__ imports their public names
MOST_ENTRIES, MOST_LINES, MOST_FUNCTION_LINES, MOST_DOCSTRING_LINES = 18, 450, 60, 12


def belongs_to(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


@cache
def modules():
    """{name: path} of all modules of the product and its tools."""
    paths = [*PROJECT_ROOT.glob("*.py")]
    for folder in ("models", "utils", "tools"):
        paths += PROJECT_ROOT.glob(f"{folder}/**/*.py")
    names = {path: ".".join(path.relative_to(PROJECT_ROOT).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in sorted(names.items())}


@cache
def tree(name):
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


@cache
def imports(name):
    """{imported module of the project: whether outside of functions} of the module `name`."""
    found = {}

    def look(node, at_start):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return  # only for annotations
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} imports relatively"
            targets = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        # `from utils.data import mosaic` is an import of the module utils.data.mosaic, not of the package
        known = [target for target in targets if target in modules()]
        for target in known[1:] or known:
            found[target] = found.get(target, False) or at_start
        for child in ast.iter_child_nodes(node):
            look(child, at_start and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    look(tree(name), True)
    return found


def package_of(name):
    """The entry of FLOORS that a module stands in."""
    return max((package for package in FLOOR if belongs_to(name, (package,))), key=len)


def complain(violations):
    assert not violations, f"{len(violations)} violations\n" + "\n".join(violations)


def test_the_table_for_people_says_the_same():
    shown = {}
    for line in (PROJECT_ROOT / "CLAUDE.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 3 and cells[1].isdigit():
            for path in cells[2].split(", "):
                shown[path.rstrip("/").removesuffix(".py").replace("/", ".")] = int(cells[1])
    assert shown == FLOOR


def test_the_diagram_for_people_shows_real_imports():
    """docs/architecture.md: nodes name packages, arrows imports; every package is in a node, but for the faces."""
    diagram = (PROJECT_ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("```mermaid")[2]
    diagram = diagram.partition("```")[0]
    rooms = {
        node: tuple(path.strip("/").removesuffix(".py").replace("/", ".") for path in paths.split(", "))
        for node, paths in re.findall(r'(\w+)\["<b>(.+?)</b>', diagram)
    }
    missing = set(FLOOR) - {"utils.general", "utils.torch_utils"} - {room for names in rooms.values() for room in names}
    assert not missing
    violations = []
    for line in diagram.splitlines():
        nodes = re.split(r"\s+-\S*>(?:\|.*?\|)?\s+", line.strip())
        for here, there in pairwise(nodes):
            names = [name for name in modules() if belongs_to(name, rooms[here])]
            found = any(belongs_to(target, rooms[there]) for name in names for target in imports(name))
            if "-.->" in line:  # doors load by name
                found = found or any(f"{rooms[there][0]}." in modules()[name].read_text("utf-8") for name in names)
            if not found:
                violations.append(f"{here} does not import {there}")
    complain(violations)


def test_every_module_stands_on_a_floor():
    complain([f"{name}: not in FLOORS" for name in modules() if name != "utils" and not belongs_to(name, FLOOR)])


def test_imports_go_downward():
    violations = []
    for name in modules():
        for target in imports(name):
            if "utils" in (name, target):  # the package itself is empty
                continue
            here, there = package_of(name), package_of(target)
            experimental = name == "models.experimental" and there in ("utils.engine", "utils.head_config")
            if here != there and FLOOR[there] >= FLOOR[here] and not experimental:
                violations.append(f"{name} imports {target}")
    complain(violations)


def test_models_import_few_utils_but_in_experimental():
    """What reads a file of text and shows a value; checkpoints are experimental's."""
    complain([
        f"{name} imports {target}"
        for name in modules() if belongs_to(name, ("models",)) and name != "models.experimental"
        for target in imports(name) if belongs_to(target, ("utils", "tools", "train", "test"))
        and target not in ("utils.config.data_yaml", "utils.system.files")
    ])  # fmt: skip


def test_no_circles():
    """Nor by imports inside of functions."""
    remaining = {name: {target for target in imports(name) if target != name} for name in modules()}
    while free := [name for name, targets in remaining.items() if not targets & remaining.keys()]:
        for name in free:
            del remaining[name]
    complain([f"{name} imports {', '.join(sorted(targets & remaining.keys()))}" for name, targets in remaining.items()])


def test_opt_in_rooms_are_entered_by_their_doors():
    violations = []
    for name in modules():
        if belongs_to(name, (*OPT_IN, "tools")):
            continue
        for target, at_start in imports(name).items():
            if belongs_to(target, OPT_IN) and (at_start or name not in DOORS):
                violations.append(f"{name} imports {target}" + (" when it is loaded" if at_start else ""))
    complain(violations)


def test_utils_has_few_entries():
    entries = [path.name for path in (PROJECT_ROOT / "utils").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES, sorted(entries)


def test_packages_introduce_themselves():
    """In few lines, and without importing anything, but for the faces."""
    violations = []
    for name, path in modules().items():
        if path.name != "__init__.py" or name == "utils":
            continue
        docstring = ast.get_docstring(tree(name)) or ""
        if not 0 < len(docstring.splitlines()) <= MOST_DOCSTRING_LINES:
            violations.append(f"{path}: a docstring of 1 to {MOST_DOCSTRING_LINES} lines says what lives here")
        if len(tree(name).body) > 1 and name not in FACES:
            violations.append(f"{path}: a docstring and nothing else")
    complain(violations)


@pytest.mark.parametrize("folder", ["", "models", "utils", "tools", "tests"])
def test_files_and_functions_are_small(folder):
    violations = []
    for path in sorted((PROJECT_ROOT / folder).glob("**/*.py" if folder else "*.py")):
        text = path.read_text(encoding="utf-8")
        if len(text.splitlines()) > MOST_LINES:
            violations.append(f"{path}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES:
                violations.append(f"{path}: {node.name} has {node.end_lineno - node.lineno + 1} lines")
    complain(violations)


def test_one_class_name_for_one_thing():
    """Stand-ins in tests may be called as what they stand for."""
    homes = {}
    for name in modules():
        for node in tree(name).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    complain([f"{name}: {', '.join(places)}" for name, places in homes.items() if len(places) > 1])


def test_tests_stand_where_their_modules_stand():
    """tests/<package>/test_<module>.py, or test_<module>_<what>.py; a test of a whole run lies in tests/ itself."""
    misplaced = []
    for path in sorted((PROJECT_ROOT / "tests").glob("*/**/test_*.py")):
        package = path.parent.relative_to(PROJECT_ROOT / "tests")
        folder = PROJECT_ROOT / package if package.parts[0] in ("models", "tools") else PROJECT_ROOT / "utils" / package
        about = path.stem.removeprefix("test_")
        if not any(about == module.stem or about.startswith(f"{module.stem}_") for module in folder.glob("*.py")):
            misplaced.append(f"{path}: no module of that name in {folder}")
    complain(misplaced)
