"""``symbiosis generate``: generate text on a base model that another process serves."""

from __future__ import annotations

import json as json_module
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from symbiosis.cli.chats import chat_prompt, encode
from symbiosis.cli.data import PromptFormat, check_encodable, read_prompts
from symbiosis.cli.decoders import check_decoder
from symbiosis.cli.options import AddressArgument, InsecureOption, KeyOption, PrivacyOption, RetryOption, options_of
from symbiosis.cli.positions import positions_of
from symbiosis.core.registry import make_transport
from symbiosis.errors import SymbiosisError, UsageError
from symbiosis.terminal.console import console, naming, visible, writable
from symbiosis.terminal.loop import wait_passively
from symbiosis.terminal.progress import Steps

_HOTTEST = 1e6
"""Largest temperature, and the inverse of the smallest. Logits divided by a much smaller one overflow."""
STANDARD = Path("-")
"""Standard input or output."""


def generate(
    address: AddressArgument,
    prompt: Annotated[
        str | None,
        typer.Option(help="Text to continue; - reads standard input less its last line break.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of prompts: one a line (-: standard input), or .jsonl with prompt, instruction or messages."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Talk with the model, by its chat template; an empty line ends it, and Ctrl-C an answer."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message at the beginning of a chat, and of --prompts with messages.")
    ] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of a PEFT adapter.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Largest number of tokens to generate.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 takes the likeliest token and never samples.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Sample from the likeliest tokens of this total probability; needs --temperature."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from so many likeliest tokens; needs --temperature.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text before which the generation ends; repeat for several.")
    ] = None,
    number: Annotated[
        int, typer.Option("--n", min=1, help="Texts for each prompt; more than one need --temperature.")
    ] = 1,
    output: Annotated[
        Path | None, typer.Option(help="Write the texts to this file (-: standard output), as JSON lines.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Seed of sampling.")] = None,
    key: KeyOption = None,
    insecure: InsecureOption = False,
    retry: RetryOption = 60.0,
    privacy: PrivacyOption = "none",
) -> None:
    """Generate text on a base model that another process serves, and print tokens as they arrive.

    Prompts are made as `symbiosis finetune` made them for the adapter. The model's own generation settings, such as a
    repetition penalty, apply too. Without --top-p and --top-k they say what to sample from; top-k is otherwise 50.

    Example: symbiosis generate shm:///tmp/symbiosis.sock --adapter adapters/alice --prompt "The quick brown fox"
    """
    if [prompt is not None, prompts is not None, chat].count(True) != 1:
        raise UsageError("give one of --prompt, --prompts and --chat")
    if (top_p or top_k or number > 1) and not temperature:
        raise UsageError("--top-p, --top-k and --n need --temperature; without it, each text is the same")
    if temperature and not 1 / _HOTTEST <= temperature <= _HOTTEST:
        raise UsageError(f"--temperature {temperature:g}: give 0, or a number from {1 / _HOTTEST:g} to {_HOTTEST:g}")
    if chat and (output is not None or number > 1):
        raise UsageError("--chat prints one answer to each message; leave --output and --n out")
    if output is not None and output.is_file():
        raise UsageError(f"--output {output}: the file exists; choose another one, or remove it")
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        found = ", ".join(sorted(file.parent.name for file in adapter.glob("*/adapter_config.json")))
        within = f"; it has folders with adapters: {found}" if found else ""
        raise UsageError(f"--adapter {adapter}: no PEFT adapter there (no adapter_config.json){within}")
    asked, before = _asked(prompt, prompts), _system_message(system)
    _check_stops(stop or [])
    if before and not chat:
        asked = [_begun(one, before) for one in asked]
    if output not in (None, STANDARD):
        writable(output)
    wait_passively(address)
    options = options_of(key=key, insecure=insecure, retry=retry)
    make_transport(address, **options)  # an error in them comes before the imports of some seconds below
    import torch

    from symbiosis import open_model

    form = PromptFormat() if adapter is None else PromptFormat.load(adapter)
    asked = [form.used(one) for one in asked]
    if chat and form.name not in ("", "chat"):
        raise UsageError(
            f"--chat: the adapter was trained on data of the form {form.name!r}, not on conversations; use --prompt"
        )
    if form.name not in ("", "chat") and any("messages" in one for one in asked):
        raise UsageError(
            f"--prompts {prompts}: the adapter was trained on data of the form {form.name!r}, not on conversations; "
            "give each prompt as a text in place of messages"
        )
    if form.name not in ("", "alpaca") and any("instruction" in one for one in asked):
        raise UsageError(
            f"--prompts {prompts}: the adapter was trained on data of the form {form.name!r}, not on instructions; "
            "give each prompt as a text (prompt) in place of an instruction"
        )
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    with open_model(address, privacy=privacy, **options) as base:
        check_decoder(base)
        model = base if adapter is None else _with_adapter(base, adapter)
        if seed is not None:
            torch.manual_seed(seed)
        chosen: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, "num_beams": 1}
        chosen |= {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature else {}
        positions = positions_of(base, None if adapter is None else model.active_peft_config)
        writer = _Writer(
            model, base.symbiosis.tokenizer(), positions, {**chosen, "stop_strings": stop or None}, form.end
        )
        if chat:
            _chat(writer, before)
            return
        begun = [
            _ids(writer, form, one, "the prompt" if prompts is None else f"{prompts}: prompt {index}")
            for index, one in enumerate(asked, 1)
        ]
        if output is not None:
            _to_file(writer, asked, begun, number, output)
        else:
            for ids in begun:
                for _ in range(number):
                    writer.write(ids, shown=True)


def _asked(prompt: str | None, file: Path | None) -> list[Mapping[str, Any]]:
    if file is not None:
        return read_prompts(Path("/dev/stdin") if file == STANDARD else file)
    if prompt is None:
        return []
    if prompt == "-":
        return [{"prompt": _typed(sys.stdin.read).removesuffix("\n")}]
    check_encodable(prompt, "--prompt")
    return [{"prompt": prompt}]


def _typed(read: Callable[[], str]) -> str:
    """Return what is read from standard input. Raises UsageError if it is not UTF-8."""
    try:
        text = read()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 ({error.reason})") from error
    check_encodable(text, "standard input")
    return text


def _system_message(text: str | None) -> list[dict[str, str]]:
    check_encodable(text or "", "--system")
    return [] if text is None else [{"role": "system", "content": text}]


def _check_stops(stops: list[str]) -> None:
    for one in stops:
        check_encodable(one, "--stop")
        if not one:
            raise UsageError("--stop is empty; give the text that ends the generation")


def _begun(asked: Mapping[str, Any], before: list[dict[str, str]]) -> Mapping[str, Any]:
    """Return a prompt with messages that begin its conversation, unless it has a system message of its own."""
    if "messages" not in asked:
        raise UsageError("--system goes with --chat, and with --prompts whose records have messages")
    own = any(one["role"] == "system" for one in asked["messages"])
    return asked if own else {"messages": [*before, *asked["messages"]]}


def _ids(writer: _Writer, form: PromptFormat, asked: Mapping[str, Any], what: str) -> list[int]:
    """Return the token ids of a prompt. Raises UsageError, with its name ``what``, if it cannot be continued."""
    try:
        ids = form.prompt(writer.tokenizer, asked)
    except UsageError as wrong:
        raise UsageError(f"{what}: {wrong}") from wrong
    writer.check(ids, what)
    return ids


class _Writer:
    """Generates texts with one model and fixed options.

    Args:
        positions: largest number of tokens that the model can read, or None.
        options: arguments of the model's ``generate``.
        end: text with which the adapter has learned to end answers.
    """

    def __init__(self, model: Any, tokenizer: Any, positions: int | None, options: dict[str, Any], end: str) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self._streamer: Any = None
        self._positions = positions
        pads = tokenizer.pad_token_id, tokenizer.eos_token_id
        self._options = {name: value for name, value in options.items() if value is not None}
        self._options["pad_token_id"] = next((one for one in pads if one is not None), None)
        self._ends = [*self._options.get("stop_strings", []), *filter(None, [end])]
        stated = model.generation_config.eos_token_id
        ends = {tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])}
        ids = encode(tokenizer, end)
        if len(ids) == 1:
            ends |= {*ids}
        elif ids:
            self._options["stop_strings"] = self._ends
        self._options["eos_token_id"] = sorted(ends - {None}) or None
        if "stop_strings" in self._options:
            self._options["tokenizer"] = tokenizer

    def check(self, ids: list[int], what: str) -> None:
        """Raise UsageError if a prompt, which the text ``what`` names, is empty or leaves no room for a token."""
        if not ids:
            raise UsageError(f"{what} is empty; give the model something to continue")
        if self._positions is not None and len(ids) > self._positions:
            raise UsageError(f"{what} has {len(ids)} tokens and the model {self._positions} positions; shorten it")

    def write(self, ids: list[int], shown: bool) -> str:
        """Continue a checked prompt, print tokens as they arrive if they are to be shown, and return the text."""
        import torch
        from transformers import TextStreamer

        ends = self._ends

        class Streamer(TextStreamer):  # type: ignore[misc]  # transformers is not typed
            held = ""  # the end of the text so far that may be the beginning of one of ``ends``
            said = ""  # the text that was shown
            ended = False
            token_cache: list[int]

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                whole = self.held + text
                shown = "" if self.ended else _before(whole, ends)
                self.ended = self.ended or shown != whole
                held = 0 if self.ended or stream_end else _begun_end(shown, ends)
                self.held = shown[len(shown) - held :]
                self.said += shown[: len(shown) - held]
                super().on_finalized_text(visible(shown[: len(shown) - held]), stream_end)

            def put(self, value: torch.Tensor) -> None:
                is_prompt = self.next_tokens_are_prompt
                super().put(value)
                if not is_prompt and not self.token_cache:  # it begins anew after each line, where a decoder may
                    self.token_cache = value.flatten().tolist()[-1:]  # leave out spaces that begin a text
                    self.print_len = len(self.tokenizer.decode(self.token_cache, **self.decode_kwargs))

        most = wanted = self._options["max_new_tokens"]
        if self._positions is not None:
            most = min(wanted, self._positions + 1 - len(ids))  # the last token is not read
        prompt = torch.tensor([ids])
        self._streamer = Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if shown else None
        made = self._model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            streamer=self._streamer,
            **{**self._options, "max_new_tokens": most},
        )
        if made.shape[1] - len(ids) == most < wanted:
            console(stderr=True).print(f"the text ends where the model's {self._positions} positions end")
        return _before(str(self.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)), ends)

    def interrupted(self) -> str:
        """Show the rest of a text that was interrupted, and return what there is of it."""
        if self._streamer is None:
            return ""
        self._streamer.end()
        return str(self._streamer.said)


def _before(text: str, ends: Sequence[str]) -> str:
    """Return a text up to the first of some texts that occur in it."""
    return text[: min((place for end in ends if (place := text.find(end)) >= 0), default=len(text))]


def _begun_end(text: str, ends: Sequence[str]) -> int:
    """Return the most characters at the end of a text with which one of some texts begins."""
    sizes = (size for end in ends for size in range(1, len(end)) if text.endswith(end[:size]))
    return max(sizes, default=0)


def _to_file(
    writer: _Writer, asked: list[Mapping[str, Any]], begun: list[list[int]], number: int, output: Path
) -> None:
    """Write the texts of prompts, which begin with these tokens, to a file, a line for each."""
    total, out = len(asked) * number, console(stderr=True)
    with (
        nullcontext(sys.stdout) if output == STANDARD else _opened(output) as file,
        Steps(out) as steps,
    ):
        for index in range(total):
            try:
                made = writer.write(begun[index // number], shown=False)
                line = json_module.dumps({**asked[index // number], "completion": made}, ensure_ascii=False)
                file.write(line + "\n")
                file.flush()
            except BaseException:
                out.print(f"{index} of {total} texts were written")
                raise
            steps("texts", index + 1, total)


@contextmanager
def _opened(output: Path) -> Iterator[TextIO]:
    """Open a file for writing, and close it. An error of its last write comes again from closing it, with its name. A
    file without a text is removed, so that the same command may be given again."""
    file = output.open("w", encoding="utf-8")
    try:
        yield file
    finally:
        try:
            with naming(output):
                file.close()
        finally:
            if output.is_file() and not output.stat().st_size:
                output.resolve().unlink()


def _chat(writer: _Writer, messages: list[dict[str, str]]) -> None:
    """Answer the lines of standard input, in a conversation that begins with these messages. Ctrl-C ends an answer;
    the conversation has what there was of it."""
    chat_prompt(writer.tokenizer, [*messages, {"role": "user", "content": "Hello"}])  # an error comes before any text
    out = console(stderr=True)
    while True:
        out.print("[bold]you:[/] ", end="")
        line = _typed(sys.stdin.readline).strip()
        if not line:
            return
        messages.append({"role": "user", "content": line})
        ids = chat_prompt(writer.tokenizer, messages)
        writer.check(ids, "the conversation")
        try:
            answer = writer.write(ids, shown=True)
        except KeyboardInterrupt:  # the conversation goes on
            answer = writer.interrupted()
        messages.append({"role": "assistant", "content": answer})


def _with_adapter(base: Any, folder: Path) -> Any:
    """Return the model with the adapter of a PEFT folder.

    Raises:
        UsageError: the folder has no adapter, or one for another model.
    """
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    if not any((folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise UsageError(f"--adapter {folder}: there are no weights in it (adapter_model.safetensors)")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            warnings.filterwarnings("ignore", "The following rank_pattern keys")  # PEFT says so of each AdaLoRA
            model = PeftModel.from_pretrained(base, str(folder))
            weights = load_peft_weights(str(folder), device="cpu")
            others = {*weights} - {*get_peft_model_state_dict(model, save_embedding_layers=True)}
            if others and model.active_peft_config.peft_type == "LORA":  # PEFT has perhaps renamed its tensors
                others = {*model.load_adapter(str(folder), model.active_adapter).unexpected_keys}
    except SymbiosisError:
        raise
    except Exception as error:  # PEFT, safetensors and json raise various errors for a broken file
        reason = " ".join(str(error).split())[:500]
        raise UsageError(
            f"--adapter {folder}: cannot be loaded onto this model ({type(error).__name__}: {reason})"
        ) from error
    if others:
        raise UsageError(
            f"--adapter {folder}: it is of another model; this one has no place for {len(others)} of its tensors, such "
            f"as {min(others)}"
        )
    return model
