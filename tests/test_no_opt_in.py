"""A run without flags loads no opt-in module: what those are is read off the rooms of the house and their imports."""

import os
import subprocess
import sys

from tests import small_run
from tests.test_house import OPT_IN, belongs_to, imports, modules
from utils.system.files import PROJECT_ROOT

PROGRAM = """
import sys, train
train.main(train.train_parser().parse_args(sys.argv[1:]))
print("LOADED", *sys.modules)
"""


def opt_in_modules():
    """The modules of the opt-in rooms, and those that nothing but such modules imports."""
    names = [name for name in modules() if not belongs_to(name, ("tools",))]
    importers = {name: set() for name in names}
    for name in names:
        for target in importers.keys() & imports(name).keys():
            importers[target].add(name)
    found = {name for name in names if belongs_to(name, OPT_IN)}
    while more := {name for name, users in importers.items() if users and users <= found} - found:
        found |= more
    return found


def test_a_run_without_flags_loads_no_opt_in_module(tmp_path):
    opt_in = opt_in_modules()
    assert {"utils.fast.graph_step", "utils.data.fast.worker_pool", "utils.loss.candidates", "models.fused.kernels",
            "utils.data.keyed_dataset"} <= opt_in  # fmt: skip
    assert not {"utils.loss.criterion", "utils.data.mosaic", "utils.engine.trainer", "utils.metrics.detection"} & opt_in
    line = small_run.arguments(tmp_path, "--epochs", "1")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", PROGRAM, *line], cwd=PROJECT_ROOT, capture_output=True, text=True,
                         timeout=300, env=environment)  # fmt: skip
    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.splitlines()[-1].split())
    assert "utils.loss.criterion" in loaded
    assert sorted(loaded & opt_in) == []
