"""Architecture rules checked on the source: allowed imports between folders, and size limits."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from itertools import chain, pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from packtool.encode.families import FAMILIES
from packtool.encode.families.record import Family

PACKAGE = Path(__file__).parent.parent / "packtool"

# The way of the data: a folder imports only from those before it, and from the base.
ORDER = (
    "rows",
    "media",
    "encode",
    "cache",
    "planning",
    "simulate",
    "stream",
    "batch",
    "packs",
    "attention",
    "train",
    "report",
    "library",
    "demo",
    "translate",
    "cli",
)
BASE = {"errors", "constants", "progress", "terminal", "config", "storage", "launch"}
# The rooms of train/, under run.py: a room imports only from those before it.
TRAIN_ORDER = ("prepare", "model", "evaluate", "verify", "loop")

OWNERS = {
    # Encoding asks processors what they write for frames that have no pixels, and these are torch's.
    # FLOPs of language models without formulas are counted in a model without weights.
    "torch": {
        *("batch", "attention", "train", "library", "demo", "launch"),
        *("encode/families/processor.py", "planning/counted_layers.py"),
    },
    "transformers": {"encode", "batch", "attention", "train", "library", "demo", "planning/counted_layers.py"},
    "pyarrow": {"rows", "cache", "packs"},
    "datasets": {"rows", "cache"},
    "aiobotocore": {"storage"},
    "botocore": {"storage"},
    "aiohttp": {"storage"},
    "PIL": {"media", "batch", "demo", "report"},
    "av": {"media"},
    "datasketch": {"cache"},
    "ray": {"cache"},
    "binpacking": {"planning"},
    "typer": {"cli"},
    "rich": {"cli", "report"},
    "jinja2": {"encode", "report"},
}

FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}


def _module(path: Path) -> str:
    parts = ("packtool", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module(path) for path in FILES}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path, tree: ast.AST | None = None) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree or TREES[path]):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            submodules = [name.name for name in node.names if f"{module}.{name.name}" in MODULES]
            if module != "packtool" or len(submodules) < len(node.names):
                yield module, node.lineno
            for name in submodules:
                yield f"{module}.{name}", node.lineno


def _functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}", node


def test_folders_import_only_from_earlier_folders() -> None:
    violations = []
    for path in FILES:
        room = _room(path)
        if room in ("__init__", "__main__"):
            continue
        for name, line in _imports(path):
            parts = name.split(".")
            if parts[0] != "packtool":
                continue
            if len(parts) == 1:
                violations.append(
                    f"{path.relative_to(PACKAGE)}:{line}: {room} may not import the package that holds it"
                )
                continue
            other = parts[1]
            if other in BASE | {room}:
                allowed = room not in BASE or other in BASE
            else:
                allowed = room in ORDER and other in ORDER and ORDER.index(other) < ORDER.index(room)
            if not allowed:
                violations.append(f"{path.relative_to(PACKAGE)}:{line}: {room} may not import {name}")
    assert not violations


def test_training_folders_import_only_from_earlier_ones() -> None:
    violations = []
    for path in FILES:
        place = path.relative_to(PACKAGE).parts
        if place[0] != "train" or place[1] not in TRAIN_ORDER:
            continue
        for name, line in _imports(path):
            parts = name.split(".")
            if parts[:2] != ["packtool", "train"] or len(parts) < 3:
                continue
            if parts[2] not in TRAIN_ORDER[: TRAIN_ORDER.index(place[1]) + 1]:
                violations.append(f"{path.relative_to(PACKAGE)}:{line}: {place[1]} may not import {name}")
            if place[1] == "prepare" and name.split(".")[0] == "torch":
                violations.append(f"{path.relative_to(PACKAGE)}:{line}: what is prepared needs no torch")
    assert not violations


def test_no_import_cycles() -> None:
    """Imports of types alone and those inside functions are counted too: a circle is one wherever it is closed."""
    graph = {
        _module(path): {name for name, _ in _imports(path) if name in MODULES and name != "packtool"} - {_module(path)}
        for path in FILES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from error


def test_heavy_dependencies_have_owners() -> None:
    violations = [
        f"{path.relative_to(PACKAGE)}:{line}: imports {name}"
        for path in FILES
        for name, line in _imports(path)
        if not {_room(path), str(path.relative_to(PACKAGE))} & OWNERS.get(name.split(".")[0], {_room(path)})
    ]
    assert not violations


# Who reads the environment: what starts processes, what takes credentials, and what makes options of variables.
READERS = {"launch", "storage", "config", "cli/options.py", "cli/main.py", "cli/translate.py", "library/commands.py"}


PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DISTRIBUTIONS = packages_distributions()
REQUIRED = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}


def test_every_requirement_has_a_lowest_version() -> None:
    """``scripts/test --oldest`` runs the tests with these: without one it would take the oldest that ever was."""
    lines = chain(PROJECT["dependencies"], *EXTRAS.values())
    assert [line for line in lines if ">=" not in line] == []


def test_imports_of_every_run_are_required_packages() -> None:
    """Else another package decides its version, or whether it is there."""
    others = chain.from_iterable(lines for extra, lines in EXTRAS.items() if extra != "test")
    known = REQUIRED | {canonicalize_name(Requirement(line).name) for line in others} | {"packtool"}
    known |= {"botocore", "markupsafe", "yarl"}  # whose versions aiobotocore, jinja2 and aiohttp decide
    violations = []
    for path in FILES:
        for name, line in _imports(path):
            packages = {canonicalize_name(owner) for owner in DISTRIBUTIONS.get(name.split(".")[0], ())}
            if packages and not packages & known:
                violations.append(f"{path.relative_to(PACKAGE)}:{line}: {name}: {packages} not in pyproject.toml")
    assert not violations


@pytest.mark.parametrize("path", sorted((PACKAGE.parent / "scripts").glob("bench_*.py")), ids=lambda path: path.stem)
def test_benchmarks_need_no_package_of_the_tests(path: Path) -> None:
    root, violations, unread, visited = PACKAGE.parent, [], [path], {path}
    only_tests = {canonicalize_name(Requirement(line).name) for line in EXTRAS["test"]} - REQUIRED
    while unread:
        file = unread.pop()
        for name, line in _imports(file, ast.parse(file.read_text())):
            if {canonicalize_name(owner) for owner in DISTRIBUTIONS.get(name.split(".")[0], ())} & only_tests:
                violations.append(f"{file.relative_to(root)}:{line}: {name}")
            imported_file = root.joinpath(*name.split(".")).with_suffix(".py")
            if name.startswith(("scripts.", "tests.")) and imported_file.is_file() and imported_file not in visited:
                visited.add(imported_file)
                unread.append(imported_file)
    assert not violations


def test_the_environment_is_read_in_few_places() -> None:
    violations = []
    for path, tree in TREES.items():
        name = path.relative_to(PACKAGE).as_posix()
        if {_room(path), name} & READERS:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
                violations.append(f"{name}:{node.lineno}: {ast.unparse(node)}: launch and config read the environment")
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                violations.append(f"{name}:{node.lineno}: import os, so that it is seen what is taken from it")
    assert not violations


def test_json_is_read_in_one_place() -> None:
    """What nests too deeply is a RecursionError to the standard library, which nobody expects of a file."""
    allowed = {
        "config/settings.py",
        "encode/tokenize.py",
        "report/regions.py",
        "demo/run.py",
        "train/model/load.py",
    }
    paths = {path.relative_to(PACKAGE).as_posix() for path in FILES if re.search(r"json\.loads?\(", path.read_text())}
    assert paths == allowed


# Limits of the whole package, and what to do at each: raising one needs a line in CHANGELOG.md with the reason.
MAX_LINES, MAX_FILES, MAX_DATACLASSES = 70_260, 257, 240
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 600, 60, 9
# Expressions and statements of a function, and their mean over functions of 18 to 55 lines.
MAX_NODES, MAX_MEAN_NODES = 250, 125


def test_the_package_is_small() -> None:
    num_lines = sum(path.read_text().count("\n") for path in FILES)
    dataclasses = [
        node.name
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in node.decorator_list)
    ]
    assert num_lines <= MAX_LINES, f"{num_lines} lines: remove a second way to do something before adding a new one"
    assert len(FILES) <= MAX_FILES, f"{len(FILES)} files: put code into the file of its subject"
    assert len(dataclasses) <= MAX_DATACLASSES, (
        f"{len(dataclasses)} dataclasses: pass the values, or extend the type that already holds them"
    )


def test_modules_import_few_others() -> None:
    """One that imports many does several things: move each to the module whose subject it is."""
    violations = []
    for path in FILES:
        own_modules = {name for name, _ in _imports(path) if name in MODULES and name != "packtool"}
        packages = {name for name in own_modules if any(other.startswith(f"{name}.") for other in own_modules)}
        if len(own_modules - packages) > 25:
            violations.append(f"{_module(path)}: {len(own_modules - packages)} of our own modules")
    assert not violations


def test_files_and_functions_are_small() -> None:
    violations = [
        f"{path.relative_to(PACKAGE)}: more than {MAX_FILE_LINES} lines: move one of its subjects to a file of its own"
        for path in FILES
        if path.read_text().count("\n") > MAX_FILE_LINES
    ]
    for location, function in _functions():
        assert function.end_lineno is not None
        if function.end_lineno - function.lineno >= MAX_FUNCTION_LINES:
            violations.append(f"{location}: more than {MAX_FUNCTION_LINES} lines: name its steps as functions")
        arguments = function.args
        if (count := len(arguments.args) + len(arguments.kwonlyargs) + len(arguments.posonlyargs)) > MAX_PARAMETERS:
            violations.append(f"{location}: {count} parameters: pass the object that holds them")
    assert not violations


def test_functions_do_one_thing() -> None:
    """Dense functions cannot be changed safely after one reading: split them where a step has a name."""
    sizes = {}
    for location, function in _functions():
        assert function.end_lineno is not None
        if 18 <= function.end_lineno - function.lineno + 1 <= 55:
            sizes[location] = sum(isinstance(node, (ast.expr, ast.stmt)) for node in ast.walk(function))
    dense = [f"{location}: {size} expressions and statements" for location, size in sizes.items() if size > MAX_NODES]
    assert not dense
    mean = sum(sizes.values()) / len(sizes)
    assert mean <= MAX_MEAN_NODES, f"{mean:.1f} on average: split the largest functions"


def test_the_wheel_has_every_file() -> None:
    """Templates, tables and marks are package data: what no pattern names is missing where packtool is installed."""
    patterns = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in PACKAGE.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            owners = [PACKAGE.parent.joinpath(*name.split(".")) for name in patterns]
            owner_patterns = zip(owners, patterns.values(), strict=True)
            assert any(
                path.match(f"{owner}/{pattern}") for owner, patterns in owner_patterns for pattern in patterns
            ), path


def test_every_public_name_has_a_docstring() -> None:
    missing = []
    for path, tree in TREES.items():
        if not ast.get_docstring(tree):
            missing.append(f"{path.relative_to(PACKAGE)}")
        for node in tree.body:
            public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                missing.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}")
    assert not missing


ARRAYS = re.compile(r"NDArray|\bTensor\b|\w*Array\b|\bSeconds\b|\bCosts\b")
# (T, H, D), (K + 1,), (sounds, bins, frames), (R * T, ...), ().
SHAPE = re.compile(
    r"\((([\w.`*/+ -]+, ?)+[\w.`*/+ -]*)?\)|of any shape|0-d|scalar|[Ss]ee ``|as (for|above)|``\S+`` says"
)


def _public_arrays(nodes: list[ast.stmt], holder: str = "") -> Iterator[tuple[str, str]]:
    """Public functions that take or return arrays, and their docstring with that of their class."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_arrays(node.body, ast.get_docstring(node) or "")
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            annotations = [*(argument.annotation for argument in arguments), node.returns]
            if any(annotation is not None and ARRAYS.search(ast.unparse(annotation)) for annotation in annotations):
                yield f"{node.lineno} {node.name}", f"{ast.get_docstring(node) or ''}\n{holder}"


def test_docstrings_give_the_shapes_of_arrays() -> None:
    """A caller learns a shape from the docstring, or from the one that it names, and not from the code."""
    violations = [
        f"{path.relative_to(PACKAGE)}:{location}"
        for path, tree in TREES.items()
        for location, text in _public_arrays(tree.body)
        if not SHAPE.search(text)
    ]
    assert not violations


BARE_NAMES = {"found", "told", "asked", "given", "said", "whole", "some"}


def test_names_say_what_they_hold() -> None:
    """A participle names no thing: ``found`` becomes ``trees``, ``told`` becomes ``warning``."""
    violations = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        for name in [node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""]
        if name in BARE_NAMES
    ]
    assert not violations


def test_docstrings_name_the_thing_first() -> None:
    """No question words: "What a run needs" becomes "Requirements of a run"."""
    violations = [
        f"{path.relative_to(PACKAGE)}: {text.splitlines()[0]}"
        for path, tree in TREES.items()
        for text in _docstrings(tree)
        if re.match(r"(What|Which|Whether|Where|How|Who|Why)\b", text)
    ]
    assert not violations


# Where text goes to a terminal, or becomes HTML: each escapes what others wrote.
PRINTERS = {"terminal.py", "report/tables.py"}
ESCAPERS = {"report/drawing.py"}


def test_foreign_text_is_shown_in_few_places() -> None:
    violations = []
    for path, tree in TREES.items():
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name not in PRINTERS:
                called = ast.unparse(node.func)
                if called in ("print", "typer.echo", "typer.secho", "click.echo", "traceback.print_exc") or (
                    called.endswith((".print", "stdout.write", "stderr.write"))
                ):
                    violations.append(f"{name}:{node.lineno}: {called}: packtool.terminal.show takes care of controls")
            is_html = isinstance(node, ast.Constant) and isinstance(node.value, str) and "</" in node.value
            if is_html and _room(path) == "report" and name not in ESCAPERS:
                violations.append(f"{name}:{node.lineno}: HTML stands in report/templates/")
        if name not in ESCAPERS and any(module in ("html", "markupsafe") for module, _ in _imports(path)):
            violations.append(f"{name}: packtool.report.drawing takes care of controls")
    for template in (PACKAGE / "report" / "templates").iterdir():
        # The environment escapes every text; a template that says otherwise is a hole.
        if re.search(r"autoescape|\|\s*(safe|e|escape|forceescape)\b", template.read_text()):
            violations.append(f"{template.name}: escaping is the environment's")
    assert not violations


# What each of several clients of a store does in its own way.
ONCE_PER_CLIENT = {"forget_connections"}
# What the library offers is called as the commands are, and as what they call.
ONCE_MORE = {"export", "verify", "evaluate"}


def test_every_public_name_is_defined_once() -> None:
    """A reader who searches for a public function or class finds one."""
    places: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    duplicates = {
        name: paths for name, paths in places.items() if len(paths) > 1 and name not in ONCE_PER_CLIENT | ONCE_MORE
    }
    assert not duplicates


# A preposition or a conjunction that begins a docstring goes on from the name: it says nothing alone.
FRAGMENTS = re.compile(
    r"(Of|That|For|As|And|With|Without|By|So|Into|On|Than|Because|From|Up|It|In|After|Before|Not|Like"
    r"|The same (for|with|in|where))\b"
)


def _docstrings(tree: ast.AST) -> Iterator[str]:
    """What modules, classes and functions say, and the strings behind constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            if text := ast.get_docstring(node):
                yield text
            for before, after in pairwise(node.body):
                if isinstance(before, (ast.Assign, ast.AnnAssign)):
                    match after:
                        case ast.Expr(ast.Constant(str() as text)):
                            yield text.strip()


def test_docstrings_describe_results() -> None:
    """A fragment of the function's name ("Of the shard.", "For a person.") tells nobody what comes back."""
    scripts = {path: ast.parse(path.read_text()) for path in (PACKAGE.parent / "scripts").glob("*.py")}
    fragments = [
        f"{path.relative_to(PACKAGE.parent)}: {text}"
        for path, tree in (TREES | scripts).items()
        for text in _docstrings(tree)
        if FRAGMENTS.match(text) or len(text.split()) == 1
    ]
    assert not fragments


def test_work_is_assigned_and_not_dealt() -> None:
    """One word for one thing; checkpoints alone keep "dealings", under which the first of them hold assignments."""
    violations = [
        f"{path.relative_to(PACKAGE)}:{line_number}: {line.strip()}"
        for path in FILES
        for line_number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(deal|deals|dealt)\b", line, re.IGNORECASE)
    ]
    assert not violations


@pytest.mark.parametrize("module", ["packtool", "packtool.planning.packing", "tests.forked", "scripts.bench_export"])
def test_warnings_of_this_code_are_errors(module: str) -> None:
    """What pyproject.toml asks for, deprecations among them; other libraries may warn."""
    warning = compile("import warnings; warnings.warn('careful', DeprecationWarning, stacklevel=1)", "a.py", "exec")
    with pytest.raises(DeprecationWarning, match="careful"):
        exec(warning, {"__name__": module})
    exec(warning, {"__name__": "packtools_neighbour"})


# Files that may name a family of models besides its own: whose own subject it is.
NAME_FAMILIES: set[str] = set()


def test_model_family_is_named_only_in_its_file() -> None:
    """Model types and classes of layers are told by the family's record, which all other rooms read."""
    folder = PACKAGE / "encode" / "families"
    imports_by_file: dict[Path, set[str]] = {}
    num_records = 0
    for path in folder.glob("*.py"):
        module = vars(importlib.import_module(_module(path)))
        records = module.get("FAMILIES") or (module.get("FAMILY"),)
        if path.name != "__init__.py" and isinstance(records[0], Family):
            num_records += len(records)
            imports_by_file[path] = {
                name
                for record in records
                for name in (*record.model_types, *record.recurrent_types, *record.recurrent_layers)
            }
    names = set().union(*imports_by_file.values())
    violations = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: names {node.value}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and node.value in names - imports_by_file.get(path, set())
        and path.relative_to(PACKAGE).as_posix() not in NAME_FAMILIES
    ]
    assert num_records == len(FAMILIES)
    assert not violations


# What is done in one way has one place.
ONE_PLACE = {
    "all_gather_object": "launch/world.py",
    "all_gather_into_tensor": "attention/parallel/mesh.py",
    "AutoModelForCausalLM": "batch/spec.py",
    "AutoModelForImageTextToText": "batch/spec.py",
}


def test_unique_operations_stay_in_their_modules() -> None:
    violations = []
    for path, tree in TREES.items():
        module_path = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if ONE_PLACE.get(name, module_path) != module_path:
                violations.append(f"{module_path}:{node.lineno}: {name} belongs to {ONE_PLACE[name]}")
    assert not violations


def test_runs_are_prepared_without_torch() -> None:
    """A launcher prepares a run before it starts the processes, and has no use for seconds of imports."""
    code = "import sys, packtool.train.run, packtool.train.prepare.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=PACKAGE.parent).returncode == 0


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda path: path.name)
def test_every_folder_has_a_smoke_test(folder: Path) -> None:
    """In the folder of tests of the same name, or in a file of that name."""
    tests = PACKAGE.parent / "tests" / folder.relative_to(PACKAGE)
    files = [*tests.glob("test_*.py"), *tests.parent.glob(f"test_{folder.name}.py")]
    assert any("pytest.mark.smoke" in path.read_text() for path in files)
