"""Benchmarks against plain transformers + PEFT, and the command ``simulate``.

It may import every package except :mod:`symbiosis.cli`. Start reading at :mod:`symbiosis.bench.commands`.
"""
