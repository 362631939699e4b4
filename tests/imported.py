"""What a process of ``symbiosis serve`` imports; see :mod:`tests.service`."""

from __future__ import annotations

import tokenizers as tokenizers
import uvloop as uvloop
from transformers.models.llama import modeling_llama as modeling_llama

from symbiosis import Executor as Executor
from symbiosis.cli import commands as commands
from symbiosis.transports import shm as shm
from symbiosis.transports import tcp as tcp
from tests import service as service
