"""Exports of the package are complete, typed and documented. `make check` checks the directions of imports."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import symbiosis

ROOT = Path(symbiosis.__file__).parent
MODULES = sorted(
    module.name for module in pkgutil.walk_packages([str(ROOT)], "symbiosis.") if not module.name.endswith("__main__")
)
if importlib.util.find_spec("ray") is None:
    MODULES = [name for name in MODULES if not name.startswith("symbiosis.cluster.")]
PUBLIC = [
    name for name in ["symbiosis", *MODULES] if not name.startswith(("symbiosis.cli", "symbiosis.bench", "symbiosis._"))
]


def test_top_level() -> None:
    assert symbiosis.__all__ == [
        "Base",
        "Client",
        "Executor",
        "Statistics",
        "__version__",
        "backward_in_windows",
        "connect",
        "open_model",
    ]
    assert set(symbiosis.__all__) <= set(dir(symbiosis))
    assert symbiosis.Executor.__module__ == "symbiosis.host"
    with pytest.raises(AttributeError, match="'Nothing'"):
        symbiosis.Nothing  # noqa: B018


@pytest.mark.parametrize("name", PUBLIC)
def test_all_is_complete_and_sorted(name: str) -> None:
    """Every name in a package's __all__ exists, and the list is sorted. Inside a package, a leading underscore marks
    private names.
    """
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    for item in exported:
        assert hasattr(module, item), f"{name} exports {item}, which it does not have"
    assert list(exported) == sorted(exported, key=_order), f"{name}.__all__ is not in order"


def _order(name: str) -> tuple[int, str]:
    """Sort constants first, then classes, then the rest, like ruff."""
    return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring that states its purpose"
    for item, value in vars(module).items():
        own = (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == name
        if own and not item.startswith("_"):
            made = f"{item}("  # what dataclasses and named tuples get in place of a docstring
            assert not (value.__doc__ or made).startswith(made), f"{name}.{item} is not documented"


@pytest.mark.parametrize("cls", [symbiosis.Client, symbiosis.Executor, symbiosis.Base])
def test_public_methods_are_documented(cls: type) -> None:
    for name, value in vars(cls).items():
        if not name.startswith("_") and isinstance(value, (FunctionType, classmethod, staticmethod, property)):
            assert value.__doc__ or f" {name}: " in str(cls.__doc__), f"{cls.__name__}.{name}"


def test_typed_marker() -> None:
    assert (ROOT / "py.typed").exists()


@pytest.mark.parametrize("module", ["symbiosis.core.scheduler", "symbiosis.core.requests", "symbiosis.policies"])
def test_scheduling_needs_no_torch(module: str) -> None:
    """The scheduler and the policies import no tensor library."""
    code = f"import sys, {module}; sys.exit(sum(name in sys.modules for name in ('torch', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "it imports torch or transformers"


def test_a_provider_imports_no_peft() -> None:
    """It takes a second, and belongs to tenants."""
    code = "import sys, symbiosis; symbiosis.Executor; sys.exit('peft' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "it imports PEFT"


def test_testing_kit_exports() -> None:
    import symbiosis.testing as kit

    assert isinstance(kit, ModuleType)
    assert "PolicyConformance" in kit.__all__
    assert "FakeClock" in kit.__all__
