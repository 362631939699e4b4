"""The audit plays an honest-but-curious provider against a tenant's traffic, under each privacy scheme.

A tenant with an adapter generates and fine-tunes on a small base model in this process, while a wiretap records what
the executor receives. Every attack is then made on the recorded traffic, with the public weights at hand, and on random
traffic, which shows how well an attack does where there is nothing to find. Start reading at
:func:`symbiosis.privacy.audit.run.audit`.
"""
