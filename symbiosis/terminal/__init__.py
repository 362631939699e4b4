"""What all commands share: consoles, output files, the event loop, and the machine's description.

It may import :mod:`symbiosis.errors` alone. Start reading at :mod:`symbiosis.terminal.console`.
"""
