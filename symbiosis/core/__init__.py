"""Vocabulary and decisions: requests, terms, queues, scheduler, and the interfaces of policies, transports and privacy.

It has no ``nn.Module``, no I/O and no clock, and may import :mod:`symbiosis.errors` alone. Start reading at
:mod:`symbiosis.core.requests`, then :mod:`symbiosis.core.scheduler`.
"""
