"""Runs every script of this folder, and prints a table of the results: ``make ecosystem``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

SCRIPTS = ("trl_trainers", "accelerate_states", "lightning_fit", "lm_eval_tasks", "sentence_embeddings", "ddp")


def main() -> int:
    """Run the scripts, and return the number of those that failed."""
    table = Table("software", "job", "largest differences from the plain run", "seconds")
    failed = 0
    for script in SCRIPTS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as output:
            environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            done = subprocess.run(
                [sys.executable, "-m", f"tests.ecosystem.{script}"],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **environment, "HF_HOME": cache},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=600,
            )
            output.seek(0)
            lines = output.read().splitlines()
        for row in (json.loads(line) for line in lines if line.startswith('{"software"')):
            differences = ", ".join(f"{name} {value:.1g}" for name, value in row["differences"].items())
            table.add_row(row["software"], row["job"], differences, "")
        seconds = f"{time.monotonic() - started:.0f}"
        table.add_row(script, "all", "FAILED" if done.returncode else "within the tolerance", seconds, end_section=True)
        if done.returncode:
            failed += 1
            print("\n".join(lines))
    Console(width=120).print(table)
    return failed


if __name__ == "__main__":
    sys.exit(main())
