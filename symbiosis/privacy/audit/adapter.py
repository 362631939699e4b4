"""Attacks on the adapter: ΔW of each ``up_proj``.

The input of ``down_proj`` is h = silu(gate·x) ⊙ (W + ΔW)·x, in which only ΔW is unknown to the provider.

Legend: n rows; i in_features; o out_features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch.nn import functional as F

from symbiosis.privacy.audit.evidence import Estimate, Estimates, Evidence, Place
from symbiosis.privacy.audit.goals import NOT_APPLICABLE, Score, Truth, main_place
from symbiosis.privacy.audit.public import Public

__all__ = ["adapter_from_known_text", "adapter_from_moments", "adapter_from_rows", "solve_adapter"]


def adapter_from_rows(estimates: Estimates, truth: Truth, public: Public, stage: int, rank: int) -> Score:
    """Score ΔW by least squares of estimated rows x and h."""
    found = {}
    for layer in truth.adapter:
        places = main_place(truth, layer), main_place(truth, public.sibling(layer, "down_proj"))
        if any(place not in estimates for place in places):
            return NOT_APPLICABLE
        x, h = (_of_stage(truth, place, estimates[place], stage) for place in places)
        gate = public.weight(public.sibling(layer, "gate_proj"))
        found[layer] = solve_adapter(x, h, gate, public.weight(layer), rank)
    return _score(found, truth)


def adapter_from_moments(evidence: Evidence, truth: Truth, public: Public, stage: int, rank: int) -> Score:
    """Score ΔW from mean products of masked rows, in which independent masks cancel.

    E[h_o·x] = E[s_o·x·xᵀ]·(w_o + δ_o); the provider takes the mean on the right from its own text.
    """
    found = {}
    for layer in truth.adapter:
        x, h = (
            _of_stage(truth, place, Estimate(evidence[place].rows, torch.arange(len(evidence[place].rows))), stage)
            for place in (main_place(truth, layer), main_place(truth, public.sibling(layer, "down_proj")))
        )
        own = public.inputs[layer].double()
        s = _gates(own, public.weight(public.sibling(layer, "gate_proj")))
        normal = _weighted_products(s, own) / len(own)
        right = h.T @ x / len(x)
        # s has both signs, so the matrix may be nearly singular: the equation is solved with a ridge.
        ridge = 1e-3 * normal.square().sum((1, 2)) / normal.shape[1]
        square = normal @ normal + ridge[:, None, None] * torch.eye(normal.shape[1], dtype=torch.float64)
        weight = torch.linalg.solve(square, (normal @ right[:, :, None]))[:, :, 0]
        found[layer] = _truncate(weight - public.weight(layer).double(), rank)
    return _score(found, truth)


def adapter_from_known_text(
    evidence: Evidence,
    estimates: Estimates,
    truth: Truth,
    public: Public,
    stage: int,
    operations: Iterable[int],
    rank: int,
) -> Score:
    """Read the tokens off estimated rows, then score ΔW block by block.

    With the text known, the base model gives x of the first block exactly, so only the noise in h is left. Its known
    directions are projected out. With ΔW of that block in place, the model gives x of the next block.
    """
    place = main_place(truth, public.layer("q_proj"))
    rows, index = estimates[place]
    tokens = public.token_likeness(rows).argmax(1)
    sequences = [tokens[truth.operation[place][index] == number] for number in operations]
    text = torch.stack([sequence for sequence in sequences if len(sequence) == max(map(len, sequences))])
    tenant = Public(copy.deepcopy(public.model), public.layers, text)
    found = {}
    for layer in truth.adapter:
        x = tenant.run(text)[layer].double()
        down = main_place(truth, public.sibling(layer, "down_proj"))
        h = evidence[down].rows[truth.stage[down] == stage].double()
        if h.shape[0] != x.shape[0]:
            return NOT_APPLICABLE
        gate = public.weight(public.sibling(layer, "gate_proj"))
        found[layer] = solve_adapter(x, h, gate, public.weight(layer), rank, evidence[down].noise.double())
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
    s = _gates(x, gate)
    remainder = h - s * (x @ up.double().T)
    normal = _weighted_products(s.square(), x)
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


def _gates(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ gate.double().T)


def _weighted_products(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return [o, i, i]: Σ_n weights[n, o]·x[n]·x[n]ᵀ, one output feature at a time to limit memory."""
    return torch.stack([(x * weights[:, o, None]).T @ x for o in range(weights.shape[1])])


def _truncate(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the best approximation of a rank, in which most of the noise is cut off."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found: torch.Tensor = (left[:, :rank] * values[:rank]) @ right[:rank]
    return found


def _of_stage(truth: Truth, place: Place, estimate: Estimate, stage: int) -> torch.Tensor:
    return estimate.rows[truth.stage[place][estimate.which] == stage].double()


def _score(found: dict[int, torch.Tensor], truth: Truth) -> Score:
    """Score the ΔW of all layers as one vector. Elements that are not finite count as zero."""
    vector = torch.cat([delta.flatten() for delta in found.values()]).nan_to_num(0.0, 0.0, 0.0)
    true = torch.cat([truth.adapter[layer].double().flatten() for layer in found])
    cosine = F.cosine_similarity(vector, true, dim=0).item()
    return Score(cosine, cosine**2 if cosine > 0 else 0.0, ((vector - true).norm() / true.norm()).item())
