"""Layering: which packages and folders may import which; and the package list equals the tree."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from trainhouse.workers.shapes.parts import PARTS, Mixer

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client", "examples", "schemas", "server", "workers")

# package -> the first-party packages that it may import
MAY_IMPORT = {
    "schemas": {"schemas"},
    "client": {"client", "schemas"},
    "workers": {"workers", "schemas"},
    "server": {"server", "schemas", "workers"},
}
# Folders from the top: each imports only folders below it, including imports for type checkers.
SERVER = """
planning console openai replication drafts
cli/checkup cli/remote cli cli/verification serving routes runs operations sampling checkpoints
journal tenants http telemetry logs config files store store/tables store/database text
"""
WORKERS = """
planner/drafts planner
drafts drafts/training drafts/speculation drafts/model drafts/algorithms drafts/losses drafts/sequences
formats/readers formats engines/vllm engines scheduler scheduler/supervision
pools/ray pools
worker training sampler sampler/cache sampler/requests
checkpoint registry heads full lora programs models
models/layers models/stored batch state losses parallel ops/recurrences ops/frozen ops/cpu ops ops/libraries
resources shapes/layouts shapes shapes/families shapes/parts protocol
"""
FOLDERS = [
    "server",
    *(f"server/{name}" for name in SERVER.split()),
    "workers",
    *(f"workers/{name}" for name in WORKERS.split()),
    *("client", "schemas/adapters", "schemas/chats", "schemas/codec", "schemas"),
]

# Folders that add rows to the core's tables, and without which it runs; by what they are for, which several may share.
PLUGINS = {
    "planner": ("workers/planner", "server/planning"),
    "cpu": ("workers/ops/cpu",),
    "vllm": ("workers/engines/vllm",),
    "console": ("server/console",),
    "openai": ("server/openai",),
    "standby": ("server/replication",),
    "formats": ("workers/formats",),
    "drafts": ("workers/drafts", "server/drafts"),
}

# Modules and whole folders of workers that a process without torch may import.
TORCH_FREE = {
    *("workers/dispatch", "workers/engines", "workers/scheduler", "workers/pools", "workers/planner"),
    *("workers/shapes", "workers/protocol", "workers/models/hub"),
    "workers/models/model_cache",
    "workers/resources/devices",
    "workers/resources/machine",
    "workers/sampler/requests/structured_output",
}

# Modules of workers that are the same for every kind of model.
CORE = (
    *(
        "batch/micro_batch",
        "batch/validated",
        "state/flat_params",
        "state/trainable",
        "state/gradients",
        "state/vectors",
    ),
    *("state/moments", "state/optim", "state/residency", "worker/snapshot_writer", "worker/worker", "training/scoring"),
    *(
        "training/pass_runner",
        "training/rank_part",
        "training/batch_failure",
    ),
)


def sources(package: str) -> Iterator[Path]:
    return (path for path in (ROOT / package).rglob("*.py") if not path.name.endswith("_pb2.py"))


def first_party_imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields a file's relative imports as absolute dotted parts below the root package."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = tuple(node.module.split(".")) if node.module else ()
            if module or base:
                yield base + module
            yield from (base + module + (alias.name,) for alias in node.names)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_they_may(package: str) -> None:
    for path in sources(package):
        # Commands that work through a server use the client.
        is_command = path.parent.name in ("checkup", "remote") and path.parent.parent == ROOT / "server" / "cli"
        may = MAY_IMPORT[package] | ({"client"} if is_command else set())
        for target in first_party_imports(path):
            if target[0] in PACKAGES:
                assert target[0] in may, f"{path} imports {'.'.join(target)}"


def modules_imported(path: Path) -> Iterator[Path]:
    """Yields the first-party files that a file's relative imports load."""
    for target in first_party_imports(path):
        module = ROOT.joinpath(*target)
        if (file := module.with_suffix(".py")).is_file() or (file := module / "__init__.py").is_file():
            yield file


def imports_upward(folders: Sequence[str]) -> Iterator[str]:
    """Yields imports of folders above the importing one. A folder may contain others, and the two may import each
    other.
    """
    height = {folder: number for number, folder in enumerate(folders)}
    for folder in folders:
        for path in (ROOT / folder).glob("*.py"):
            for file in modules_imported(path):
                where = file.parent.relative_to(ROOT).as_posix()
                is_parent = file.name == "__init__.py" and folder.startswith(f"{where}/")
                if where != "." and not is_parent and height[where] < height[folder]:
                    yield f"{path} imports {file}"


@pytest.mark.slow
def test_folders_import_only_folders_below_them() -> None:
    assert not list(imports_upward(FOLDERS))
    swapped = [*FOLDERS]
    server, runs = FOLDERS.index("server/sampling"), FOLDERS.index("server/runs")
    swapped[server], swapped[runs] = swapped[runs], swapped[server]
    assert any("server/runs" in line for line in imports_upward(swapped)), "an upward import must be found"


def imports_of_plugins(plugins: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yields imports of a plugin's files by files that are not its own."""
    for path in (path for package in MAY_IMPORT for path in sources(package)):
        importer = path.relative_to(ROOT).as_posix()
        for file in modules_imported(path):
            imported = file.relative_to(ROOT).as_posix()
            for folders in plugins.values():
                owned = tuple(f"{folder}/" for folder in folders)
                if imported.startswith(owned) and not importer.startswith(owned):
                    yield f"{importer} imports {imported}"


@pytest.mark.slow
def test_the_core_imports_no_plugin() -> None:
    assert not list(imports_of_plugins(PLUGINS))
    assert list(imports_of_plugins({"losses": ("workers/losses",)})), "an import of a plugin must be found"


def test_every_folder_is_in_the_order() -> None:
    found = {path.parent.relative_to(ROOT).as_posix() for name in MAY_IMPORT for path in sources(name)}
    assert found == set(FOLDERS)


# Classes that may have more than 250 lines, and why.
LONG_CLASSES = {
    "client/service.py:ServiceClient": "the client's face: a documented method for every kind of client",
    "client/training.py:TrainingClient": "the client's face: a documented method for each thing to ask of a model",
}


def long_classes(file: Path) -> Iterator[str]:
    """Yields the classes of more than 250 lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= 250:
            yield node.name


def test_only_listed_classes_are_long(tmp_path: Path) -> None:
    long = {
        f"{path.relative_to(ROOT)}:{name}" for top in MAY_IMPORT for path in sources(top) for name in long_classes(path)
    }
    assert long == LONG_CLASSES.keys()
    planted = tmp_path / "planted.py"
    planted.write_text("class Long:\n" + "    x = 1\n" * 250)
    assert list(long_classes(planted)) == ["Long"]


# Folders that may have more than a dozen modules, and why.
LARGE_FOLDERS = {
    "server/routes": "a list: a file for each group of endpoints, and what they share",
    "workers/shapes/families": "a list: a file for each family of models, as many as there are",
}


def test_only_lists_have_many_modules() -> None:
    modules = (path for name in MAY_IMPORT for path in sources(name) if path.name != "__init__.py")
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in modules)
    assert {folder for folder, number in folders.items() if number > 12} == LARGE_FOLDERS.keys()


def test_server_imports_only_torch_free_modules_of_workers() -> None:
    for path in sources("server"):
        for file in modules_imported(path):
            name = file.relative_to(ROOT).with_suffix("").as_posix()
            if name.startswith("workers/") and file.name != "__init__.py":
                above = {name, *(parent.as_posix() for parent in Path(name).parents)}
                assert above & TORCH_FREE, f"{path} imports {file}"


def words(path: Path) -> Iterator[str]:
    """Yields names, attributes, modules and one-word strings of a file's code."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.Constant(value=str(word)):
                yield word
            case ast.alias(name=word):
                yield from word.split(".")
            case ast.ImportFrom(module=str(word)):
                yield from word.split(".")


def test_core_modules_do_not_name_kinds_of_models() -> None:
    """The core runs passes, takes steps, moves and saves; kinds differ only in their Program."""
    kinds = {path.stem for path in (ROOT / "workers" / "programs").glob("*.py")} - {"__init__"}
    kinds |= {"eagle3", "dflash"}
    assert {"policy", "critic"} <= kinds
    for path in [ROOT / "workers" / f"{name}.py" for name in CORE]:
        assert not kinds & {word.lower() for word in words(path)}, path
    assert kinds & {word.lower() for word in words(ROOT / "workers" / "heads" / "value_head.py")}, (
        "names of kinds must be found"
    )


def test_kinds_of_mixers_are_named_only_where_they_are_declared_and_run() -> None:
    """All else asks the declaration of a mixer, so that a new one changes nothing else."""
    kinds = {kind.__name__ for kind in PARTS if issubclass(kind, Mixer)}
    folders = [ROOT / "workers" / name for name in ("shapes/parts", "shapes/families", "models/layers")]
    naming = {path for path in sources("workers") if kinds & set(words(path))}
    outside = {path.relative_to(ROOT).as_posix() for path in naming if path.parent not in folders}
    assert outside == {"workers/engines/vllm/server.py"}  # vLLM has no kernel for one of them
    assert len(naming) > len(kinds), "names of kinds must be found"


@pytest.mark.slow
def test_ray_is_imported_only_by_its_pool() -> None:
    for package in PACKAGES:
        for path in sources(package):
            imported = {
                alias.name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Import)
                for alias in node.names
            }
            assert "ray" not in imported or path.parent == ROOT / "workers" / "pools" / "ray", path


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "trainhouse",
        "trainhouse.client",
        "trainhouse.server.cli.commands",
        "trainhouse.server.serving.app",
        "trainhouse.server.planning.plan",
        "trainhouse.workers.formats.rows",
        "trainhouse.server.drafts.rows",
    ],
)
def test_server_and_client_do_not_load_torch_or_ray(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_command_line_loads_the_application_only_to_serve() -> None:
    code = "import sys, trainhouse.server.cli.commands; print([name for name in sys.modules if name in sys.argv])"
    parts = ["uvicorn", "trainhouse.server.serving.app", "trainhouse.server.serving.server_process"]
    done = subprocess.run([sys.executable, "-c", code, *parts], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_client_needs_only_the_bare_install() -> None:
    """Only httpx, pydantic, numpy and protobuf: the client works without the packages of the [server] extra."""
    extra = ["fastapi", "ray", "sqlalchemy", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "zstandard"]
    code = f"import sys; sys.modules.update(dict.fromkeys({extra})); import trainhouse; trainhouse.ServiceClient"
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)


def test_package_list_equals_the_tree() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"trainhouse"} | {
        ".".join(("trainhouse", *path.parent.relative_to(ROOT).parts))
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert listed == found
