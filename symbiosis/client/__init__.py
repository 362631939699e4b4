"""The tenant: a client's part of the model, and everything that it does with it.

It may import :mod:`symbiosis.core`, :mod:`symbiosis.training` and :mod:`symbiosis.modes`; transports come from the
registry. Start reading at :mod:`symbiosis.client.client`, then :mod:`symbiosis.client.virtlayer`.
"""
