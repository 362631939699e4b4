"""Training steps of any model: their order of passes, windows of tokens, and pruned activations.

It may import :mod:`symbiosis.errors`. Start reading at :mod:`symbiosis.training.step`.
"""
