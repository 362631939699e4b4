"""How conversations become tokens: by the chat template of the model's tokenizer, in training and in generation."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

from symbiosis.errors import UsageError

IGNORED = -100
"""Label of a token that does not count in the loss."""
Messages = list[dict[str, str]]
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


def conversation(tokenizer: Any, messages: Messages) -> list[Example]:
    """Return the examples of a conversation. Only what the assistant says has labels.

    That is one example, or one for each answer if the template changes messages once others follow, as some leave out
    thoughts: its prompt is then the one that :func:`chat_prompt` makes.

    Raises:
        UsageError: as for :func:`chat_prompt`, or the template changes what the assistant says.
    """
    parts = _parts(tokenizer, messages, _text(tokenizer, messages, False))
    if parts is not None:
        labels = [token if number % 2 else IGNORED for number, part in enumerate(parts) for token in part]
        return [([token for part in parts for token in part], labels)]
    examples = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            before, text = _text(tokenizer, messages[:index], True), _text(tokenizer, messages[: index + 1], False)
            after = _after(tokenizer, messages[: index + 1])
            if after is None:
                raise UsageError("the model's chat template leaves out what the assistant says")
            said = text[len(before) :] if text.startswith(before) else message["content"].strip() + after
            prompt, answer = chat_prompt(tokenizer, messages[:index]), encode(tokenizer, said)
            examples.append(([*prompt, *answer], [IGNORED] * len(prompt) + answer))
    return examples


def end_of_answers(tokenizer: Any, messages: Messages) -> str:
    """Return what the template writes after the last thing that the assistant says, without white space."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return (_after(tokenizer, messages[: last + 1]) or "").strip()


def _after(tokenizer: Any, messages: Messages) -> str | None:
    """Return what the template writes after the last message; None if it leaves that message out."""
    text, said = _text(tokenizer, messages, False), messages[-1]["content"].strip()
    return text.rpartition(said)[2] if said and said in text else None


def _parts(tokenizer: Any, messages: Messages, text: str) -> list[list[int]] | None:
    """Return the token ids of what precedes the assistant's first answer, of the answer, of what precedes the second
    one, and so on; None if the text does not begin with the texts of the first messages."""
    cuts = [0]
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _text(tokenizer, messages[:index], True) if index else ""  # templates refuse empty conversations
            for head in (before, _text(tokenizer, messages[: index + 1], False)):
                if not text.startswith(head):
                    return None
                cuts.append(len(head))
    ids, heads = encode(tokenizer, text), [encode(tokenizer, text[:cut]) for cut in cuts]
    if all(ids[: len(head)] == head for head in heads):
        return [ids[len(first) : len(second)] for first, second in pairwise([*heads, ids])]
    # A token would begin in a prompt and end in the answer, as when prompts end in a space.
    return [encode(tokenizer, text[first:second]) for first, second in pairwise([*cuts, len(text)])]


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
