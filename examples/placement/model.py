"""Save a small Llama with random weights: ``python examples/placement/model.py FOLDER``."""

from __future__ import annotations

import sys

from symbiosis.testing import tiny_model

if len(sys.argv) != 2:
    sys.exit("usage: python examples/placement/model.py FOLDER")
tiny_model("llama", hidden_size=256, intermediate_size=512).save_pretrained(sys.argv[1])
print(f"saved a Llama with 2 blocks in {sys.argv[1]}")
