"""The provider: serves the base layers of one model to any number of clients.

It may import :mod:`symbiosis.core` and :mod:`symbiosis.modes`. Start reading at :mod:`symbiosis.executor.engine`.
"""
