"""The commands of ``symbiosis``.

It may import every package, but no internals of executor, clients and transports; from :mod:`symbiosis.bench` it
imports commands only. Start reading at
:mod:`symbiosis.cli.commands`.
"""
