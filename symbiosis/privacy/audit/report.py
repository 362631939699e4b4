"""What the audit found, for people and for programs."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from symbiosis.errors import UsageError
from symbiosis.privacy.audit.goals import Score
from symbiosis.privacy.audit.provider import ATTACKS, GOALS
from symbiosis.privacy.audit.run import Audit, View
from symbiosis.privacy.audit.verdict import Limit

__all__ = ["BEGIN", "END", "around", "as_data", "best", "markdown", "plot", "summary", "verdict", "write_into"]

BEGIN, END = "<!-- audit: begin -->", "<!-- audit: end -->"
"""Between these lines of a document, :func:`write_into` puts the tables."""

COSTS = ("decode", "training", "traffic", "logits", "gradients ±")
"""Columns of the summary after those of what was found."""

NOTHING = "–"
NO_POWER = "no power"
"""Where an attack, or all of them, could not have found anything."""


def best(view: View, goal: str) -> tuple[str, Score] | None:
    """The attack that got the most towards a goal, of those that did better than on random traffic."""
    found = [(attack, scores[goal]) for attack, scores in view.scores.items() if goal in view.found[attack]]
    return max(found, key=lambda item: (item[1].recovered, item[1].cosine), default=None)


def verdict(audit: Audit, scheme: str) -> str:
    """What comes of it for one scheme, in words."""
    holds = audit.holds(scheme)
    if holds is None:
        return "this shows nothing: no attack finds the adapter even in bare rows (try more prompts)"
    return "no attack got more from it than from random traffic" if holds else "does not hold"


def summary(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Headings and rows: of each view, the best attack for each goal, and the least error of activations; and what the
    scheme costs."""
    headings = ["scheme", *GOALS, "error", *COSTS]
    rows = []
    for view in audit.views:
        cells = []
        for goal in GOALS:
            top = best(view, goal)
            nothing = NO_POWER if goal in audit.missed else NOTHING
            cells.append(nothing if top is None else f"{_cell(top[1])} {top[0]}")
        errors = [scores["activations"].error for scores in view.scores.values() if "activations" in scores]
        cells.append(f"{min(errors):.1e}" if min(errors) < 0.01 else f"{min(errors):.2f}")
        cost = audit.costs[view.scheme]
        costs = [f"{_text(cost.decode)}×", f"{_text(cost.train)}×", f"{_text(cost.traffic)}×"]
        costs += [f"{cost.logits:.1e}", f"{cost.gradients:.1e}"]
        rows.append([view.name, *cells, *costs])
    return headings, rows


def _cell(score: Score) -> str:
    return f"{score.cosine:.3f} ({_percent(score.recovered)})"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.005 or part == 0 else f"{100 * part:.1f} %"


def _text(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.2f}"


def markdown(audit: Audit) -> str:
    """The summary, and a table scheme × attack for each goal. Bold: better than on random traffic."""
    headings, rows = summary(audit)
    lines = _table(headings, rows)
    lines += [
        "",
        f"Cosine, and in brackets what was recovered, by the attack that got the most; {NOTHING}: no attack got more "
        f"than from random traffic; {NO_POWER}: nor from bare rows. *error*: the least median relative error of a "
        f"row that any attack came to (on random traffic, by the public model's mean: {audit.guess:.2f}). Costs are "
        f"beside bare rows, in one process, model of width {audit.plan.hidden}, where masking weighs most; errors "
        "are relative to the largest logit, or gradient of the adapter.",
    ]
    for goal, what in GOALS.items():
        attacks = [name for name in ATTACKS if any(goal in view.scores.get(name, {}) for view in audit.views)]
        lines += ["", f"**{goal}**: {what}", ""]
        body = [[view.name, *(_marked(audit, view, attack, goal) for attack in attacks)] for view in audit.views]
        choice = any(scores[goal].choices for scores in audit.bare.scores.values() if goal in scores)
        limits = [_limit(audit.limit(attack, goal), choice) for attack in attacks]
        body.append(["*random traffic stays below*", *(f"*{limit}*" for limit in limits)])
        lines += _table(["scheme", *attacks], body)
    lines += ["", "Attacks:", "", *(f"- *{name}*: {what}." for name, what in ATTACKS.items())]
    lines += ["", "Schemes, with all options: " + "; ".join(audit.schemes.values()) + "."]
    lines += [
        "",
        f"Random traffic: {audit.baselines} lots. One table in a hundred would have something in bold that is nothing.",
    ]
    return "\n".join(lines) + "\n"


def _marked(audit: Audit, view: View, attack: str, goal: str) -> str:
    score, limit = view.scores.get(attack, {}).get(goal), audit.limit(attack, goal)
    if score is None or limit is None:
        return ""
    if goal in view.found[attack]:
        return f"**{_cell(score)}**"
    return _cell(score) if limit.has_power(score) else NO_POWER


def _limit(limit: Limit | None, choice: bool) -> str:
    """For choices, of those that are right as well."""
    if limit is None:
        return NOTHING
    texts = [f"{limit.cosine:.3f}" if limit.cosine < 1 else NO_POWER]
    if choice:
        texts.append(f"({_percent(limit.recovered) if limit.recovered < 1 else NO_POWER})")
    return " ".join(texts)


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "| " + " | ".join(headings) + " |",
        "|" + " --- |" * len(headings),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def write_into(file: Path, audit: Audit) -> None:
    """Put the tables into a document, between its two marks. Raises what :func:`around` does."""
    head, tail = around(file)
    file.write_text(f"{head}{BEGIN}\n\n{markdown(audit)}\n{END}{tail}")


def around(file: Path) -> tuple[str, str]:
    """What a document has before and after the place for the tables.

    Raises:
        UsageError: it has no such place, or cannot be read.
    """
    try:
        document = file.read_text()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"{file} has no place for the tables: lines {BEGIN} and {END}")
    return head, tail


def as_data(audit: Audit) -> dict[str, Any]:
    """Everything, as plain data for JSON; what was not measured is None."""
    views = [
        {
            "scheme": view.scheme,
            "options": audit.schemes[view.scheme],
            "view": view.who,
            "control": view.control,
            "attacks": {
                attack: {
                    goal: {**score._asdict(), "found": goal in view.found[attack]} for goal, score in scores.items()
                }
                for attack, scores in view.scores.items()
            },
            "cosine_by_repeats": view.by_repeats,
        }
        for view in audit.views
    ]
    data = {
        "plan": asdict(audit.plan),
        "random_traffic": {
            "lots": audit.baselines,
            "share": audit.share,
            "limits": {
                attack: {goal: limit.cosine for goal, limit in goals.items()} for attack, goals in audit.limits.items()
            },
            "error": audit.guess,
        },
        "missed_in_bare_rows": sorted(audit.missed),
        "views": views,
        "costs": {scheme: asdict(costs) for scheme, costs in audit.costs.items()},
        "holds": {scheme: audit.holds(scheme) for scheme in audit.costs},
    }
    plain: dict[str, Any] = _without_nan(data)
    return plain


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot(file: Path, audit: Audit) -> None:
    """What the best attack recovers, scheme × goal; and how averages come nearer over repeats of a prompt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 0.5 * len(audit.views) + 2.5), constrained_layout=True)
    names = [view.name for view in audit.views]
    tops = [[best(view, goal) for goal in GOALS] for view in audit.views]
    cosines = [[0.0 if top is None else max(top[1].cosine, 0.0) for top in row] for row in tops]
    left.imshow(cosines, vmin=0, vmax=1, cmap="Reds", aspect="auto")
    for y, row in enumerate(tops):
        for x, top in enumerate(row):
            text = NOTHING if top is None else f"{top[1].cosine:.2f}\n{top[0]}"
            dark = top is not None and top[1].cosine > 0.6
            left.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    left.set_xticks(range(len(GOALS)), list(GOALS))
    left.set_yticks(range(len(names)), names)
    left.set_title("cosine of the best attack, where it found more than in random traffic", fontsize=9)
    for view in audit.views:
        for attack, style in (("averaging", "-"), ("mid-range", ":")):
            cosines_by_repeats = view.by_repeats.get(attack)
            if cosines_by_repeats and view.scheme != "none":
                line = right.plot(
                    list(cosines_by_repeats), list(cosines_by_repeats.values()), style, marker="o", markersize=3
                )
                line[0].set_label(f"{view.name}, {attack}")
    right.axhline(0.0, color="black", linewidth=0.5)
    right.set_ylim(-0.1, 1.0)
    right.set_xscale("log", base=2)
    right.set_xlabel("requests for one prompt")
    right.set_title("cosine of its rows with the truth", fontsize=9)
    if right.lines[1:]:
        right.legend(fontsize=6)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
