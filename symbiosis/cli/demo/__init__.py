"""``symbiosis demo``: four tenants on one base model, checked against plain transformers + PEFT.

Start reading at :mod:`symbiosis.cli.demo.command`.
"""
