"""Executors on several machines, which Ray places, watches and starts again; fine-tuning as jobs of Ray.

An actor of Ray starts ``symbiosis serve`` for each executor (:mod:`~symbiosis.cluster.executor`). Another actor keeps
the list of their addresses, and serves it over HTTP to tenants, who need no Ray (:mod:`~symbiosis.cluster.directory`).
``ray`` is imported in this package only, and needs the extra ``symbiosis-peft[ray]``. Start
reading at :mod:`~symbiosis.cluster.manage`.
"""
