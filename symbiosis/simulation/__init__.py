"""A discrete-event simulator around the scheduler and the policies that the executor runs.

It shows what clients would see of a policy, without a model. It may import ``core``, ``policies`` and ``errors``. Start
reading at :class:`Simulation`.
"""

from symbiosis.simulation.clients import Done, finetune, generate
from symbiosis.simulation.simulation import Cost, Simulation

__all__ = ["Cost", "Done", "Simulation", "finetune", "generate"]
