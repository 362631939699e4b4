"""Executors on several machines, which Ray places, watches and starts again; fine-tuning as jobs of Ray.

An executor is a process of ``symbiosis serve`` that an actor of Ray starts (:mod:`~symbiosis.cluster.executor`). Another
actor keeps the list of their addresses, and serves it over HTTP to tenants, who need no Ray
(:mod:`~symbiosis.cluster.directory`). May import ``core``, ``terminal`` and ``errors``; ``ray`` is imported here alone,
and needs the extra ``symbiosis-peft[ray]``. Start reading at :mod:`~symbiosis.cluster.manage`.
"""
