"""What a run of ``symbiosis finetune`` reads before it has a model: data and PEFT method, from the options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from symbiosis.cli.data import Record, read_records
from symbiosis.cli.methods import lost_in_checkpoints, method_of
from symbiosis.errors import UsageError


class Inputs(NamedTuple):
    """Data and PEFT method of a run."""

    records: list[Record]
    tests: list[Record] | None
    """Validation data of a file of their own, if there is one."""
    held_out: float | None
    """Part of the data that is held out for validation, if one is."""
    config: Any
    """The PEFT configuration."""
    option: str
    """The option that chose it, for errors."""


def read_inputs(values: Mapping[str, Any], given: Callable[[str], bool]) -> Inputs:
    """Read the files that options name, and check options that depend on one another.

    Args:
        values: the command's options.
        given: returns whether an option was given, and has no default value.

    Raises:
        UsageError: a file or an option is wrong.
    """
    if values["data"] is None:
        raise UsageError("--data is missing; give a file with training data")
    if values["window"] is not None and values["accumulate"] > 1:
        raise UsageError("--window and --accumulate cannot be combined; raise --batch in place of --accumulate")
    if given("steps") and given("epochs"):
        raise UsageError("--steps and --epochs each say how long to train; give one of them")
    validation = values["validation"]
    if values["patience"] is not None and validation is None:
        raise UsageError("--patience needs --validation")
    records, held_out = read_records(values["data"]), _part(validation)
    tests = None if validation is None or held_out is not None else read_records(Path(validation), "--validation")
    config, option = method_in(values, given)
    lost = lost_in_checkpoints(config, resume=values["resume"])
    if lost and (values["resume"] or validation):
        raise UsageError(
            f"{option}: PEFT's checkpoints of this method lack {lost}; leave --resume and --validation out"
        )
    return Inputs(records, tests, held_out, config, option)


def method_in(values: Mapping[str, Any], given: Callable[[str], bool]) -> tuple[Any, str]:
    """Return the PEFT configuration and the option that chose it. Arguments and errors are those of
    :func:`read_inputs`."""
    return method_of(
        lora=values["lora"],
        ia3=values["ia3"],
        prefix=values["prefix"],
        file=values["peft"],
        lora_given=given("lora"),
    )


def _part(validation: str | None) -> float | None:
    """Return the part of the data to hold out, or None if the option names a file or is not given."""
    try:
        part = float(validation or "")
    except ValueError:
        return None
    if not 0 < part < 1:
        raise UsageError(f"--validation {validation}: a part of the data is more than 0 and less than 1")
    return part
