"""``symbiosis finetune``: train an adapter on a base model that another process serves."""

from __future__ import annotations

import json as json_module
import math
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from symbiosis.cli.folder import (
    OPTIONS_FILE,
    check_json,
    check_same,
    checkpoint_in,
    earlier_in,
    has_checkpoint,
    is_of,
    owned,
    replaced,
)
from symbiosis.cli.inputs import method_in, read_inputs
from symbiosis.cli.methods import lost_in_checkpoints
from symbiosis.cli.options import AddressArgument, InsecureOption, KeyOption, PrivacyOption, RetryOption, options_of
from symbiosis.core.registry import make_transport
from symbiosis.errors import UsageError
from symbiosis.terminal.console import console, is_given, writable, write_json
from symbiosis.terminal.loop import wait_passively

if TYPE_CHECKING:
    from symbiosis.cli.data import Data

_TRAINER = {
    "batch": "per_device_train_batch_size",
    "accumulate": "gradient_accumulation_steps",
    "learning_rate": "learning_rate",
    "schedule": "lr_scheduler_type",
    "warmup": "warmup_steps",
    "weight_decay": "weight_decay",
    "clip": "max_grad_norm",
    "seed": "seed",
}
"""Arguments of transformers' ``TrainingArguments``, by the options that set them. A resumed run has the same ones."""
_method = partial(typer.Option, rich_help_panel="PEFT method")
_training = partial(typer.Option, rich_help_panel="Training")
_checkpoints = partial(typer.Option, rich_help_panel="Evaluation and checkpoints")


def finetune(
    context: typer.Context,
    address: AddressArgument,
    output: Annotated[Path, typer.Option(help="Folder for adapter, checkpoints and log.", show_default=False)],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Training data: .jsonl, .json, .csv or .parquet with prompt and completion, messages, conversations "
            "(ShareGPT), instruction and output (Alpaca) or text; or a .txt file. Required, unless each table of a "
            "--sweep has its own.",
            show_default=False,
        ),
    ] = None,
    lora: Annotated[
        str, _method(help="A LoRA: r, alpha, dropout, targets (names joined with +, or all-linear).")
    ] = "r=8,alpha=16",
    ia3: Annotated[
        bool, _method("--ia3", help="IA3 in place of a LoRA, on the layers that PEFT chooses for the model.")
    ] = False,
    prefix: Annotated[
        int | None, _method(min=1, help="Prefix tuning in place of a LoRA: number of virtual tokens.")
    ] = None,
    peft: Annotated[
        Path | None,
        _method(
            help='Any PEFT method in place of a LoRA: a JSON file like an adapter_config.json, such as {"peft_type": '
            '"VERA", "r": 64}.'
        ),
    ] = None,
    epochs: Annotated[float, _training(min=1e-6, help="Passes over the data.")] = 3.0,
    steps: Annotated[int | None, _training(min=1, help="Optimizer steps, in place of --epochs.")] = None,
    batch: Annotated[int, _training(min=1, help="Sequences in a batch.")] = 4,
    accumulate: Annotated[int, _training(min=1, help="Batches whose gradients one optimizer step uses.")] = 1,
    sequence: Annotated[int, _training(min=8, help="Largest number of tokens in a sequence.")] = 256,
    window: Annotated[
        int | None,
        _training(
            min=1, help="Train in windows of this many tokens: the same gradients with less memory and more time."
        ),
    ] = None,
    learning_rate: Annotated[float, _training(min=0, help="Learning rate of AdamW.")] = 1e-4,
    schedule: Annotated[
        str, _training(help="Schedule of the learning rate: constant, linear, cosine, or another one of transformers.")
    ] = "linear",
    warmup: Annotated[
        float, _training(min=0, help="Steps in which the rate rises. A number below 1 is a part of all steps.")
    ] = 0.0,
    weight_decay: Annotated[float, _training(min=0, help="Weight decay of AdamW.")] = 0.0,
    clip: Annotated[float, _training(min=0, help="Largest norm of the gradients; 0 does not clip.")] = 1.0,
    seed: Annotated[int, _training(min=0, max=2**32 - 1, help="Seed of the adapter, dropout and data order.")] = 0,
    validation: Annotated[
        str | None,
        _checkpoints(
            help="Validation data: a file, or a part of the data such as 0.1. The best checkpoint becomes the adapter."
        ),
    ] = None,
    every: Annotated[int, _checkpoints(min=1, help="Steps between checkpoints, and evaluations.")] = 50,
    patience: Annotated[
        int | None, _checkpoints(min=1, help="End after so many evaluations without a better one.")
    ] = None,
    resume: Annotated[bool, _checkpoints("--resume", help="Continue from the last checkpoint in --output.")] = False,
    overwrite: Annotated[bool, _checkpoints("--overwrite", help="Replace what is in --output.")] = False,
    sweep: Annotated[
        Path | None,
        _training(
            help="Several runs side by side: a TOML file with a table for each, such as \\[small] with lora = 'r=4'. "
            "Each gets a folder of its name in --output."
        ),
    ] = None,
    log_to: Annotated[
        list[str] | None,
        _checkpoints(help="Logger that transformers supports, such as tensorboard or wandb; repeat for several."),
    ] = None,
    key: KeyOption = None,
    insecure: InsecureOption = False,
    retry: RetryOption = 60.0,
    privacy: PrivacyOption = "none",
    json: Annotated[Path | None, typer.Option(help="Also write losses and results to this file, as JSON.")] = None,
    job: Annotated[
        str | None,
        typer.Option(hidden=True, help="Id of the job that may start the command again; its own run goes on then."),
    ] = None,
) -> None:
    """Fine-tune an adapter on a base model that another process serves, and save it as a standard PEFT adapter.

    Ctrl-C, SIGTERM and SIGHUP save a checkpoint after the running step; --resume continues from it. The folder gets
    log.jsonl, with a line for each step.

    Example: symbiosis finetune shm:///tmp/symbiosis.sock --data train.jsonl --lora r=8,alpha=16 --output adapters/alice
    """
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite begins one again; give one of them")
    read = [data, peft, sweep, key, Path(validation) if validation else None]
    check_json(json, read, output, resume or overwrite or is_of(output, job))
    if sweep is not None:
        from symbiosis.cli.sweep import sweep as run_sweep

        run_sweep(context, sweep, output)
        return
    settings = {name: context.params[name] for name in _TRAINER}
    for name, value in {**settings, "epochs": epochs}.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} is {value}; give a finite number")
    wait_passively(address)
    options = options_of(key=key, insecure=insecure, retry=retry)
    make_transport(address, **options)  # an error in them comes before the imports of some seconds below
    given = partial(is_given, context)
    with owned(output, job):
        writable(json)
        if not resume and is_of(output, job):
            config, _ = method_in(context.params, given)
            resume = has_checkpoint(output) and not lost_in_checkpoints(config, resume=True)
            overwrite = not resume
        checkpoint = checkpoint_in(output) if resume else None
        earlier = [] if resume else earlier_in(output, overwrite, read=read)
        records, others, held_out, config, option = read_inputs(context.params, given)
        assert data is not None
        tests = validation if others is None else _hash(others)
        kept = {"peft": config.to_dict(), "data": _hash(records), "validation": tests, "sequence": sequence}
        kept |= {"patience": patience, **settings}
        kept = json_module.loads(json_module.dumps(kept, default=sorted))
        if resume:
            check_same(output, kept, config)
        trainer_module = _trainer_module()
        tested = others is not None or held_out is not None
        arguments = trainer_module.training_arguments(output, tested, _trainer_options(context.params))

        from symbiosis import open_model
        from symbiosis.cli.data import tokenize
        from symbiosis.cli.decoders import check_decoder
        from symbiosis.cli.positions import positions_of
        from symbiosis.core.terms import Kind

        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        with open_model(address, kind=Kind.FINETUNE, privacy=privacy, **options) as base:
            check_decoder(base)
            kept["model"] = base.symbiosis.weights
            if resume:
                check_same(output, kept, config)
            tokenizer = base.symbiosis.tokenizer()
            positions = positions_of(base, config)
            length = sequence if positions is None else min(sequence, positions)
            examples = tokenize(records, tokenizer, length, str(data))
            test = None if others is None else tokenize(others, tokenizer, length, str(validation), examples.format)
            if held_out is not None:
                examples, test = _split(examples, held_out, seed, data)
            _tell(examples, test, "--sequence" if length == sequence else f"the model's {length} positions")
            run = trainer_module.Training(
                *(base, config, tokenizer, examples, test, output, checkpoint, window, seed),
                option=option,
                patience=patience,
                arguments=arguments,
            )
            with replaced(output, earlier):
                write_json(output / OPTIONS_FILE, {**kept, "job": job})
                examples.format.save(output)
                stopped = _train(run, json, {"address": address, "adapter": str(output)})
    if stopped:
        raise typer.Exit(128 + stopped)


def _trainer_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of transformers' ``TrainingArguments``, by their names, from the options of the command."""
    schedule = options["schedule"]
    return {
        **{argument: options[name] for name, argument in _TRAINER.items()},
        "lr_scheduler_type": "constant_with_warmup" if schedule == "constant" and options["warmup"] else schedule,
        "num_train_epochs": options["epochs"],
        "max_steps": options["steps"] or -1,
        "per_device_eval_batch_size": 1 if options["window"] else options["batch"],  # a window is to save memory
        "save_steps": options["every"],
        "eval_steps": options["every"],
        "report_to": list(dict.fromkeys(options["log_to"] or [])),
    }


def _train(run: Any, json: Path | None, told: dict[str, Any]) -> int:
    """Train, and write the results after ``told``, those of a run that ends in an error too.

    Returns:
        The signal that ended training early, or 0.
    """
    with run.stoppable():
        try:
            stopped = int(run.train())
        except BaseException as error:
            told["error"] = str(error) or type(error).__name__
            if json is not None:
                try:
                    write_json(json, {**told, **run.results()})
                except OSError as lost:  # the disk is perhaps full, and the first error is the one that matters
                    console(stderr=True).print(f"--json {json}: not written ({lost})", markup=False, soft_wrap=True)
            raise
        if json is not None:
            write_json(json, {**told, **run.results()})
        return stopped


def _trainer_module() -> Any:
    try:
        import accelerate  # noqa: F401  # transformers' Trainer needs it, and says so in a long error
    except ImportError as error:
        raise UsageError("finetune needs accelerate; pip install 'symbiosis-peft[trainer]'") from error
    from symbiosis.cli import training

    return training


def _split(examples: Data, part: float, seed: int, path: Path) -> tuple[Data, Data]:
    """Return training and validation data: the examples of a random part of the records are held out."""
    import random

    records = list(dict.fromkeys(examples.records))
    count = round(part * len(records))
    if not 0 < count < len(records):
        raise UsageError(
            f"--validation {part}: that is {count} of the {len(records)} records in {path}; give a part that leaves "
            "some for training and some for validation"
        )
    order = random.Random(seed).sample(records, len(records))
    train = examples.chosen(order[count:])
    train.cut, train.skipped = examples.cut, examples.skipped
    return train, examples.chosen(order[:count])


def _tell(examples: Data, test: Data | None, limit: str) -> None:
    text = f"{len(examples.examples)} examples" + ("" if test is None else f", {len(test.examples)} for validation")
    for one, where in ((examples, ""), (test, " of validation")):
        if one is not None and one.cut:
            text += f"; {one.cut}{where} longer than {limit} and cut"
        if one is not None and one.skipped:
            text += f"; {one.skipped}{where} skipped, because nothing in them counts in the loss"
    console(stderr=True).print(text)


def _hash(records: list[Mapping[str, Any]]) -> str:
    import hashlib

    return hashlib.sha256(json_module.dumps(records, sort_keys=True, default=str).encode()).hexdigest()
