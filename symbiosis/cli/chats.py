"""How conversations become tokens: by the chat template of the model's tokenizer, in training and in generation."""

from __future__ import annotations

import contextlib
from typing import Any

from symbiosis.errors import UsageError

IGNORED = -100
"""Label of a token that does not count in the loss."""
Messages = list[dict[str, Any]]
Example = tuple[list[int], list[int]]
"""Token ids, and their labels."""


def chat_prompt(tokenizer: Any, messages: Messages) -> list[int]:
    """Return the token ids of a conversation and of the beginning of the assistant's next message.

    Raises:
        UsageError: the tokenizer has no chat template, or that fails.
    """
    text, parts = _text(tokenizer, messages, True), None
    with contextlib.suppress(UsageError):  # a template may refuse the beginning of a conversation that it takes
        parts = _parts(tokenizer, messages, text)
    return encode(tokenizer, text) if parts is None else [token for part in parts for token in part]


def conversation(tokenizer: Any, messages: Messages, asked: int = 0) -> list[Example]:
    """Return the examples of a conversation. What the assistant says after the first ``asked`` messages has labels,
    apart from messages with the weight 0.

    That is one example, or one for each answer if the template changes messages once others follow, as some leave out
    thoughts. The prompt of an answer is then the one that :func:`chat_prompt` makes. A first message has no prompt, so
    nothing is learned from it.

    Raises:
        UsageError: as for :func:`chat_prompt`, or the template leaves out what the assistant says.
    """
    parts = _parts(tokenizer, messages, _text(tokenizer, messages, False))
    if parts is not None:
        answers = [
            index >= asked and is_learned(message)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        labels = [
            token if number % 2 and answers[number // 2] else IGNORED
            for number, part in enumerate(parts)
            for token in part
        ]
        return [([token for part in parts for token in part], labels)]
    examples: list[Example] = []
    for index, message in enumerate(messages):
        if index >= asked and is_learned(message):
            prompt = chat_prompt(tokenizer, messages[:index]) if index else []
            said = _said(tokenizer, messages[: index + 1]) if index else []
            examples.append(([*prompt, *said], [IGNORED] * len(prompt) + said))
    return examples


def is_learned(message: dict[str, Any]) -> bool:
    """Return whether a message is of the assistant, and is to be learned: OpenAI's files give others the weight 0."""
    return message["role"] == "assistant" and message.get("weight") in (None, 1)


def _said(tokenizer: Any, messages: Messages) -> list[int]:
    """Return the token ids of the last message, an answer, and of its end, as they follow the prompt of generation."""
    before, text = _text(tokenizer, messages[:-1], True), _text(tokenizer, messages, False)
    if text.startswith(before):
        return _cut(tokenizer, text, [0, len(before)])[1]
    around = _around(tokenizer, messages)
    if around is None:
        raise UsageError("the model's chat template leaves out what the assistant says")
    head, after = around
    more = before[len(_same(before, head)) :]  # such as the beginning of a thought
    said = messages[-1]["content"].strip().removeprefix(more).removeprefix(more.strip())
    space = "" if before[-1:].isspace() else head[len(head.rstrip()) :]
    return _inside(tokenizer, space + said + after)


def end_of_answers(tokenizer: Any, messages: Messages) -> str:
    """Return what the template writes after the last thing that the assistant says, without white space."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    _, after = _around(tokenizer, messages[: last + 1]) or ("", "")
    return after.strip()


_STAND_IN = "(what the assistant says)"


def _around(tokenizer: Any, messages: Messages) -> tuple[str, str] | None:
    """Return what the template writes before and after the last message; None if it leaves that message out."""
    text = _text(tokenizer, [*messages[:-1], {**messages[-1], "content": _STAND_IN}], False)
    head, found, after = text.rpartition(_STAND_IN)
    return (head, after) if found else None


def _same(one: str, other: str) -> str:
    """Return the beginning that two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((place for place, (first, second) in pairs if first != second), min(len(one), len(other)))]


def _parts(tokenizer: Any, messages: Messages, text: str) -> list[list[int]] | None:
    """Return the token ids of what precedes the assistant's first answer, of the answer, of what precedes the second
    one, and so on; None if the text does not begin with the texts of the first messages."""
    cuts = [0]
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            said = message["content"].strip()
            # Templates refuse empty conversations.
            before = _text(tokenizer, messages[:index], True) if index else text[: max(text.find(said), 0)]
            for head in (before, _text(tokenizer, messages[: index + 1], False)):
                if not text.startswith(head):
                    return None
                cuts.append(len(head))
    return _cut(tokenizer, text, cuts)


def _cut(tokenizer: Any, text: str, cuts: list[int]) -> list[list[int]]:
    """Return the token ids of the parts of a text that begin at these characters. What begins at a cut is encoded apart
    if a token would lie across it, as where a prompt ends in a space."""
    parts: list[list[int]] = []
    start, done, ids = 0, 0, encode(tokenizer, text)
    for cut in [*cuts[1:], len(text)]:
        head = (_inside if start else encode)(tokenizer, text[start:cut])
        parts.append(head[done:])
        done = len(head)
        if ids[:done] != head:
            start, done, ids = cut, 0, _inside(tokenizer, text[cut:])
    return parts


def _inside(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that follows another one. Some tokenizers put a space before what they encode."""
    line, both = encode(tokenizer, "\n"), encode(tokenizer, "\n" + text)
    return both[len(line) :] if both[: len(line)] == line else encode(tokenizer, text)


def _text(tokenizer: Any, messages: Messages, answer: bool) -> str:
    """Return a conversation as text; ``answer``: with the beginning of the assistant's next message."""
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError("the model's tokenizer has no chat template; give prompts and completions, not messages")
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
    except Exception as error:  # a template is a program of the provider's
        reason = " ".join(str(error).split())[:300]
        raise UsageError(f"the model's chat template fails: {type(error).__name__}: {reason}") from error
    return text


def encode(tokenizer: Any, text: str, special: bool = False) -> list[int]:
    """Return the token ids of a text; ``special``: with those that the tokenizer adds by itself."""
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids
