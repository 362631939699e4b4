"""The tenant: a client's part of the model, and everything that it does with it.

It may import :mod:`symbiosis.core`, :mod:`symbiosis.training`, :mod:`symbiosis.modes` and :mod:`symbiosis.errors`;
transports come from the registry. Start reading at :mod:`symbiosis.client.client`, then
:mod:`symbiosis.client.virtlayer`.
"""
