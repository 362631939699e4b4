"""The wheel and the source archive are complete, and the wheel works without the source tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution, distributions
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import symbiosis
from tests.test_documentation import ROOT, code

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    # A build writes into its source tree, and two test processes may build at the same time.
    source = folder / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site")
    )
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source))
    return folder


def run(*command: str, folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_archives_are_complete(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        source = {name.partition("/")[2] for name in file.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "Makefile", "constraints.txt"} <= source
    assert {"tests/conftest.py", "docs/tenants.md", "examples/embed_in_service.py", "symbiosis/py.typed"} <= source
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
        (described,) = (name for name in names if name.endswith("/METADATA"))
        metadata = Metadata.from_email(packed.read(described), validate=True)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "symbiosis").rglob("*.py")}
    assert modules | {"symbiosis/py.typed"} == {name for name in names if name.startswith("symbiosis/")}
    assert (metadata.name, str(metadata.version)) == ("symbiosis-peft", symbiosis.__version__)
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()


def test_the_wheel_runs_the_readme_example(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", str(wheel))
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    link_dependencies(site)
    absent = "import importlib.util; print([importlib.util.find_spec(name) for name in ('hypothesis', 'bitsandbytes')])"
    assert run(str(python), "-c", absent) == "[None, None]\n"
    found = run(str(python), "-c", "import symbiosis; print(symbiosis.__file__)", folder=tmp_path)
    assert Path(found).is_relative_to(site)
    version = run(str(python.with_name("symbiosis")), "--version", folder=tmp_path)
    assert version == f"symbiosis {symbiosis.__version__}\n"
    (tmp_path / "example.py").write_text(code("README.md")[0])
    assert "bob: loss" in run(str(python), "-W", "ignore", "example.py", folder=tmp_path)
    failed = run(str(python), "-W", "ignore", "-c", IMPORT_ALL, folder=tmp_path).split()
    # Kits for tests need pytest and hypothesis; what runs on Ray needs Ray.
    assert [name for name in failed if not name.startswith(("symbiosis.testing.", "symbiosis.cluster."))] == []
    assert "symbiosis.testing.compat" not in failed, "a command"
    run(str(python), str(ROOT / "examples" / "tutorial" / "make.py"), "tutorial", folder=tmp_path)
    assert (tmp_path / "tutorial" / "llama" / "config.json").exists()


IMPORT_ALL = """
import importlib, pkgutil, symbiosis
for module in pkgutil.walk_packages(symbiosis.__path__, "symbiosis."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError:
        print(module.name)
"""
"""Imports every module, and prints the names of those that miss a package."""


def link_dependencies(site: Path) -> None:
    """Link the packages that an installation of the wheel in ``site`` brings, and their own, and no others.

    They come from the running environment, so that the test downloads nothing. It shows that no other package is
    imported; it does not show that the oldest versions that the metadata allows are enough.
    """
    (wheel,) = distributions(name="symbiosis-peft", path=[str(site)])
    wanted, found = [(wheel, frozenset({""}))], set()
    while wanted:
        package, extras = wanted.pop()
        for text in package.requires or ():
            needed = Requirement(text)
            if needed.marker is not None and not any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                continue
            if (needed.name, needed_extras := frozenset({"", *needed.extras})) not in found:
                found.add((needed.name, needed_extras))
                wanted.append((distribution(needed.name), needed_extras))
        if package is not wheel:
            for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                if not (site / name).exists():
                    (site / name).symlink_to(Path(str(package.locate_file(name))))
