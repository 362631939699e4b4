"""The file of ``cluster up``: what it means, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from symbiosis.cli.cluster_config import read_plan
from symbiosis.cluster.plan import ClusterPlan, Model
from symbiosis.errors import SymbiosisError

GOOD = """
directory = "0.0.0.0:7071"
keys = "/etc/keys"
policy = "fair+opportunistic"

[limits]
calls = 8

[[model]]
name = "llama"
model = "/srv/llama"
replicas = 2
num-cpus = 4
num-gpus = 1
memory = 1_000_000
nodes = { pool = "a" }
parts = ["0-15", "16-31,lm_head"]
packed = false
keep-weights = true

[[model]]
name = "gpt2"
model = "openai/gpt2"
policy = "no-lockstep"
shards = 2
allow-weights = ["lm_head", "wte"]
"""


def plan_of(folder: Path, text: str) -> ClusterPlan:
    file = folder / "cluster.toml"
    file.write_text(text)
    return read_plan(file)


def test_a_file_becomes_arguments_of_serve(tmp_path: Path) -> None:
    llama, gpt2 = (plan := plan_of(tmp_path, GOOD)).models
    assert (plan.host, plan.port) == ("0.0.0.0", 7071)
    assert llama == Model(
        "llama",
        (
            "/srv/llama",
            "--keys=/etc/keys",
            "--policy=fair+opportunistic",
            "--limit=calls=8",
            "--name=llama",
            "--no-packed",
            "--keep-weights",
        ),
        ("0-15", "16-31,lm_head"),
        2,
        {"CPU": 4.0, "GPU": 1.0, "memory": 1e6},
        {"pool": "a"},
    )
    assert llama.command(1)[-2:] == ["--layers", "16-31,lm_head"]
    assert gpt2.resources == {"CPU": 1.0}
    assert gpt2.command(0)[-4:] == ["--name=gpt2", "--shards=2", "--allow-weights=lm_head", "--allow-weights=wte"]
    assert "--policy=no-lockstep" in gpt2.arguments


def test_flags_as_texts_mean_what_they_say(tmp_path: Path) -> None:
    (model,) = plan_of(tmp_path, MODEL + 'keep-weights = "true"\npacked = "off"').models
    assert model.arguments[-2:] == ("--keep-weights", "--no-packed")


MODEL = '[[model]]\nname = "a"\nmodel = "b"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", r"give each model a table \[\[model\]\]"),
        ('model = "llama"', "give each model a table"),
        ("[[model", "cluster.toml: "),
        (MODEL + "replica = 2", "model 1: unknown key 'replica'; did you mean replicas?"),
        (MODEL + 'listen = ["tcp://a:1"]', "unknown key 'listen'"),
        (MODEL + 'layers = "0"', "unknown key 'layers'"),
        (MODEL + "replicas = 0", "replicas is 0; give a whole number from 1 on"),
        (MODEL + "replicas = true", "replicas is True"),
        (MODEL + "num-gpus = -1", "num-gpus is -1; give a number"),
        (MODEL + "num-cpus = 0", "num-cpus is 0; give a number above 0"),
        (MODEL + 'parts = "0-15"', "parts is '0-15'; give a list"),
        (MODEL + 'nodes = "a"', "nodes is 'a'; give a table of labels"),
        (MODEL + "max-rows = 0", "model 1: .*max-rows.*greater than or equal to 1"),
        (MODEL + 'max-rows = "many"', "model 1: .*max-rows.*valid integer"),
        (MODEL + 'packed = "sure"', "model 1: .*packed.*valid boolean"),
        (MODEL + 'policy = "nothing"', "unknown policy 'nothing'"),
        (MODEL + "[model.limits]\ncall = 1", "limit 'call=1'"),
        (MODEL + "keys = { a = 1 }", "keys is a table; give a value"),
        (MODEL + MODEL, "two models are called a"),
        ('[[model]]\nmodel = "b"', "give model, a folder or hub id, and name"),
        ('[[model]]\nname = "a/b"\nmodel = "b"', "of up to 64 of the characters"),
        ('directory = "7070"\n' + MODEL, "directory is '7070'; write HOST:PORT"),
        ('directory = "a:0"\n' + MODEL, "directory is 'a:0'; write HOST:PORT"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(SymbiosisError, match=why):
        plan_of(tmp_path, text)
