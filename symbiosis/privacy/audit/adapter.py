"""Attacks on the adapter: ΔW of each ``up_proj``.

The input of ``down_proj`` is h = silu(gate·x) ⊙ (W + ΔW)·x, in which only ΔW is unknown to the provider.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch.nn import functional as F

from symbiosis.privacy.audit.evidence import Estimates, Evidence
from symbiosis.privacy.audit.public import Public
from symbiosis.privacy.audit.scores import Score
from symbiosis.privacy.audit.workload import Truth


def adapter_from_rows(estimates: Estimates, truth: Truth, public: Public) -> Score:
    """Score ΔW by least squares of estimated rows x and h."""
    found = {}
    for layer in truth.adapter:
        places = truth.main_place(layer), truth.main_place(public.sibling(layer, "down_proj"))
        x, h = (torch.cat(truth.generated(place, estimates[place])).double() for place in places)
        gate = public.weight(public.sibling(layer, "gate_proj"))
        found[layer] = solve_adapter(x, h, gate, public.weight(layer), truth.rank)
    return _score(found, truth)


def adapter_from_known_text(evidence: Evidence, estimates: Estimates, truth: Truth, public: Public) -> Score:
    """Read the tokens off estimated rows, then score ΔW block by block.

    With the text known, the base model gives x of the first block exactly, so only the noise in h is left. Its known
    directions are projected out. With ΔW of that block in place, the model gives x of the next block.
    """
    place = truth.main_place(public.layer("q_proj"))
    tokens = public.token_likeness(estimates[place]).argmax(1)
    text = torch.stack(truth.generated(place, tokens))
    tenant = Public(copy.deepcopy(public.model), public.layers, text)
    found = {}
    for layer in truth.adapter:
        x = tenant.run(text)[layer].double()
        down = truth.main_place(public.sibling(layer, "down_proj"))
        h = torch.cat(truth.generated(down, evidence[down].rows)).double()
        gate = public.weight(public.sibling(layer, "gate_proj"))
        found[layer] = solve_adapter(x, h, gate, public.weight(layer), truth.rank, evidence[down].noise.double())
        with torch.no_grad():
            tenant.weight(layer).add_(found[layer].float())
    return _score(found, truth)


def solve_adapter(
    x: torch.Tensor,
    h: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    rank: int,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ΔW [o, i] of a rank from x [n, i], h [n, o] and the base weights.

    It minimizes ‖P(h − s ⊙ x·(W + ΔW)ᵀ)‖ with s = silu(gate·x), where P projects out the span of ``noise`` [m, o]. The
    quotient h/s is never formed, so that rows with a small s count little.
    """
    s = F.silu(x @ gate.double().T)
    remainder = h - s * (x @ up.double().T)
    normal = torch.stack([(x * column[:, None]).T @ x for column in s.square().T])  # [o, i, i]
    ridge = 1e-9 * torch.diagonal(normal, dim1=1, dim2=2).mean(1).clamp_min(1e-30)
    normal += ridge[:, None, None] * torch.eye(x.shape[1], dtype=x.dtype)  # zero in directions that no row has
    factors, pivots, _ = torch.linalg.lu_factor_ex(normal)

    def solve(gradient: torch.Tensor) -> torch.Tensor:
        solution: torch.Tensor = torch.linalg.lu_solve(factors, pivots, gradient[:, :, None])[:, :, 0]
        return solution

    if noise is None or not 0 < len(noise) < h.shape[1]:
        delta = solve((s * remainder).T @ x) * (s != 0).any(0)[:, None]
        return _truncate(delta, rank)
    basis: torch.Tensor = torch.linalg.qr(noise.T)[0]

    def project(rows: torch.Tensor) -> torch.Tensor:
        return rows - (rows @ basis) @ basis.T

    def image(delta: torch.Tensor) -> torch.Tensor:
        return (s * project(s * (x @ delta.T))).T @ x

    return _truncate(_conjugate_gradients(image, solve, (s * project(remainder)).T @ x), rank)


def _conjugate_gradients(
    image: Callable[[torch.Tensor], torch.Tensor],
    precondition: Callable[[torch.Tensor], torch.Tensor],
    residual: torch.Tensor,
) -> torch.Tensor:
    """Return the solution of ``image(solution) = residual``, for all output features together."""
    solution = torch.zeros_like(residual)
    direction = precondition(residual)
    old = (residual * direction).sum()
    for _ in range(60):
        change = image(direction)
        step = old / (direction * change).sum().clamp_min(1e-300)
        solution = solution + step * direction
        residual = residual - step * change
        preconditioned = precondition(residual)
        new = (residual * preconditioned).sum()
        if new <= 1e-24 * old or new <= 1e-30:
            break
        direction = preconditioned + new / old * direction
        old = new
    return solution


def _truncate(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the best approximation of a rank, in which most of the noise is cut off.

    Elements that are not finite count as zero: with too few rows, the least squares may have no solution.
    """
    left, values, right = torch.linalg.svd(matrix.nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
    found: torch.Tensor = (left[:, :rank] * values[:rank]) @ right[:rank]
    return found


def _score(found: dict[int, torch.Tensor], truth: Truth) -> Score:
    """Score the ΔW of all layers as one vector."""
    vector = torch.cat([delta.flatten() for delta in found.values()])
    true = torch.cat([truth.adapter[layer].double().flatten() for layer in found])
    cosine = F.cosine_similarity(vector, true, dim=0).item()
    return Score(cosine, cosine**2 if cosine > 0 else 0.0, ((vector - true).norm() / true.norm()).item())
