"""The output folder of a run of ``symbiosis finetune``: whose it is, and what an earlier run has left in it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from symbiosis.cli.data import FORMAT_FILE, LOG_FILE
from symbiosis.errors import UsageError
from symbiosis.terminal.console import console, descriptor, writable

OPTIONS_FILE = "finetune.json"
"""File in the output folder with the options of the run, for ``--resume``."""
ADAPTER_FILE = "adapter_model.safetensors"
JOB_FILE = ".job.json"
"""File in the output folder of a job's sweep with the job's id. That of a run is in its options."""
LEASE_S = 180.0
"""Seconds for which a job waits for its folder. After a node was lost, an NFS 4 server keeps its lock for some 90 s."""
_WRITTEN = ("adapter_config.json", ADAPTER_FILE, LOG_FILE, OPTIONS_FILE, FORMAT_FILE, "README.md")
"""Files that a run writes into its folder, beside checkpoints."""
_LOCK = ".lock"
_ASIDE = ".replaced"
"""Folder with what a new run replaces, until it has saved something itself."""
_MOVING = ".moving"
"""Folder with a part of what is moved aside, or back."""


@contextlib.contextmanager
def owned(folder: Path, job: str | None = None) -> Iterator[None]:
    """Make a folder if it is missing, and keep other runs out of it. New folders into which nothing was written are
    deleted in the end.

    Args:
        job: id of the job that the command belongs to, if it does.

    Raises:
        UsageError: it cannot be written to, or another run has it.
    """
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    writable(folder, folder=True)
    lock = FileLock(folder / _LOCK)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if job is None:
                raise
            text = f"{folder}: waiting for the lock of another run, or of a lost node, for up to {LEASE_S:g} s"
            console(stderr=True).print(text, markup=False, soft_wrap=True)
            lock.acquire(timeout=LEASE_S)
    except Timeout as error:
        raise UsageError(f"--output {folder}: another run writes to it; choose another folder") from error
    except OSError as error:
        raise UsageError(f"--output {folder}: {_LOCK} in it cannot be locked ({error.strerror})") from error
    for left in folder.glob(".partial-*"):  # of a run that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    if _settle(folder):
        text = f"{folder}: the last run was killed before it saved anything; what it was to replace is back"
        console(stderr=True).print(text, soft_wrap=True)
    try:
        yield
    finally:
        (folder / _LOCK).unlink(missing_ok=True)
        lock.release()
        for one in made:
            if not one.exists():  # deleted while the run had it
                continue
            if any(one.iterdir()):
                break
            one.rmdir()


def check_json(json: Path | None, read: Iterable[Path | None], folder: Path, replace: bool) -> None:
    """Check that results can be written to a file.

    Args:
        json: the file, or None.
        read: files that the command reads.
        folder: output folder of the run.
        replace: whether the file may exist.

    Raises:
        UsageError: the file exists, the command reads it, or the run writes its own files there.
    """
    if json is None:
        return
    if json.resolve().parent.parent == folder.resolve() and json.parent.name.startswith("checkpoint-"):
        raise UsageError(f"--json {json}: the run writes its checkpoints there; choose another file for the results")
    if any(json.resolve() == file.resolve() for file in read if file is not None):
        raise UsageError(f"--json {json}: this file is read; choose another one for the results")
    if json.resolve() in [(folder / name).resolve() for name in (*_WRITTEN, _LOCK, JOB_FILE)]:
        raise UsageError(f"--json {json}: the run writes {json.name} itself; choose another file for the results")
    if json.is_file() and descriptor(json) is None and not replace:
        raise UsageError(f"--json {json}: the file exists; choose another one, remove it, or give --overwrite")


def earlier_in(folder: Path, overwrite: bool, *others: Path, read: Iterable[Path | None] = ()) -> list[Path]:
    """Return what is in a folder, of an earlier run or another origin, that a new run replaces.

    Args:
        others: files that are replaced too.
        read: files that the command reads.

    Raises:
        UsageError: there is something, and it may not be overwritten, or is read.
    """
    written = [*(folder / name for name in _WRITTEN), *others]
    earlier = [*_numbered(folder), *(one for one in written if os.path.lexists(one))]
    for file in read:
        if file is not None and any(file.resolve().is_relative_to(one.resolve()) for one in earlier):
            raise UsageError(f"--output {folder}: the run would replace {file}, which it reads; choose another folder")
    if earlier and not overwrite:
        names = ", ".join(one.name for one in earlier)
        resume = "--resume the run that has made them, " if checkpoints(folder) else ""
        raise UsageError(
            f"--output {folder}: the run would replace {names}; choose another folder, {resume}or --overwrite them"
        )
    return earlier


@contextlib.contextmanager
def replaced(folder: Path, earlier: Iterable[Path]) -> Iterator[None]:
    """Move what is in a folder aside while a new run begins. It is deleted once the run has saved a checkpoint or its
    adapter. If the run ends without, everything is as it was, but for the log of a run that replaced nothing."""
    try:
        if earlier := list(earlier):
            (folder / _MOVING).mkdir()
            for one in earlier:
                one.rename(folder / _MOVING / one.name)
            (folder / _MOVING).rename(folder / _ASIDE)
        yield
    finally:
        log = folder / LOG_FILE
        if not _settle(folder) and not has_checkpoint(folder) and not (log.exists() and log.stat().st_size):
            for file in (folder / OPTIONS_FILE, folder / FORMAT_FILE, log):  # of a run without a step
                file.unlink(missing_ok=True)


def _settle(folder: Path) -> bool:
    """Delete what was moved aside if a new run has saved something; otherwise move it back, and return True."""
    aside, moving = folder / _ASIDE, folder / _MOVING
    if aside.is_dir():
        if has_checkpoint(folder) or (folder / ADAPTER_FILE).exists():
            shutil.rmtree(aside)
        else:
            for checkpoint in checkpoints(folder):
                shutil.rmtree(checkpoint)
            for name in _WRITTEN:
                (folder / name).unlink(missing_ok=True)
            aside.rename(moving)
    if moving.is_dir():
        for one in moving.iterdir():
            one.rename(folder / one.name)
        moving.rmdir()
        return True
    return False


def is_of(folder: Path, job: str | None) -> bool:
    """Return whether the last run, or the last sweep of a job, that has begun in a folder belongs to this job. The job
    was lost then, and its command is started again."""
    for name in (OPTIONS_FILE, JOB_FILE):
        with contextlib.suppress(OSError, TypeError, ValueError):
            if job is not None and dict(json.loads((folder / name).read_bytes())).get("job") == job:
                return True
    return False


def checkpoint_in(folder: Path) -> Path:
    """Return the last complete checkpoint in a folder.

    Raises:
        UsageError: there is none.
    """
    for one in sorted(checkpoints(folder), key=_step, reverse=True):
        damage = damage_of(one)
        if damage is None:
            return one
        console(stderr=True).print(f"{one} is damaged and is passed over ({damage})", soft_wrap=True)
    if not (folder / OPTIONS_FILE).exists():
        raise UsageError(f"--resume: there is no run in {folder}; leave --resume out to begin one")
    raise UsageError(f"--resume: there is no whole checkpoint in {folder}; begin again with --overwrite")


def rotate(folder: Path, step: int, best: str | None) -> None:
    """Delete all checkpoints of the run but that of the present ``step``, and the one before it or the ``best`` one
    (its path). Those of later steps are of a run that has gone back to an earlier one, and are written again.

    Transformers would delete any folder whose name begins with ``checkpoint-``, copies of checkpoints too.
    """
    found = sorted((one for one in checkpoints(folder) if _step(one) <= step), key=_step)
    others = [one for one in found[:-1] if best is None or one.name != Path(best).name]
    for one in others[: max(len(found) - 2, 0)]:
        shutil.rmtree(one)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, damaged ones too. Links, and copies with other names, are no checkpoints."""
    return [one for one in _numbered(folder) if one.is_dir() and not one.is_symlink()]


def _numbered(folder: Path) -> list[Path]:
    """Return what has the name of a checkpoint."""
    return [one for one in folder.glob("checkpoint-*") if one.name.partition("-")[2].isdecimal()]


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run can go on from a checkpoint in a folder."""
    return any(damage_of(one) is None for one in checkpoints(folder))


_NEEDED = "trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth", ADAPTER_FILE
"""Files of a checkpoint without which a run cannot go on as if it had not been stopped."""


def damage_of(checkpoint: Path) -> str | None:
    """Return why a checkpoint was not written to its end; None if it is whole. Raises PermissionError."""
    from safetensors import SafetensorError, safe_open

    try:
        for name in _NEEDED:
            if not (checkpoint / name).is_file():
                raise ValueError(f"{name} is missing")
        if not isinstance(json.loads((checkpoint / "trainer_state.json").read_bytes()), dict):
            raise ValueError("trainer_state.json is no object")
        for file in (one for one in checkpoint.iterdir() if one.suffix in (".pt", ".pth", ".safetensors")):
            with file.open("rb") as stream:
                if file.suffix != ".safetensors" and not zipfile.is_zipfile(stream):
                    raise ValueError(f"{file.name} has no end")
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):  # checks the size
                    pass
    except PermissionError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)
    return None


def _changes(name: str, before: Any, now: Any) -> list[str]:
    """Return how an option has changed; of two objects, only the parts that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        return [part for key in keys for part in _changes(f"{key} of {name}", before.get(key), now.get(key))]
    return [f"{name} was {before!r} and is {now!r}"]


def _default(config: Any, name: str) -> Any:
    """Return the value of a field of a PEFT configuration if it is not given."""
    field = type(config).__dataclass_fields__[name]
    return field.default_factory() if callable(field.default_factory) else field.default


def check_same(folder: Path, kept: dict[str, Any], config: Any) -> None:
    """Check that the run in a folder had the same options.

    Args:
        kept: the options, with those of the PEFT configuration ``config`` under ``"peft"``.

    Raises:
        UsageError: some differ, or they cannot be read.
    """
    try:
        before = dict(json.loads((folder / OPTIONS_FILE).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"--resume: {folder / OPTIONS_FILE} cannot be read ({error})") from error
    if isinstance(old := before.get("peft"), dict):  # perhaps of a version of PEFT with other fields
        old = {name: old.get(name, _default(config, name)) for name in kept["peft"]}
        before["peft"] = old | {"peft_version": kept["peft"]["peft_version"]}
    different = [name for name in kept if kept[name] != before.get(name)]
    for name, what in (
        ("data", "the examples"),
        ("validation", "the validation data"),
        ("model", "the weights of the model at this address"),
    ):
        if name in different:
            raise UsageError(f"--resume: {what} are not those of the run; give the same ones, or begin a new run")
    if different:
        text = ", ".join(part for name in different for part in _changes(name, before.get(name), kept[name]))
        raise UsageError(f"--resume: the options differ from those of the run ({text}); give the same ones")
