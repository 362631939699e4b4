"""Every PEFT method that a tiny Llama supports gives the numbers of plain PEFT, or is refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch

import symbiosis
from symbiosis.errors import PlaceholderError
from symbiosis.testing import Job, compare, tiny_model
from tests.helpers import CAUSAL, IDS

ON = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": CAUSAL}
TASK = {"task_type": CAUSAL}


def config(name: str, **options: Any) -> Any:
    """Return a configuration of a method, or skip the test if this version of PEFT lacks the method."""
    cls = getattr(peft, f"{name}Config", None)
    if cls is None:
        pytest.skip(f"peft {peft.__version__} has no {name}")
    return cls(**options)


AGREE: dict[str, Callable[[], Any]] = {
    "lora": lambda: config("Lora", init_lora_weights=False, **ON),
    "rslora": lambda: config("Lora", use_rslora=True, init_lora_weights=False, **ON),
    "lora-orthogonal": lambda: config("Lora", init_lora_weights="orthogonal", r=4, **ON),
    "lora-gaussian": lambda: config("Lora", init_lora_weights="gaussian", **ON),
    "lora-bias": lambda: config("Lora", init_lora_weights=False, lora_bias=True, **ON),
    "lora-replicated-layers": lambda: config("Lora", init_lora_weights=False, layer_replication=[[0, 2], [1, 2]], **ON),
    "activated-lora": lambda: config("Lora", init_lora_weights=False, alora_invocation_tokens=[5], **ON),
    "adalora": lambda: config("AdaLora", total_step=100, init_lora_weights=False, **ON),
    "vera": lambda: config("Vera", target_modules=["q_proj"], r=4, **TASK),
    "loha": lambda: config("LoHa", init_weights=False, **ON),
    "lokr": lambda: config("LoKr", init_weights=False, **ON),
    "oft": lambda: config("OFT", oft_block_size=4, init_weights=False, **ON),
    "boft": lambda: config("BOFT", boft_block_size=4, init_weights=False, **ON),
    "fourierft": lambda: config("FourierFT", n_frequency=20, init_weights=False, **ON),
    "waveft": lambda: config("WaveFT", n_frequency=20, **ON),
    "ln-tuning": lambda: config("LNTuning", **TASK),
    "prompt": lambda: config("PromptTuning", num_virtual_tokens=3, **TASK),
    "p-tuning": lambda: config("PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=16, **TASK),
    "prefix-projected": lambda: config("PrefixTuning", num_virtual_tokens=3, prefix_projection=True, **TASK),
    "adaption-prompt": lambda: config("AdaptionPrompt", adapter_len=4, adapter_layers=2, **TASK),
    "trainable-tokens": lambda: config("TrainableTokens", token_indices=[3, 4], **TASK),
    "vblora": lambda: config("VBLoRA", vector_length=4, num_vectors=16, topk=2, **ON),
    "miss": lambda: config("Miss", r=4, init_weights=False, **ON),
    "c3a": lambda: config("C3A", block_size=8, **ON),
    "randlora": lambda: config("RandLora", r=4, target_modules=["q_proj"], **TASK),
    "road": lambda: config("Road", group_size=8, **ON),
    "gralora": lambda: config("Gralora", r=8, gralora_k=2, **ON),
}

REFUSE: dict[str, Callable[[], Any]] = {
    "dora": lambda: config("Lora", use_dora=True, **ON),
    "pissa": lambda: config("Lora", init_lora_weights="pissa", **ON),
    "pissa-niter": lambda: config("Lora", init_lora_weights="pissa_niter_4", **ON),
    "olora": lambda: config("Lora", init_lora_weights="olora", **ON),
    "eva": lambda: config("Lora", init_lora_weights="eva", eva_config=peft.EvaConfig(), **ON),
    "hra": lambda: config("HRA", r=4, **ON),
    "delora": lambda: config("Delora", r=4, **ON),
    "shira": lambda: config("Shira", r=4, **ON),
    "hira": lambda: config("Hira", **ON),
    "peanut": lambda: config("Peanut", **ON),
    "osf": lambda: config("OSF", **ON),
    "psoft": lambda: config("Psoft", r=4, **ON),
    "target-parameters": lambda: config(
        "Lora", target_modules=[], target_parameters=["q_proj.weight"], init_lora_weights=False, **TASK
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("method", AGREE)
async def test_agrees_with_plain_peft(method: str) -> None:
    comparison = await compare(tiny_model(), AGREE[method](), Job(steps=3, new_tokens=4))
    assert comparison.bit_equal, comparison
    assert any(name.startswith("gradient") for name in comparison.differences)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("method", REFUSE)
async def test_a_method_that_reads_base_weights_is_refused(method: str) -> None:
    """The result is never NaN: the error names the method and the missing weights, and the executor continues."""
    wanted = REFUSE[method]()
    async with symbiosis.Executor(tiny_model()) as executor:
        client = executor.client(wanted, name="wants-weights")
        with pytest.raises(PlaceholderError, match=r"base weights|weights of") as caught:
            await client.open()
        assert len(str(caught.value)) > 60
        async with executor.client(name="wants-weights") as client:
            assert torch.isfinite((await client.forward(input_ids=IDS)).logits).all()


async def test_an_adapter_that_needs_base_weights_is_not_loaded(tmp_path: Any) -> None:
    """The adapters are a DoRA adapter from plain PEFT, and a PiSSA adapter that changed its base model."""
    model = tiny_model()
    for options in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        folder = tmp_path / next(iter(options))
        peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**options, **ON)).save_pretrained(str(folder))
        async with symbiosis.Executor(copy.deepcopy(model)) as executor, executor.client() as client:
            with pytest.raises(PlaceholderError, match=next(iter(options))):
                client.load_adapter(folder)


async def test_merging_is_refused(base: Any) -> None:
    """merge_adapter and merge_and_unload write into base weights, which the client lacks: they raise, and change
    nothing.
    """
    config = peft.LoraConfig(init_lora_weights=False, **ON)
    async with symbiosis.Executor(base) as executor, executor.client(config) as client:
        before = (await client.forward(input_ids=IDS)).logits
        for merge in (client.model.merge_adapter, client.model.merge_and_unload):
            with pytest.raises((PlaceholderError, RuntimeError)):
                await client.run(merge)
        assert torch.equal((await client.forward(input_ids=IDS)).logits, before)
