"""What an installed keiro is: light to import, complete as a wheel, and built in one direction."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import keiro

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "keiro"

# Each may import those to its left, never those to its right.
ORDER = ["events", "run", "decisions", "stores", "driver", "engine"]
# An event folds itself, because the eventsourcing library asks it to; how is the aggregate's affair.
UPWARDS = {("keiro.events", "keiro.run:advance")}
MAY_IMPORT_ENGINE = re.compile(r"keiro$|keiro\.(engine|blocking|cli|testing|dashboard)\b")
HEAVY = {"sqlalchemy", "alembic", "psycopg", "typer", "rich", "hypothesis", "pytest"}


def test_import_is_light() -> None:
    program = "import sys, keiro; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    assert not HEAVY & set(loaded.split())


def test_public_names_can_be_imported() -> None:
    program = "import keiro; [getattr(keiro, name) for name in keiro.__all__]"
    subprocess.run([sys.executable, "-c", program], check=True)

    assert keiro.__all__
    assert len(set(keiro.__all__)) == len(keiro.__all__)


def test_the_version_is_that_of_the_distribution() -> None:
    assert f'version = "{keiro.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_modules_depend_in_one_direction() -> None:
    ranked = [
        (module, imported)
        for module, imported in _imports()
        if _subject(module) in ORDER and _subject(imported) in ORDER
    ]
    upwards = {pair for pair in ranked if ORDER.index(_subject(pair[0])) < ORDER.index(_subject(pair[1]))}
    assert upwards == UPWARDS


def test_projections_know_events_and_rows_only() -> None:
    above = {"run", "decisions", "driver", "engine", "worker"}
    wrong = [
        f"{module} imports {imported}"
        for module, imported in _imports()
        if module.startswith("keiro.projections") and _subject(imported) in above
    ]
    assert wrong == []


def test_only_the_edges_import_the_engine() -> None:
    importers = {module for module, imported in _imports() if _subject(imported) == "engine"}
    assert {module for module in importers if not MAY_IMPORT_ENGINE.match(module)} == set()


def test_the_eventsourcing_library_is_met_in_few_places() -> None:
    # Its aggregates are known to one module, its recorder contracts to those who implement them, its settings to
    # the codec chain too; and nobody leans on what it calls private.
    users = {(module, imported) for module, imported in _imports() if imported.startswith("eventsourcing.")}
    at_home = re.compile(
        r"keiro\.library eventsourcing\.|keiro\.stores\.recorders\.\w+ eventsourcing\.|.* eventsourcing\.utils:"
    )
    assert [pair for pair in users if not at_home.match(" ".join(pair))] == []
    assert [pair for pair in users if ":_" in pair[1] or "._" in pair[1]] == []


def test_command_without_its_extra_says_what_to_install() -> None:
    # given an installation without typer
    program = "import sys; sys.modules['typer'] = None; from keiro.cli import main; sys.exit(main())"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "pip install 'keiro-durable[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_wheel_has_the_migrations_and_the_types_and_nothing_foreign(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    modules = {f"keiro/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*.py")}
    migrations = {f"keiro/{path.relative_to(ROOT)}" for path in (ROOT / "migrations").rglob("*.py")}
    assert any(re.fullmatch(r"keiro/migrations/versions/0001_\w+\.py", name) for name in migrations)
    assert modules | migrations | {"keiro/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"keiro"}


def test_source_distribution_can_be_tested(distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}

    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")}
    assert tests | {"LICENSE", "README.md", "dev.py", "pyproject.toml", ".ci/run", "migrations/env.py"} <= names


def test_a_coroutine_that_is_never_awaited_fails_its_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("async def work(): ...\ndef test_forgets(): work()\n")
    pytester.makepyprojecttoml((ROOT / "pyproject.toml").read_text())

    outcome = pytester.runpytest_subprocess("test_a_coroutine_that_is_never_awaited_fails_its_test.py")

    outcome.assert_outcomes(failed=1)
    outcome.stdout.fnmatch_lines("*coroutine 'work' was never awaited*")


def _imports() -> Iterator[tuple[str, str]]:
    """What keiro's modules import when they run, not for types only: (module, `module` or `module:name`)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        for node in _run_time_nodes(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((module, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports relatively"
                for alias in node.names:
                    # `from keiro import engine` is an import of keiro.engine.
                    joint = "." if _is_module(f"{node.module}.{alias.name}") else ":"
                    yield module, f"{node.module}{joint}{alias.name}"


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from _run_time_nodes(other)
        else:
            yield from _run_time_nodes(node)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return name.startswith("keiro.") and (path.with_suffix(".py").exists() or path.is_dir())


def _subject(name: str) -> str:
    """`stores` of `keiro.stores.sqlite:Store`; nothing for what is not keiro's."""
    return f"{name}.".partition("keiro.")[2].replace(":", ".").partition(".")[0]
