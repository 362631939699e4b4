"""The commands of ``symbiosis``.

It may import every package; from :mod:`symbiosis.bench` it imports commands only. Start reading at
:mod:`symbiosis.cli.commands`.
"""
