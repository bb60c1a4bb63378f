"""A run without flags loads no opt-in module: what those are is read off the tree and its imports."""

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests import small_run

ROOT = Path(__file__).resolve().parents[1]
# packages and files that are there for the sake of a flag; with them, all that nobody else imports
OPT_IN = ("utils/fast/*.py", "utils/data/fast/*.py", "utils/loss/batched*.py", "utils/data/keyed_dataset.py",
          "models/fused*.py")  # fmt: skip
PROGRAM = """
import sys, train
train.main(train.train_parser().parse_args(sys.argv[1:]))
print("LOADED", *sys.modules)
"""


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path, modules):
    """The modules of the project that a file imports, at its beginning or inside a function, and their packages."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    packages = {name.rpartition(".")[0] for name in found & modules}
    return (found | packages) & modules


def opt_in_modules():
    """Modules under OPT_IN, and those that are imported by nothing but such modules."""
    files = [*ROOT.glob("utils/**/*.py"), *ROOT.glob("models/*.py"), ROOT / "train.py", ROOT / "test.py"]
    modules = {module_name(path) for path in files}
    importers = {name: set() for name in modules}
    for path in files:
        for name in imports_of(path, modules):
            importers[name].add(module_name(path))
    found = {module_name(path) for pattern in OPT_IN for path in ROOT.glob(pattern)}
    while more := {name for name, users in importers.items() if users and users <= found} - found:
        found |= more
    return found


def test_a_run_without_flags_loads_no_opt_in_module(tmp_path):
    opt_in = opt_in_modules()
    assert {"utils.fast.graph_step", "utils.data.fast.worker_pool", "utils.loss.candidates", "models.fused_kernels",
            "utils.data.keyed_dataset"} <= opt_in  # fmt: skip
    assert not {"utils.loss.criterion", "utils.data.mosaic", "utils.engine.trainer", "utils.metrics.detection"} & opt_in
    line = small_run.arguments(tmp_path, "--epochs", "1")
    run = subprocess.run([sys.executable, "-c", PROGRAM, *line], cwd=ROOT, capture_output=True, text=True, timeout=300,
                         env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.splitlines()[-1].split())
    assert "utils.loss.criterion" in loaded
    assert sorted(loaded & opt_in) == []
