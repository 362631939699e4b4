"""``symbiosis finetune`` and ``symbiosis generate``: commands of a tenant."""

from __future__ import annotations

import json as json_module
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from symbiosis.cli.serve import AddressArgument, InsecureOption, KeyOption, options_of
from symbiosis.errors import SymbiosisError, UsageError
from symbiosis.terminal.console import console, visible, writable
from symbiosis.terminal.loop import wait_passively

if TYPE_CHECKING:
    from peft import LoraConfig

PrivacyOption = Annotated[
    str,
    typer.Option(
        help="How rows are masked before they leave this process: none, noise-pool, local-pads:model=FOLDER or "
        "secret-shares:with=ADDRESS, with options such as noise-pool:size=64,accuracy=1e-4."
    ),
]
RetryOption = Annotated[float, typer.Option(min=0, help="Seconds to wait for an executor that was lost.")]


def finetune(
    address: AddressArgument,
    data: Annotated[
        Path,
        typer.Option(help="Training data: a .jsonl file of prompt and completion, or a .txt file.", show_default=False),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the adapter.", show_default=False)],
    lora: Annotated[
        str, typer.Option(help="The LoRA: r, alpha, dropout, targets (names joined with +).")
    ] = "r=8,alpha=16",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 4,
    sequence: Annotated[int, typer.Option(min=8, help="Largest number of tokens in a sequence.")] = 256,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train in windows of this many tokens: the same gradients with less memory and more time.",
            show_default=False,
        ),
    ] = None,
    learning_rate: Annotated[float, typer.Option(min=0, help="Learning rate of AdamW.")] = 1e-4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the adapter and of the order of the data.")] = 0,
    key: KeyOption = None,
    insecure: InsecureOption = False,
    retry: RetryOption = 60.0,
    privacy: PrivacyOption = "none",
    json: Annotated[Path | None, typer.Option(help="Also write the losses to this file, as JSON.")] = None,
) -> None:
    """Fine-tune a LoRA on a base model that another process serves, and save it as a standard PEFT adapter.

    Example: symbiosis finetune shm:///run/symbiosis.sock --data train.jsonl --lora r=8,alpha=16 --output adapters/alice
    """
    if address.startswith("shm://"):
        wait_passively()
    from symbiosis.cli.data import read_corpus

    corpus = read_corpus(data)
    config = lora_config(lora)
    writable(output, folder=True)
    if json is not None:
        writable(json)
    import torch
    from peft import get_peft_model

    from symbiosis import open_model
    from symbiosis.core.terms import Kind

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    options = options_of(key=key, insecure=insecure, retry=retry)
    with open_model(address, kind=Kind.FINETUNE, privacy=privacy, **options) as base:
        torch.manual_seed(seed)
        batches = corpus.batches(base.symbiosis.tokenizer(), steps=steps, size=batch, length=sequence, seed=seed)
        try:
            model: Any = get_peft_model(base, config)
        except ValueError as error:  # the model has no such layers
            raise UsageError(f"--lora {lora}: {' '.join(str(error).split())}") from error
        model.train()
        losses = _train(model, batches, window, sequence, learning_rate, output)
    console(stderr=True).print(f"loss {losses[0]:.3f} → {losses[-1]:.3f} in {len(losses)} steps; adapter in {output}")
    if json is not None:
        json.write_text(json_module.dumps({"address": address, "losses": losses, "adapter": str(output)}))


def _train(
    model: Any, batches: Sequence[Any], window: int | None, sequence: int, learning_rate: float, output: Path
) -> list[float]:
    """Train with a progress bar, and return the losses. The adapter is saved, however training ends."""
    import torch

    from symbiosis import backward_in_windows

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses: list[float] = []
    columns = (TextColumn("fine-tuning"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True)) as progress:
        task = progress.add_task("", total=len(batches), loss="…")
        try:
            for batch in batches:
                losses.append(backward_in_windows(model, batch, window or sequence, prune=window is not None))
                optimizer.step()
                optimizer.zero_grad()
                progress.update(task, advance=1, loss=f"{losses[-1]:.3f}")
        finally:
            if losses:
                with warnings.catch_warnings():  # PEFT looks for the base model under its name
                    warnings.filterwarnings("ignore", "Could not find a config file|Unable to fetch remote file")
                    model.save_pretrained(output)
    return losses


def lora_config(text: str) -> LoraConfig:
    """Return the configuration for a text such as ``"r=8,alpha=16,targets=q_proj+v_proj"``.

    Raises:
        UsageError: an option is unknown, or its value is not a number.
    """
    from peft import LoraConfig

    options: dict[str, Any] = {}
    known = {"r": ("r", int), "alpha": ("lora_alpha", int), "dropout": ("lora_dropout", float)}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        try:
            if name == "targets":
                options["target_modules"] = value if value == "all-linear" else value.split("+")
            else:
                option, kind = known[name]
                options[option] = kind(value)
        except (KeyError, ValueError) as error:
            raise UsageError(
                f"--lora {part!r}: write r=8, alpha=16, dropout=0.05 or targets=q_proj+v_proj, joined with commas"
            ) from error
    if options.get("r", 1) < 1 or options.get("lora_alpha", 1) < 1:
        raise UsageError(f"--lora {text}: r and alpha are 1 or more")
    if not 0 <= options.get("lora_dropout", 0.0) < 1:
        raise UsageError(f"--lora {text}: dropout is a probability, at least 0 and less than 1")
    return LoraConfig(task_type="CAUSAL_LM", **options)


def _with_adapter(base: Any, folder: Path) -> Any:
    """Return the model with the adapter of a PEFT folder.

    Raises:
        UsageError: the folder has no adapter, or one for another model.
    """
    from peft import PeftModel

    if not any((folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise UsageError(f"--adapter {folder}: there are no weights in it (adapter_model.safetensors)")
    try:
        return PeftModel.from_pretrained(base, str(folder))
    except SymbiosisError:
        raise
    except Exception as error:  # PEFT, safetensors and json raise various errors for a broken file
        reason = " ".join(str(error).split())[:500]
        raise UsageError(
            f"--adapter {folder}: cannot be loaded onto this model ({type(error).__name__}: {reason})"
        ) from error


def generate(
    address: AddressArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue; - reads standard input.", show_default=False)],
    adapter: Annotated[Path | None, typer.Option(help="Folder of a PEFT adapter.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the likeliest token.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of sampling.")] = None,
    key: KeyOption = None,
    insecure: InsecureOption = False,
    retry: RetryOption = 60.0,
    privacy: PrivacyOption = "none",
) -> None:
    """Generate text on a base model that another process serves, and print tokens as they arrive.

    Example: symbiosis generate shm:///run/symbiosis.sock --adapter adapters/alice --prompt "The quick brown fox"
    """
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise UsageError(f"--adapter {adapter}: no PEFT adapter there (no adapter_config.json)")
    text = sys.stdin.read() if prompt == "-" else prompt
    if address.startswith("shm://"):
        wait_passively()
    import torch
    from transformers import TextStreamer

    from symbiosis import open_model

    class Streamer(TextStreamer):  # type: ignore[misc]  # transformers is not typed
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(visible(text), stream_end)

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    with open_model(address, privacy=privacy, **options_of(key=key, insecure=insecure, retry=retry)) as base:
        tokenizer = base.symbiosis.tokenizer()
        model: Any = base if adapter is None else _with_adapter(base, adapter)
        inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        if inputs["input_ids"].shape[1] == 0:
            raise UsageError("--prompt is empty; give the model something to continue")
        if seed is not None:
            torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        model.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **sampling,
        )
