"""A discrete-event simulator around the very same scheduler and policies that the executor runs."""

from symbiosis.simulation.clients import Done, finetune, generate
from symbiosis.simulation.engine import Cost, Simulation

__all__ = ["Cost", "Done", "Simulation", "finetune", "generate"]
