"""Training data in files, and how examples and prompts become tokens: the same way in training and in generation."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from symbiosis.cli.chats import IGNORED, chat_prompt, conversation, encode, end_of_answers, is_learned
from symbiosis.errors import UsageError
from symbiosis.terminal.console import console

LOG_FILE = "log.jsonl"
"""File in the output folder of a run with a line for each step and each evaluation."""
FORMAT_FILE = "prompt_format.json"
"""File in an adapter's folder that says how prompts were made in training."""
_ALPACA = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
_FIELDS = {
    "chat": ("messages",),
    "pairs": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
_WANTED = (
    'give each record "prompt" and "completion" (both texts or both lists of messages), "messages" (each with "role" '
    'and "content"), "conversations" (each with "from" and "value"), "instruction" and "output" (and "input"), or '
    '"text"'
)

Record = Mapping[str, Any]


@dataclass(frozen=True)
class PromptFormat:
    """How the tokens before a completion are made.

    Attributes:
        name: ``"pairs"``, ``"alpaca"``, ``"chat"`` or ``"text"``; empty for what the tokenizer does with a plain text.
        separator: what is between prompt and completion of pairs, unless the prompt ends in white space.
        end: what follows an answer in conversations.
    """

    name: str = ""
    separator: str = ""
    end: str = ""

    def prompt(self, tokenizer: Any, asked: Record) -> list[int]:
        """Return the token ids of a prompt, to which a completion is appended.

        Args:
            asked: a record with ``messages``, ``instruction`` (and ``input``) or ``prompt``. A ``prompt`` alone becomes
                an instruction if the format is Alpaca's, and a message of the user if it is that of conversations.

        Raises:
            UsageError: the tokenizer has no chat template, and the format needs one.
        """
        asked = self.used(asked)
        prompt = asked.get("prompt", "")
        if "messages" in asked:
            return chat_prompt(tokenizer, asked["messages"])
        if "instruction" in asked or self.name == "alpaca":
            prompt = alpaca(asked.get("instruction", prompt), asked.get("input") or "")
        elif self.name == "chat":
            return chat_prompt(tokenizer, [{"role": "user", "content": prompt}])
        elif self.name == "pairs":
            prompt += "" if prompt[-1:].isspace() else self.separator
        elif self.name == "text":
            return [*_own_beginning(tokenizer), *encode(tokenizer, prompt)]
        else:
            return encode(tokenizer, prompt, special=True)
        return [*_beginning(tokenizer), *encode(tokenizer, prompt)]

    def used(self, asked: Record) -> Record:
        """Return a record without the fields that its prompt is not made of, if it has a prompt and an instruction."""
        if "prompt" not in asked or "instruction" not in asked:
            return asked
        unused = ("prompt",) if self.name == "alpaca" else ("instruction", "input")
        return {name: value for name, value in asked.items() if name not in unused}

    def save(self, folder: Path) -> None:
        """Write it to a folder of an adapter."""
        values = {"format": self.name, "separator": self.separator, "end": self.end}
        (folder / FORMAT_FILE).write_text(json.dumps(values) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> PromptFormat:
        """Return the format of an adapter's folder; the tokenizer's own if it has none.

        Raises:
            UsageError: the file is damaged.
        """
        file = folder / FORMAT_FILE
        if not file.is_file():
            return cls()
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            made = cls(str(values["format"]), str(values["separator"]), str(values.get("end", "")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}: cannot be read ({error}); delete it to use prompts as they are") from error
        if made.name not in _FIELDS:
            raise UsageError(f"{file}: the format {made.name!r} is unknown; delete the file to use prompts as they are")
        return made


def alpaca(instruction: str, context: str = "") -> str:
    """Return the prompt of the Alpaca data set for an instruction."""
    paired = ", paired with an input that provides further context" if context else ""
    given = f"### Input:\n{context}\n\n" if context else ""
    return _ALPACA.format(paired=paired, instruction=instruction, input=given)


@dataclass
class Data:
    """Examples for training, as tokens.

    Attributes:
        format: how prompts of such examples are made.
        examples: ``input_ids`` and ``labels``, of at most the wanted length.
        records: number of the record of each example. Texts are joined, so each of their examples has its own number.
        cut: number of examples that were longer and were cut.
        skipped: number of examples of which nothing counted in the loss.
    """

    format: PromptFormat
    examples: list[dict[str, list[int]]] = field(default_factory=list)
    records: list[int] = field(default_factory=list)
    cut: int = 0
    skipped: int = 0

    def add(self, record: int, ids: list[int], labels: list[int], length: int, bos: int | None = None) -> None:
        """Add an example of a record. One that is too long loses the beginning of what does not count, but for a token
        ``bos``, and then its end."""
        if len(ids) > length:
            self.cut += 1
            before = next((index for index, label in enumerate(labels) if label != IGNORED), len(labels))
            kept = int(ids[0] == bos and before > 0)
            start = min(len(ids) - length, max(before - 1 - kept, 0))
            ids, labels = [each[:kept] + each[kept + start : start + length] for each in (ids, labels)]
        if all(label == IGNORED for label in labels[1:]):
            self.skipped += 1
        else:
            self.examples.append({"input_ids": ids, "labels": labels})
            self.records.append(record)

    def chosen(self, records: Sequence[int]) -> Data:
        """Return the examples of some records, in this order."""
        of: dict[int, list[dict[str, list[int]]]] = {}
        for record, example in zip(self.records, self.examples, strict=True):
            of.setdefault(record, []).append(example)
        pairs = [(record, example) for record in records for example in of[record]]
        return Data(self.format, [example for _, example in pairs], [record for record, _ in pairs])


def read_records(path: Path, option: str = "--data") -> list[Record]:
    """Return the records of a ``.jsonl``, ``.csv``, ``.parquet`` or ``.txt`` file, all of one format.

    ``option`` is the option that names the file, for errors.

    Raises:
        UsageError: the file cannot be read, or a record is wrong. The message says which, and what to do.
    """
    readers = {".jsonl": _json_lines, ".json": _json_list, ".csv": _csv_rows, ".parquet": _parquet_rows}
    readers[".txt"] = _whole_text
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{option} {path}: give a file that ends in {', '.join(readers)}")
    with _explained(path):
        numbered = [(place, _normal(record)) for place, record in reader(path)]
    if not numbered:
        raise UsageError(f"{path}: there is nothing in it" + ("" if reader is _whole_text else f"; {_WANTED}"))
    name = _format_name(*numbered[0])
    for place, record in numbered:
        _check(place, record, name)
    records = [record for _, record in numbered]
    if name == "chat":
        _tell_roles(path, records)
    return records


def _tell_roles(path: Path, records: Iterable[Record]) -> None:
    """Say on standard error which roles are none that models know. They may be misspelled, and nothing is learned from
    these messages; a chat template may know them."""
    roles = Counter(one["role"] for record in records for one in _messages(record)[0])
    for role in sorted(roles.keys() - _KNOWN):
        count = f"{roles[role]} message{'s' * (roles[role] > 1)}"
        text = f"{path}: nothing is learned from {count} with the role {role!r}; is it misspelled?"
        console(stderr=True).print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise UsageError if a file cannot be read."""
    try:
        yield
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}, line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    # Not splitlines(), which would also break a line at a U+2028 inside a string.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            try:
                record = json.loads(line, object_pairs_hook=_unique)
                if "\\u" in line:
                    check_encodable(json.dumps(record, ensure_ascii=False), f"{path}, line {number}")
                yield f"{path}, line {number}", record
            except json.JSONDecodeError as error:
                raise UsageError(
                    f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); {_WANTED}"
                ) from error
            except ValueError as error:  # Python reads no numbers of some thousand digits
                raise UsageError(f"{path}, line {number}: {error}; {_WANTED}") from error
            except RecursionError as error:
                raise UsageError(f"{path}, line {number}: nested too deeply; {_WANTED}") from error


def _json_list(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file that is one JSON list."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        records = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({error}); a file with an object on each line is called .jsonl") from error
    if not isinstance(records, list):
        raise UsageError(f"{path}: give a list of records; {_WANTED}")
    for number, record in enumerate(records, 1):
        check_encodable(json.dumps(record, ensure_ascii=False), f"{path}, record {number}")
        yield f"{path}, record {number}", record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises ValueError if a name stands twice in it."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return found


def check_encodable(text: str, where: str) -> None:
    """Check that a text has no half of a pair of surrogates, which no tokenizer takes. Raises UsageError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x}"
        raise UsageError(f"{where}: {found} is an unpaired surrogate, which is no character; remove it") from error


_LONGEST_FIELD = 1 << 30
"""Largest field of a CSV file, in characters."""


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_bytes().decode("utf-8-sig")
    csv.field_size_limit(_LONGEST_FIELD)
    # Not strict, an open quote would take the rest of the file.
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = [name for name in rows.fieldnames or () if name]
        if len(set(names)) < len(names):
            raise UsageError(f"{path}, line 1: a name stands twice; give each field a name of its own")
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if any(row.get(None, ())):  # DictReader's name for fields without one
                raise UsageError(f"{place}: more fields than names in line 1; quote fields that have commas")
            yield place, {name: value or "" for name, value in row.items() if name}
    except csv.Error as error:
        raise UsageError(f"{path}, line {rows.line_num}: not CSV ({error}); {_WANTED}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"{path}: Parquet files need the package pyarrow; pip install pyarrow") from error
    with path.open("rb") as file:
        try:
            rows = parquet.read_table(file).to_pylist()
        except Exception as error:  # pyarrow has errors of its own
            raise UsageError(f"{path}: cannot be read ({type(error).__name__}: {error})") from error
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def _whole_text(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text(encoding="utf-8-sig").strip()
    if text:
        yield str(path), {"text": text}


def _format_name(place: str, record: Any) -> str:
    if not isinstance(record, dict):
        raise UsageError(f"{place}: {record!r:.50} is no object; {_WANTED}")
    if isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        return "chat"
    for name, fields in _FIELDS.items():
        if all(one in record for one in fields):
            return name
    known = ", ".join(map(repr, record)) or "nothing"
    raise UsageError(f"{place}: only {known}; {_WANTED}")


def read_prompts(path: Path) -> list[Record]:
    """Return the prompts in a file: a record for each line of text or, of a JSONL file, for each object, with
    ``prompt`` (a text or messages), ``instruction`` (and ``input``), ``messages`` or ``conversations``. What an example
    has as its answer is left out. Empty lines of a text are left out too, with a line on standard error that says so.

    Raises:
        UsageError: the file cannot be read, or a line has no prompt.
    """
    kind = path.suffix.lower()
    if kind in (".csv", ".parquet", ".json"):
        raise UsageError(f"{path}: --prompts takes lines of text, or a .jsonl file")
    with _explained(path):
        if kind == ".jsonl":
            found = [_asked(*each) for each in _json_lines(path)]
        else:
            lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
            found = [{"prompt": line} for line in lines if line.strip()]
            if found and len(found) < len(lines):
                text = f"{path}: empty lines are left out; there are {len(found)} prompts in {len(lines)} lines"
                console(stderr=True).print(text, soft_wrap=True)
    if not found:
        raise UsageError(f"{path}: there are no prompts in it")
    return found


def _asked(place: str, record: Any) -> Record:
    record = _normal(record)
    if isinstance(record, dict):
        prompt: Any = record.get("prompt")
        if "messages" in record or isinstance(prompt, list):
            messages = record.get("messages", prompt)
            if wrong := _wrong_messages(messages):
                raise UsageError(f"{place}, {wrong}")
            _refuse_tools(place, record)
            if "messages" in record and messages and messages[-1]["role"] == "assistant":
                messages = messages[:-1]
            if not messages:
                raise UsageError(f"{place}: there is no message before the answer; add one or delete the record")
            return {"messages": messages}
        asked = {"prompt": prompt} if isinstance(prompt, str) else {}
        given = record.get("input", "")
        if isinstance(record.get("instruction"), str) and isinstance(given, str):
            asked |= {"instruction": record["instruction"], **({"input": given} if given else {})}
        if asked:
            return asked
    raise UsageError(
        f'{place}: give each prompt as an object with "prompt", "instruction" (and "input") or "messages", as texts'
    )


def _refuse_tools(place: str, record: dict[str, Any]) -> None:
    if record.get("tools"):
        raise UsageError(f'{place}: "tools" are not given to chat templates; leave them out, or name them in a message')


_KNOWN = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
"""Roles of messages that models know."""
_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of ShareGPT's records that have other names in messages."""


def _normal(record: Any) -> Any:
    """Return a record without its fields that are null, and one of ShareGPT's form, with ``conversations``, as one with
    ``messages``."""
    if isinstance(record, dict):
        record = {name: value for name, value in record.items() if value is not None}
    turns = record.get("conversations") if isinstance(record, dict) and "messages" not in record else None
    if not isinstance(turns, list) or not all(
        isinstance(one, dict) and {"from", "value"} <= one.keys() for one in turns
    ):
        return record
    messages = [
        {name: value for name, value in one.items() if name == "weight"}
        | {"role": _ROLES.get(str(one["from"]), one["from"]), "content": one["value"]}
        for one in turns
    ]
    return {**{name: value for name, value in record.items() if name != "conversations"}, "messages": messages}


def _messages(record: Record) -> tuple[Any, int]:
    """Return the messages of a conversation, and how many of them are only a prompt, from which nothing is learned."""
    if "messages" in record:
        return record["messages"], 0
    return [*record["prompt"], *record["completion"]], len(record["prompt"])


def _wrong_messages(messages: Any) -> str:
    """Return what is wrong with the messages of a conversation; empty if nothing is."""
    if not isinstance(messages, list):
        return '"messages" is no list'
    for number, one in enumerate(messages, 1):
        for name in ("role", "content"):
            if not isinstance(one, dict) or not isinstance(one.get(name), str):
                found = repr(one.get(name)) if isinstance(one, dict) else repr(one)
                return f'message {number}: give "{name}" as a text, not {found:.50}'
        if one.get("weight") not in (None, 0, 1):  # a table has nulls
            return (
                f'message {number}: "weight" is {one["weight"]!r:.50}; give 1, or 0 for an answer that is not learned'
            )
    return ""


def _check(place: str, record: Any, name: str) -> None:
    if _format_name(place, record) != name:
        raise UsageError(f"{place}: the fields differ from those of the first record; {_WANTED}")
    if name == "chat":
        messages, asked = _messages(record)
        if wrong := _wrong_messages(messages):
            raise UsageError(f"{place}, {wrong}")
        _refuse_tools(place, record)
        said = [one["content"].strip() for one in messages[asked:] if is_learned(one)]
        if not said:
            weighted = any(one["role"] == "assistant" for one in messages[asked:])
            what = 'only messages of "weight" 0' if weighted else "no message"
            raise UsageError(f"{place}: {what} of the assistant, so there is nothing to learn; delete the record")
        if "" in said:
            raise UsageError(f"{place}: a message of the assistant is empty; fill it in or delete the record")
        return
    optional = ("input",) if name == "alpaca" and record.get("input") else ()
    for one in (*_FIELDS[name], *optional):
        if not isinstance(record[one], str):
            messages = name == "pairs" and isinstance(record[one], list)
            how = "; give prompt and completion both as texts, or both as lists of messages" if messages else ""
            raise UsageError(f"{place}: {one!r} is {record[one]!r:.50}, not a string{how}")
        if not record[one].strip():
            raise UsageError(f"{place}: {one!r} is empty; fill it in or delete the record")


def tokenize(records: list[Record], tokenizer: Any, length: int, source: str, form: PromptFormat | None = None) -> Data:
    """Return the examples of records. The loss is on completions, or on what the assistant says; of texts on all.

    Pairs begin with the beginning token, if there is one besides the end token, and texts do if the tokenizer puts it
    there by itself. Both end with the end token. Texts are joined, and cut into sequences.

    Prompts of validation data are made as those of the training data, whose format is ``form``.

    Raises:
        UsageError: the tokenizer has no chat template, nothing is left to train on, or ``form`` has other fields.
    """
    name = _format_name(source, records[0])
    if form is not None and form.name != name:
        raise UsageError(f"{source}: the fields differ from those of the training data; give both the same fields")
    separator = "" if name != "pairs" or all(one["completion"][:1].isspace() for one in records) else "\n"
    data = Data(form or PromptFormat(name, separator))
    if name == "text":
        texts = [[*_own_beginning(tokenizer), *encode(tokenizer, one["text"]), *_end(tokenizer)] for one in records]
        ids = list(chain.from_iterable(texts))
        for start in range(0, len(ids), length):
            part = ids[start : start + length]
            data.add(start, part, part, length)
    else:
        for number, one in enumerate(records, 1):
            try:
                if name != "chat":
                    examples = [_completed(data.format, tokenizer, one)]
                else:
                    messages, asked = _messages(one)
                    examples = conversation(tokenizer, messages, asked)
                    end = data.format.end or end_of_answers(tokenizer, messages)
                    data.format = replace(data.format, end=end)
            except UsageError as error:
                raise UsageError(f"{source}, record {number}: {error}") from error
            for example in examples:
                data.add(number, *example, length, tokenizer.bos_token_id)
    if not data.examples:
        raise UsageError(f"{source}: nothing is left to train on with --sequence {length}; give more or longer texts")
    return data


def _completed(form: PromptFormat, tokenizer: Any, record: Record) -> tuple[list[int], list[int]]:
    """Return ids and labels of a pair, or of a record with Alpaca's fields. Only the completion has labels."""
    before, completion = form.prompt(tokenizer, record), record["output" if form.name == "alpaca" else "completion"]
    after = [*encode(tokenizer, completion), *_end(tokenizer)]
    return [*before, *after], [IGNORED] * len(before) + after


def _beginning(tokenizer: Any) -> list[int]:
    return [] if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else [tokenizer.bos_token_id]


def _own_beginning(tokenizer: Any) -> list[int]:
    """Return the beginning token if the tokenizer puts it before a text by itself."""
    first = encode(tokenizer, "a", special=True)[:1]
    return first if first == [tokenizer.bos_token_id] else []


def _end(tokenizer: Any) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
