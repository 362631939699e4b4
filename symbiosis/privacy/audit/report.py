"""Reports of an audit: tables in Markdown, data for JSON, and a figure."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from symbiosis.errors import UsageError
from symbiosis.privacy.audit.limit import Limit
from symbiosis.privacy.audit.provider import ATTACKS, GOALS
from symbiosis.privacy.audit.result import Audit, Observation
from symbiosis.privacy.audit.scores import Score
from symbiosis.terminal.console import write_text

BEGIN, END = "<!-- audit: begin -->", "<!-- audit: end -->"
"""Lines of a page between which :func:`write_into` puts the tables."""
NOTHING = "–"
NO_POWER = "no power"
"""Entry of an attack that could not have found anything."""


def best(observation: Observation, goal: str) -> tuple[str, Score] | None:
    """Return the attack that recovered the most towards a goal and its score, or None without a find."""
    finds = [
        (attack, scores[goal]) for attack, scores in observation.scores.items() if goal in observation.found[attack]
    ]
    return max(finds, key=lambda item: (item[1].recovered, item[1].cosine), default=None)


def verdict(audit: Audit, scheme: str) -> str:
    """Return in words what the audit shows about a scheme."""
    holds = audit.holds(scheme)
    if holds is False:
        return "does not hold"
    nothing = "no attack got more from it than from random traffic"
    if holds is None:
        goals = ", ".join(goal for goal in GOALS if goal in audit.missed)
        return f"{nothing}, but this shows nothing of {goals}: nor did one get more from bare rows (try more prompts)"
    return nothing


def summary(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table: the best attack of each observation for each goal, and its least error."""
    rows = []
    for observation in audit.observations:
        cells = []
        for goal in GOALS:
            top = best(observation, goal)
            nothing = NO_POWER if goal in audit.missed else NOTHING
            cells.append(nothing if top is None else f"{_cell(top[1])} {top[0]}")
        error = min(scores["activations"].error for scores in observation.scores.values() if "activations" in scores)
        rows.append([observation.name, *cells, f"{error:.1e}" if error < 0.01 else f"{error:.2f}"])
    return ["scheme", *GOALS, "error"], rows


def cost_table(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of a table of costs relative to bare rows."""
    rows = []
    for scheme, cost in audit.costs.items():
        ratios = (NOTHING if math.isnan(each) else f"{each:.2f}×" for each in (cost.decode, cost.train, cost.traffic))
        rows.append([scheme, *ratios, f"{cost.logits:.1e}", f"{cost.gradients:.1e}"])
    return ["scheme", "decode", "training", "traffic", "logits", "gradients ±"], rows


def _cell(score: Score) -> str:
    return f"{score.cosine:.3f} ({_percent(score.recovered)})"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.005 or part == 0 else f"{100 * part:.1f} %"


def markdown(audit: Audit) -> str:
    """Return all tables in Markdown: the summary, the costs, and attacks by scheme for each goal."""
    lines = [
        *_table(*summary(audit)),
        "",
        *_paragraph(
            "Cosine with the truth, and in brackets the recovered fraction, of the attack that recovered the most. "
            f"{NOTHING}: no attack got more than from random traffic. {NO_POWER}: the attacks find nothing in bare "
            "rows either. *error*: of all attacks, the smallest median relative error of a row; guessing the public "
            f"model's mean gives {audit.random_error:.2f}."
        ),
        "",
        *_table(*cost_table(audit)),
        "",
        *_paragraph(
            f"Costs are relative to bare rows, in one process, with a model of width {audit.plan.hidden}, on which "
            "masking weighs most. Errors are relative to the largest logit or gradient of the adapter."
        ),
    ]
    for goal, what in GOALS.items():
        attacks = [name for name in ATTACKS if any(goal in each.scores.get(name, {}) for each in audit.observations)]
        body = [[each.name, *(_marked(audit, each, name, goal) for name in attacks)] for each in audit.observations]
        choices = any(scores[goal].choices for scores in audit.bare.scores.values() if goal in scores)
        limits = (_limit(audit.limit(name, goal), choices) for name in attacks)
        body.append(["*random traffic stays below*", *(f"*{limit}*" for limit in limits)])
        lines += ["", f"**{goal}**: {what}. Bold: better than on random traffic.", ""]
        lines += _table(["scheme", *attacks], body)
    lines += ["", "Attacks:", "", *(f"- *{name}* {what}." for name, what in ATTACKS.items())]
    lines += ["", *_paragraph("Schemes with their options: " + "; ".join(audit.schemes.values()) + ".")]
    lines += ["", f"Random traffic: {audit.sets} sets. One table in a hundred would have a false find."]
    return "\n".join(lines) + "\n"


def _marked(audit: Audit, observation: Observation, attack: str, goal: str) -> str:
    score = observation.scores.get(attack, {}).get(goal)
    if score is None:
        return ""
    if goal in observation.found[attack]:
        return f"**{_cell(score)}**"
    return _cell(score) if audit.limit(attack, goal).has_power(score) else NO_POWER


def _limit(limit: Limit, choices: bool) -> str:
    texts = [f"{limit.cosine:.3f}" if limit.cosine < 1 else NO_POWER]
    if choices:
        texts.append(f"({_percent(limit.recovered) if limit.recovered < 1 else NO_POWER})")
    return " ".join(texts)


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(headings: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in (headings, *rows)]
    return [lines[0], "|" + " --- |" * len(headings), *lines[1:]]


def write_into(page: Path, audit: Audit) -> None:
    """Put the tables into a page, between its two marks. Raises the error of :func:`split_page`."""
    head, tail = split_page(page)
    write_text(page, f"{head}{BEGIN}\n\n{markdown(audit)}\n{END}{tail}")


def split_page(page: Path) -> tuple[str, str]:
    """Return the text of a page before and after the place for the tables.

    Raises:
        UsageError: the page has no such place, or cannot be read.
    """
    try:
        document = page.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{page} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{page} cannot be read: {error}") from error
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"{page} has no place for the tables; add the lines {BEGIN} and {END}")
    return head, tail


def as_data(audit: Audit) -> dict[str, Any]:
    """Return the whole result as plain data. Times that were not measured are NaN."""
    return {
        "plan": asdict(audit.plan),
        "random_traffic": {
            "sets": audit.sets,
            "probability": audit.probability,
            "limits": {
                attack: {goal: limit.cosine for goal, limit in goals.items()} for attack, goals in audit.limits.items()
            },
            "error": audit.random_error,
        },
        "missed_in_bare_rows": sorted(audit.missed),
        "observations": [
            {
                "scheme": each.scheme,
                "options": audit.schemes[each.scheme],
                "executor": each.executor,
                "collusion": each.collusion,
                "attacks": {
                    attack: {
                        goal: {**score._asdict(), "found": goal in each.found[attack]} for goal, score in scores.items()
                    }
                    for attack, scores in each.scores.items()
                },
            }
            for each in audit.observations
        ],
        "costs": {scheme: asdict(costs) for scheme, costs in audit.costs.items()},
        "holds": {scheme: audit.holds(scheme) for scheme in audit.costs},
    }


def plot(file: Path, audit: Audit) -> None:
    """Draw the cosine of the best attack for each scheme and goal."""
    from matplotlib.figure import Figure

    names = [observation.name for observation in audit.observations]
    tops = [[best(observation, goal) for goal in GOALS] for observation in audit.observations]
    figure = Figure(figsize=(8, 0.5 * len(names) + 1.5), layout="constrained")
    axes = figure.subplots()
    cosines = [[0.0 if top is None else max(top[1].cosine, 0.0) for top in row] for row in tops]
    axes.imshow(cosines, vmin=0, vmax=1, cmap="Reds", aspect="auto")
    for y, row in enumerate(tops):
        for x, top in enumerate(row):
            label = NOTHING if top is None else f"{top[1].cosine:.2f}\n{top[0]}"
            color = "white" if cosines[y][x] > 0.6 else "black"
            axes.text(x, y, label, ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks(range(len(GOALS)), list(GOALS))
    axes.set_yticks(range(len(names)), names)
    axes.set_title("cosine of the best attack that found more than in random traffic", fontsize=9)
    figure.savefig(file, dpi=120)
