"""No file that a user may have downloaded, no checkpoint and no message of another rank is unpickled, because
unpickling runs code that the bytes name."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.spawn import ROOT

SOURCES = [
    ROOT / "train_rl.py",
    *ROOT.glob("rl/**/*.py"),
    *ROOT.glob("tools/**/*.py"),
    *ROOT.glob("launch/**/*.py"),
]
UNPICKLES = {
    "pickle.load",
    "pickle.loads",
    "pickle.Unpickler",
    "cPickle.load",
    "dill.load",
    "dill.loads",
    "cloudpickle.load",
    "cloudpickle.loads",
    "joblib.load",
    "pandas.read_pickle",
    "pd.read_pickle",
    "shelve.open",
    "marshal.load",
    "marshal.loads",
    "yaml.unsafe_load",
    "yaml.full_load",
    "dist_checkpointing.load",
    "dcp.load",
    "torch.jit.load",
    # Ranks send each other plain data (rl.runtime.plain_data). The functions of torch and mpi4py for objects
    # unpickle what arrives.
    "world.bcast",
    "MPI.COMM_WORLD.bcast",
    "dist.all_gather_object",
    "dist.broadcast_object_list",
    "dist.gather_object",
    "dist.scatter_object_list",
    "dist.recv_object_list",
}
ALLOWED = {
    # From the private socket pair of the process that started it: its own parent. Answers are JSON.
    ("rl/workers/host.py", "pickle.load")
}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def unsafe(name: str, call: ast.Call) -> bool:
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    if name == "torch.load":
        return keywords.get("weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        return keywords.get("allow_pickle", "False") != "False"
    if name == "yaml.load":
        loader = [ast.unparse(argument) for argument in call.args[1:]] + [keywords.get("Loader", "")]
        return not any(
            word in ("Loader", "SafeLoader", "yaml.SafeLoader", "yaml.CSafeLoader") for word in loader
        )
    return name in UNPICKLES or keywords.get("trust_remote_code", "False") != "False"


def found() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), name)
        for path in SOURCES
        for name, call in calls(path)
        if unsafe(name, call)
    }


def test_the_program_unpickles_nothing_but_what_it_sent_itself():
    assert found() == ALLOWED


def test_the_search_finds_what_it_looks_for(tmp_path):
    lines = [
        "torch.load(p)",
        "pickle.load(f)",
        "np.load(p, allow_pickle=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
    ]
    (tmp_path / "bad.py").write_text("\n".join([*lines, "torch.load(p, weights_only=True)", "np.load(p)"]))
    assert sum(unsafe(*call) for call in calls(tmp_path / "bad.py")) == len(lines)
