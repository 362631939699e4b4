"""Vocabulary and decisions: requests, terms, queues, scheduler, and the interfaces of policies, transports and privacy.

It calls no ``nn.Module``, has no I/O and no clock, and imports :mod:`symbiosis.errors` alone; the registry finds
policies, transports and privacy schemes by name. Start reading at :mod:`symbiosis.core.requests`, then
:mod:`symbiosis.core.scheduler`.
"""
