"""Carries calls and the model's share between clients and executors: one module set for each address scheme.

A transport moves tensors and messages and builds no model. This package imports ``symbiosis.core``,
``symbiosis.errors``, ``symbiosis.log`` and ``symbiosis.process_groups``, and nothing else of the project.

Start reading with ``wire.py`` (the messages), then ``conversation.py`` (the client's side of them) and ``peer.py`` (the
executor's side). ``channel.py`` and ``blocking.py`` drive the client's side; ``shm.py``, ``tcp.py`` and ``dist.py``
lead to the parts of one scheme; ``inproc.py`` stands alone.
"""
