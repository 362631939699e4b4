"""The page ``docs/compatibility.md``, written from the results of :mod:`symbiosis.testing.compat`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from symbiosis.terminal.console import write_text
from symbiosis.testing.compat import BROAD, EQUAL, LEAST_SERVED, NOT_PLAIN, REFUSED, VERDICTS, Cell, ServedPart
from symbiosis.testing.formats import FP32, limits_of, split_name

_SIGNS = {EQUAL: "equal", REFUSED: "refused", NOT_PLAIN: "–"}
_HEAD = """# Compatibility

Written by `make compat`. Each cell is a small random model of an architecture with a PEFT method, against plain
`transformers` + PEFT with the same seed: logits, greedy and sampled tokens where the model generates, gradients, three
AdamW steps, and the adapter saved, then loaded by plain PEFT and by another client.

*equal*: logits, gradients and losses within {computed:g} of the largest number, and what the three steps change in the
adapter within {trained:g} of the change (by norm; a client that trains nothing has 1), in fp32; tokens are the same.
Tables of other number formats state their own limits. *refused*: an error says why and what to do. *–*: the same job
fails in plain PEFT too. A cell with two results has that of a client in the executor's process first, then that over
`shm://`. *served* is the executor's part of all weights but those that every client has: embeddings, heads of
classifiers, norms and biases.

Of {cells} cells, {summary}.

"""
_READS = {
    "text": "Decoders: dense, mixtures of experts, state-space models and hybrids",
    "pairs": "Encoder–decoders",
    "masked": "Masked language models",
    "class": "Text classification",
    "tokens": "Token classification",
    "answer": "Question answering",
    "image": "Images",
    "wave": "Speech, waveforms",
    "mel": "Speech, spectrograms",
    "image and text": "Images and text",
    "features": "Models without a head",
    "": "Models of unknown inputs",
}


def write_page(file: Path, shares: list[ServedPart], cells: list[Cell]) -> None:
    """Write the page."""
    notes = _Notes()
    counts = Counter(cell.verdict for cell in cells)
    summary = ", ".join(f"{counts[verdict]} are {verdict}" for verdict in VERDICTS)
    head = _HEAD.format(computed=FP32.computed, trained=FP32.trained, cells=len(cells), summary=summary)
    lines = head.splitlines()
    for reads, title in _READS.items():
        chosen = [share for share in shares if share.reads == reads and split_name(share.model)[1] is None]
        if chosen:
            lines += [f"## {title}", "", *_table(chosen, cells, list(BROAD), notes), ""]
    for format_ in dict.fromkeys(split_name(share.model)[1] for share in shares):
        if format_ is not None:
            chosen = [share for share in shares if split_name(share.model)[1] == format_]
            limits = _limits(chosen[0].model)
            lines += [
                f"## In {format_}",
                "",
                limits,
                "",
                *_table(chosen, cells, list(BROAD), notes),
                "",
            ]
    deep = [share for share in shares if any(c.model == share.model and c.method not in BROAD for c in cells)]
    if deep:
        methods = list(dict.fromkeys(cell.method for cell in cells))
        lines += ["## PEFT methods", "", f"| method | {' | '.join(share.model for share in deep)} |"]
        lines.append("| --- |" + " --- |" * len(deep))
        for method in methods:
            row = [_text([c for c in cells if (c.model, c.method) == (share.model, method)], notes) for share in deep]
            lines.append(f"| {method} | {' | '.join(row)} |")
        lines.append("")
    lines += ["## Notes", "", *notes.lines(), ""]
    write_text(file, "\n".join(lines))


def _limits(name: str) -> str:
    limits = limits_of(name)
    tokens = "tokens are the same" if limits.tokens else "tokens are not compared"
    return (
        f"Logits, gradients and losses within {limits.computed:g} of the largest number, what training changes within "
        f"{limits.trained:g} of the change; {tokens}.{limits.note and ' ' + limits.note}"
    )


class _Notes:
    """Texts with numbers, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers) + 1)

    def lines(self) -> list[str]:
        return [f"{number}. {text}" for text, number in self._numbers.items()]


def _table(shares: list[ServedPart], cells: list[Cell], methods: list[str], notes: _Notes) -> list[str]:
    rows = [f"| model | served | {' | '.join(methods)} |", "| --- | --- |" + " --- |" * len(methods)]
    for share in shares:
        served = f"{share.served:.0%}"
        if share.served < LEAST_SERVED:
            served += f" ({notes.number('not served: ' + '; '.join(share.unserved))})"
        row = [_text([c for c in cells if (c.model, c.method) == (share.model, method)], notes) for method in methods]
        rows.append(f"| {split_name(share.model)[0]} | {served} | {' | '.join(row)} |")
    return rows


def _text(cells: list[Cell], notes: _Notes) -> str:
    """Return the results of one model with one method, over all transports."""
    texts = []
    for cell in cells:
        text = _SIGNS.get(cell.verdict, f"**{cell.verdict}**")
        texts.append(text if cell.verdict == EQUAL else f"{text} ({notes.number(cell.detail)})")
    return "; ".join(dict.fromkeys(texts))
