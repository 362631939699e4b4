"""The provider: serves the base layers of one model to any number of clients.

It may import :mod:`symbiosis.core`, :mod:`symbiosis.modes`, :mod:`symbiosis.process_groups`, :mod:`symbiosis.log` and
:mod:`symbiosis.errors`. Start reading at :mod:`symbiosis.executor.engine`.
"""
