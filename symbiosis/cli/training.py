"""One run of ``symbiosis finetune``: transformers' Trainer with windows, progress, a log, and a clean stop."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from rich.console import Console
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from symbiosis import backward_in_windows
from symbiosis.cli.chats import IGNORED
from symbiosis.cli.data import LOG_FILE, Data, PromptFormat
from symbiosis.cli.folder import damage_of, has_checkpoint, rotate
from symbiosis.cli.methods import lost_in_checkpoints
from symbiosis.errors import SymbiosisError, UsageError
from symbiosis.offline import without_hub
from symbiosis.terminal.console import console, finite
from symbiosis.terminal.progress import Steps
from symbiosis.terminal.signals import heeded

FULL = 1 << 20
"""Free bytes below which a disk counts as full. Errors of torch and safetensors do not say so."""
_OUTSIDE = (OSError, RuntimeError, SafetensorError)
"""Errors that may come from the machine, its files or the executor, and are told without a traceback."""


class Training:
    """Trains one adapter.

    Args:
        base: the opened model.
        config: the PEFT configuration.
        tokenizer: the model's tokenizer.
        train: training data.
        test: validation data, or None.
        output: folder of adapter, checkpoints and log.
        checkpoint: folder to continue from, or None.
        window: tokens in a window, or None for whole sequences.
        seed: seed of the adapter's initialisation.
        option: the option that chose the PEFT method, for errors.
        patience: number of evaluations without a better one after which training ends, or None.
        arguments: what :func:`training_arguments` has returned.
    """

    def __init__(
        self,
        base: Any,
        config: Any,
        tokenizer: Any,
        train: Data,
        test: Data | None,
        output: Path,
        checkpoint: Path | None,
        window: int | None,
        seed: int,
        *,
        option: str,
        patience: int | None,
        arguments: TrainingArguments,
    ) -> None:
        logging.set_verbosity_error()
        self._output = output
        self._option = option
        self._checkpoint = checkpoint
        self._patience = patience
        torch.manual_seed(seed)
        _check_targets(base, config, option)
        try:
            model: Any = get_peft_model(base, config)
        except (AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:  # what PEFT raises
            of_type = "a value has a wrong type: " if isinstance(error, TypeError) else ""
            raise UsageError(f"{option}: {of_type}{' '.join(str(error).split())}") from error
        self._model = model
        self._watch = _Watch(output)
        pad = next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0)
        callbacks = [self._watch, *([] if patience is None else [EarlyStoppingCallback(patience)])]
        self._trainer = _Trainer(
            window,
            train.format,
            model=model,
            args=arguments,
            train_dataset=train.examples,
            eval_dataset=None if test is None else test.examples,
            data_collator=partial(_padded, pad),
            callbacks=callbacks,
        )
        self._trainer.remove_callback(PrinterCallback)

    def train(self) -> int:
        """Train, and save the adapter. Return the signal that ended training early, or 0."""
        out = console(stderr=True)
        if self._checkpoint is not None:
            before = TrainerState.load_from_json(str(self._checkpoint / "trainer_state.json"))
            if self._has_ended(self._checkpoint, before):
                self._evaluate_last(self._checkpoint, out)
                text = f"the run had ended after step {before.global_step}{self._early()}; adapter in {self._output}"
                out.print(text, soft_wrap=True)
                return 0
            self._watch.planned = before.max_steps
        try:
            with Steps(out) as self._watch.steps, _quiet_saves():
                self._trainer.train(resume_from_checkpoint=None if self._checkpoint is None else str(self._checkpoint))
            self._save()
        except _DivergedError:
            raise
        except SymbiosisError:
            try:
                self._keep()
            except _OUTSIDE as error:
                text = f"step {self._trainer.state.global_step} could not be saved ({_told(error)}); {self._again()}"
                out.print(f"{self._output}: {text}", soft_wrap=True, markup=False)
            raise
        except Exception as error:  # a logger may raise anything
            full = False
            with contextlib.suppress(OSError):  # the folder is perhaps gone
                full = shutil.disk_usage(self._output).free < FULL
            reason = _told(error)
            reason = f"the disk is full; {reason}" if full else reason
            if not self._watch.losses:
                of_peft = isinstance(error, (*_OUTSIDE, IndexError, TypeError, ValueError))
                option = self._option if of_peft else f"--log-to, or {self._option}"
                where = self._output if full else getattr(error, "filename", None) or option
                raise UsageError(f"{where}: the first step failed ({reason})") from error
            again = self._again()
            ended = f"{self._output}: training ended after step {self._trainer.state.global_step}"
            if not isinstance(error, _OUTSIDE):  # perhaps a bug, which needs its traceback
                out.print(f"{ended}; {again}", soft_wrap=True)
                raise
            raise UsageError(f"{ended} ({reason}); {again}") from error
        state = self._trainer.state
        if _out_of_patience(state):  # in the step after which a signal was to stop it
            self._watch.stopped = 0
        if self._watch.stopped:
            checkpoint = self._output / f"checkpoint-{state.global_step}"
            again = f"checkpoint in {checkpoint}; the same command with --resume continues"
            out.print(f"stopped after step {state.global_step}; {self._goes_on(again)}", soft_wrap=True)
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        text = f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {state.global_step} steps{self._early()}"
        if state.best_metric is not None:
            text += f"; best validation loss {state.best_metric:.3f} at step {state.best_global_step}"
        out.print(f"{text}; adapter in {self._output}", soft_wrap=True)
        return self._watch.stopped

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let a signal end training after the running step. A second one of its kind ends the process at once."""

        def stop(number: int) -> None:
            self._watch.signal = number
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            console(stderr=True).print("\nstopping after this step, with a checkpoint; again to stop at once")

        with heeded(stop):
            yield

    def _early(self) -> str:
        """Return a remark if early stopping has ended the run."""
        state = self._trainer.state
        early = not self._watch.stopped and state.global_step < state.max_steps and _out_of_patience(state)
        return f" of {state.max_steps}, ended by --patience {self._patience}" if early else ""

    def _goes_on(self, how: str) -> str:
        """Return how the run can go on, or why it cannot."""
        if lost_in_checkpoints(self._model.active_peft_config, resume=True):
            return "a run of this PEFT method cannot be resumed"
        return how

    def _again(self) -> str:
        """Return how a run can go on whose last step was not saved, or why it cannot."""
        if not has_checkpoint(self._output):
            return "nothing was saved"
        return self._goes_on("--resume continues from the last checkpoint")

    def _keep(self) -> None:
        """Save a checkpoint and the adapter after an error in a step. The executor has no part in either."""
        out, step = console(stderr=True), self._trainer.state.global_step
        if not self._watch.losses:
            text = "in the first step" if self._checkpoint is None else f"before a step after {self._checkpoint.name}"
            again = "--overwrite begins again" if self._checkpoint is None else "--resume continues"
            out.print(f"ended in an error {text}; the same command with {again}", soft_wrap=True)
            return
        evaluated = self._trainer.control.should_evaluate
        if evaluated and has_checkpoint(self._output):  # a checkpoint of this step would lack its evaluation
            self._save()
            text = f"ended in an error while step {step} was evaluated; adapter in {self._output}; {self._again()}"
            out.print(text, soft_wrap=True)
            return
        checkpoint = self._output / f"checkpoint-{step}"
        if damage_of(checkpoint) is not None:
            with _quiet_saves():  # an evaluation draws one random number, at its beginning
                self._trainer.save_checkpoint(_random() if evaluated else self._watch.random)
            rotate(self._output, step, self._trainer.state.best_model_checkpoint)
        self._save()
        out.print(
            f"ended in an error after step {step}{', without its validation' * evaluated}; adapter in {self._output}; "
            + self._goes_on(f"checkpoint in {checkpoint}; the same command with --resume continues"),
            soft_wrap=True,
        )

    def _steps(self) -> int:
        """Return the number of steps of the whole run, as transformers computes it."""
        arguments = self._trainer.args
        if arguments.max_steps > 0:
            return int(arguments.max_steps)
        epochs: float = arguments.num_train_epochs
        in_epoch: int = math.ceil(len(self._trainer.get_train_dataloader()) / arguments.gradient_accumulation_steps)
        return math.ceil(epochs * in_epoch)

    def _has_ended(self, checkpoint: Path, state: TrainerState) -> bool:
        """Return whether a checkpoint of this state ends a run. If so, take over the state and save the adapter."""
        ended = state.global_step >= self._steps() or _out_of_patience(state)
        if ended:
            self._trainer.state = state
            best = self._output / f"checkpoint-{state.best_global_step}"
            source = best if state.best_global_step and best.is_dir() else checkpoint
            self._model.load_adapter(str(source), self._model.active_adapter, is_trainable=True)
            self._save()
        return ended

    def _evaluate_last(self, checkpoint: Path, out: Console) -> None:
        """Evaluate a run that has ended, if an error has prevented that. No other step was evaluated then."""
        trainer, state = self._trainer, self._trainer.state
        if trainer.eval_dataset is not None and not any("eval_loss" in entry for entry in state.log_history):
            with Steps(out) as self._watch.steps:
                state.best_metric = trainer.evaluate()["eval_loss"]
            state.best_global_step = state.global_step
            state.save_to_json(str(checkpoint / "trainer_state.json"))

    def _save(self) -> None:
        """Write the adapter to a new folder, and then move its files into place."""
        with tempfile.TemporaryDirectory(dir=self._output, prefix=".partial-") as folder, _quiet_saves(), without_hub():
            self._model.save_pretrained(folder)
            for file in Path(folder).iterdir():
                file.replace(self._output / file.name)

    def results(self) -> dict[str, Any]:
        """Return losses and evaluations as plain data."""
        history, state = self._trainer.state.log_history, self._trainer.state
        tests = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
        return {
            "losses": [entry["loss"] for entry in history if "loss" in entry],
            "steps": state.global_step,
            "validation": [
                {"step": step, "loss": loss, "perplexity": math.exp(min(loss, 700))} for step, loss in tests
            ],
            "best_step": state.best_global_step,
            "stopped": bool(self._watch.stopped),
        }


def _out_of_patience(state: TrainerState) -> bool:
    """Return whether early stopping has ended a run, by its last checkpoint."""
    stopping = state.stateful_callbacks.get("EarlyStoppingCallback")
    if stopping is None:
        return False
    counter = stopping["attributes"]["early_stopping_patience_counter"]
    return bool(counter >= stopping["args"]["early_stopping_patience"])


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _check_targets(base: Any, config: Any, option: str) -> None:
    """Raise UsageError if a name among the target modules is that of no module. PEFT wants one of them to be right."""
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, list | set):
        names = [name for name, _ in base.named_modules()]
        wrong = sorted(one for one in targets if not any(f".{name}".endswith(f".{one}") for name in names))
        if wrong:
            raise UsageError(f"{option}: the model has no module called {' or '.join(wrong)}")


def training_arguments(output: Path, tested: bool, options: dict[str, Any]) -> TrainingArguments:
    """Return the arguments of a run.

    Args:
        output: folder of adapter, checkpoints and log.
        tested: whether there is validation data.
        options: arguments of transformers' ``TrainingArguments``.

    Raises:
        UsageError: transformers lacks the schedule or a logger, or the schedule needs more than its name.
    """
    option = f"--schedule {options['lr_scheduler_type']}"
    try:
        arguments = _arguments(output, tested, options)
        arguments._n_gpu = min(arguments.n_gpu, 1)  # on several GPUs, Trainer would copy the model to each
        get_scheduler(arguments.lr_scheduler_type, AdamW([torch.zeros(1)]), num_warmup_steps=0, num_training_steps=1)
        option = "--log-to"
        for logger in get_reporting_integration_callbacks(arguments.report_to):
            logger()  # raises if a package that it needs is not installed
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(f"{option}: {' '.join(str(error).split())}") from error
    return arguments


def _arguments(output: Path, tested: bool, options: dict[str, Any]) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(output),
        save_strategy="steps",
        eval_strategy="steps" if tested else "no",
        load_best_model_at_end=tested,
        metric_for_best_model="loss" if tested else None,
        restore_callback_states_from_checkpoint=True,  # how long early stopping has waited
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would show a loss that is no number as 0
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        prediction_loss_only=True,
        **options,
    )


class _Trainer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Trains in windows, if there is one, and saves with each checkpoint how its prompts are made."""

    def __init__(self, window: int | None, form: PromptFormat, **options: Any) -> None:
        super().__init__(**options)
        self._window = window
        self._form = form
        rows = [one["labels"] for one in self.eval_dataset or []]
        self._in_example = sum(label != IGNORED for row in rows for label in row[1:]) / max(len(rows), 1)
        """Mean number of tokens in the loss of an example for validation."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with without_hub():
            super()._save(output_dir, state_dict)
        self._form.save(Path(output_dir or self.args.output_dir))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of one batch, and return the loss."""
        if self._window is None:
            loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        model.train()
        total = backward_in_windows(model, self._prepare_inputs(inputs), self._window)
        return torch.tensor(total, device=self.args.device)

    def prediction_step(self, model: Any, inputs: Any, *others: Any, **options: Any) -> tuple[Any, Any, Any]:
        """Return the loss of a validation batch, with a weight that makes the mean over examples one over tokens."""
        loss, logits, labels = super().prediction_step(model, inputs, *others, **options)
        counted = (inputs["labels"][:, 1:] != IGNORED).sum() / len(inputs["labels"])
        return loss * counted / self._in_example, logits, labels

    def save_checkpoint(self, random: _Random) -> None:
        """Save a checkpoint of the last whole step, with the state that the random numbers had after it."""
        cpu, cuda = random
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(cuda)
        self._save_checkpoint(self.model, trial=None)


_Random = tuple[torch.Tensor, list[torch.Tensor]]


def _random() -> _Random:
    """Return the state of torch's random numbers, on the CPU and on GPUs."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all()


class _DivergedError(UsageError):
    """A loss is infinite or not a number, so the adapter is of no use."""


def _padded(pad: int, examples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Return a batch of examples: ``input_ids``, ``attention_mask`` and ``labels``, each [examples, longest]."""

    def column(rows: Iterable[list[int]], value: int) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)

    ids = [one["input_ids"] for one in examples]
    mask, labels = ([1] * len(row) for row in ids), (one["labels"] for one in examples)
    return {"input_ids": column(ids, pad), "attention_mask": column(mask, 0), "labels": column(labels, IGNORED)}


class _Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Shows progress, writes the log, and ends training with a checkpoint when a signal comes."""

    def __init__(self, output: Path) -> None:
        self.signal = 0
        """The signal that has come, or 0."""
        self.stopped = 0
        """The signal that has ended training early, or 0."""
        self.losses = 0
        self.planned = 0
        """Steps of the whole run when the checkpoint was saved from which it continues, or 0."""
        self.random = _random()
        """State after the last whole step."""
        self.steps: Steps | None = None
        """Where progress is shown."""
        self._output = output
        self._file = output / LOG_FILE
        self._note = ""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, lr_scheduler: Any = None, **others: Any
    ) -> None:
        state.save_steps, state.eval_steps = args.save_steps, args.eval_steps  # not those of the checkpoint
        if self.planned not in (0, state.max_steps):
            console(stderr=True).print(
                f"the run was to have {self.planned} steps and now has {state.max_steps}; from here on, the learning "
                "rate is that of the new number"
            )
            if isinstance(lr_scheduler, LambdaLR):  # the checkpoint has the rate of the old number for the next step
                lr_scheduler.last_epoch -= 1
                lr_scheduler.step()
        if args.warmup_steps >= state.max_steps:
            console(stderr=True).print("the learning rate rises to the end: --warmup takes all steps")
        config = model.active_peft_config
        if config.peft_type == "ADALORA" and state.max_steps <= config.total_step - config.tfinal:
            console(stderr=True).print(
                f"AdaLoRA's total_step is {config.total_step} and the run has {state.max_steps} steps, so it ends "
                "before the ranks are final",
                soft_wrap=True,
            )
        entries = [{**entry, "max_steps": state.max_steps} for entry in state.log_history]  # of the checkpoint
        self._file.write_text("".join(map(_line, entries)), encoding="utf-8")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        for name, text in (("loss", "loss"), ("grad_norm", "norm of the gradient"), ("eval_loss", "validation loss")):
            if not math.isfinite(logs.get(name, 0.0)):
                state.log_history.pop()
                raise _DivergedError(
                    f"the {text} of step {state.global_step} is {logs[name]}, so the run ends; "
                    "lower --learning-rate, or use a base model that is not served in float16"
                )
        if "loss" in logs:
            self.losses += 1
            self._note = f"loss {logs['loss']:.3f}"
        if "eval_loss" in logs:
            self._note += f"; validation {logs['eval_loss']:.3f}"
        with self._file.open("a", encoding="utf-8") as file:
            file.write(_line({**logs, "step": state.global_step, "max_steps": state.max_steps}))
        assert self.steps is not None
        self.steps("fine-tuning", state.global_step, state.max_steps, self._note)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if model.active_peft_config.peft_type == "ADALORA":
            model.base_model.update_and_allocate(state.global_step)  # uses the gradients, which are cleared next

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.random = _random()
        if self.signal and state.global_step < state.max_steps:
            self.stopped = self.signal
            control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        rotate(self._output, state.global_step, state.best_model_checkpoint)

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.random = _random()


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry), allow_nan=False) + "\n"


@contextlib.contextmanager
def _quiet_saves() -> Iterator[None]:
    """Silence PEFT, which looks for the base model under the executor's name of it when it saves."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Could not find a config file|Unable to fetch remote file")
        yield
