"""What an executor says that it shares, and what it refuses to hand out."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import symbiosis
from symbiosis.errors import PlaceholderError, ShareError, SplitError, UnknownNameError
from symbiosis.executor.sharing import Sharing, Unserved, describe, sharing_of, size_text
from symbiosis.executor.splitting import SplitModel
from symbiosis.testing import Comparison, Job, run_job, run_job_plain, tiny_model
from symbiosis.testing.zoo import zoo_model
from tests.helpers import IDS
from tests.moe import MIXTURES, mixture


def size_of(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("base_layers", ["linear", "mlp"])
def test_every_byte_is_served_or_held(base_layers: str) -> None:
    model = tiny_model(tie_word_embeddings=False)
    sharing = sharing_of(SplitModel(model, base_layers))
    assert sharing.served + sharing.held == size_of(model)
    assert sharing.unserved == ()


def test_a_tied_head_counts_as_held() -> None:
    model = tiny_model(tie_word_embeddings=True)
    sharing = sharing_of(SplitModel(model))
    assert sharing.held >= model.lm_head.weight.numel() * 4
    assert sharing.served + sharing.held == size_of(model)


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "OPTForCausalLM", "MixtralForCausalLM", "Wav2Vec2ForCTC", "RwkvForCausalLM"]
)
def test_what_is_held_is_what_is_sent(name: str) -> None:
    executor = symbiosis.Executor(zoo_model(name))
    share = executor.service.share()
    assert executor.sharing.held == sum(tensor.numel() * tensor.element_size() for tensor in share.tensors.values())
    assert {one.name for one in executor.sharing.unserved} <= share.tensors.keys()


def test_large_tensors_of_any_kind_are_listed() -> None:
    model = tiny_model()
    model.vector = nn.Parameter(torch.zeros(1 << 16))
    model.waves = nn.Conv1d(64, 64, 64)
    sharing = sharing_of(SplitModel(model))
    assert {one.name for one in sharing.leaving()} == {"vector", "waves.weight"}


def change(model: Any, what: str) -> None:
    block = model.model.layers[1]
    if what == "a hook on a block":
        block.register_forward_hook(lambda module, args, out: out * 2)
    elif what == "a hook on gradients of a norm":
        model.model.norm.register_full_backward_hook(lambda module, gradients, _: (gradients[0] * 2,))
    elif what == "a hook before a linear layer":
        block.mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    elif what == "a method on a norm":
        block.input_layernorm.forward = types.MethodType(lambda self, x: x, block.input_layernorm)
    elif what == "a method on a linear layer":
        layer = block.mlp.down_proj
        layer.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight) * 2, layer)


@pytest.mark.parametrize(
    "what", ["a hook on a block", "a hook before a linear layer", "a method on a norm", "a method on a linear layer"]
)
async def test_changes_in_code_reach_clients_of_the_process_and_are_refused_for_others(what: str) -> None:
    """Clients in other processes would get other results, without a word."""
    model = tiny_model()
    unchanged = model(input_ids=IDS).logits
    change(model, what)
    expected = model(input_ids=IDS).logits
    assert not torch.allclose(expected, unchanged)
    async with symbiosis.Executor(model) as executor, executor.client() as client:
        assert torch.equal((await client.forward(input_ids=IDS)).logits, expected)
        with pytest.raises(
            ShareError, match=r"model\.layers\.1.* has hooks or a forward of its own, which would not reach"
        ):
            executor.service.share()


def test_hooks_on_gradients_are_refused_for_others() -> None:
    model = tiny_model()
    change(model, "a hook on gradients of a norm")
    with pytest.raises(ShareError, match=r"model\.norm .* has hooks"):
        symbiosis.Executor(model).service.share()


def test_changes_that_change_no_result_are_shared() -> None:
    model: Any = tiny_model()
    model.enable_input_require_grads()
    model.forward = torch.compile(model.forward, backend="eager")
    assert symbiosis.Executor(model).service.share().tensors


def test_a_configuration_that_json_cannot_represent() -> None:
    model: Any = tiny_model()
    model.generation_config.sequence_bias = {(5,): -10.0}
    with pytest.raises(
        ShareError, match="configuration cannot be sent to clients in other processes: keys must be str"
    ):
        symbiosis.Executor(model).service.share()


async def test_no_weight_leaves_over_an_unknown_transport_by_default() -> None:
    """It may be for other hosts, as tcp:// is."""
    model = tiny_model()
    model.vector = nn.Parameter(torch.zeros(1 << 16))
    async with symbiosis.Executor(model) as executor:
        for address in ("tcp://127.0.0.1:0", "mine://x"):
            with pytest.raises(ShareError, match="vector"):
                await executor.listen(address)
        with pytest.raises(UnknownNameError):
            await executor.listen("mine://x", keep_weights=False)


def test_executors_that_allow_other_weights_have_other_fingerprints() -> None:
    """Otherwise a process that has the share of one would use it for the other."""
    one, other = (symbiosis.Executor(tiny_model(), allow_weights=allowed) for allowed in ((), ("lm_head",)))
    fingerprints = {executor.service.share().description["fingerprint"] for executor in (one, other)}
    assert len(fingerprints) == 2


@pytest.mark.parametrize("name", MIXTURES)
def test_nothing_of_a_mixture_leaves_but_routers(name: str) -> None:
    sharing = sharing_of(SplitModel(mixture(name)))
    assert not sharing.leaving()
    assert all("expert" not in one.name for one in sharing.unserved)


def fused() -> nn.Module:
    """Return a model with a weight of 1 MiB that is neither linear nor an embedding."""
    model = tiny_model()
    model.fused = nn.Bilinear(8, 4096, 8, bias=False)
    return model


def test_weights_that_would_leave() -> None:
    sharing = sharing_of(SplitModel(fused()))
    assert [(one.name, one.bytes) for one in sharing.leaving()] == [("fused.weight", 1 << 20)]
    assert "Bilinear is no linear layer" in sharing.leaving()[0].reason
    assert "not served: fused.weight, 1 MiB (Bilinear" in sharing.lines()[1]


def test_many_small_weights_are_large_together() -> None:
    small = [Unserved(f"layers.{i}.w", 60 << 10, "why") for i in range(20)]
    assert len(Sharing(4 << 20, 2 << 20, tuple(small)).leaving()) == 20
    assert Sharing(4 << 20, 2 << 20, tuple(small[:10])).leaving() == []
    assert Sharing(4 << 30, 2 << 20, tuple(small)).leaving() == []


@pytest.mark.parametrize("keep_weights", [None, True, False])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_an_address_is_refused_where_weights_would_leave(scheme: str, keep_weights: Any, tmp_path: Any) -> None:
    address = f"shm://{tmp_path}/s" if scheme == "shm" else "tcp://127.0.0.1:0"
    async with symbiosis.Executor(fused()) as executor:
        if keep_weights or (keep_weights is None and scheme == "tcp"):
            with pytest.raises(ShareError, match=r"fused\.weight, 1 MiB \(Bilinear.*--no-keep-weights"):
                await executor.listen(address, keep_weights=keep_weights)
            assert len(executor.status()["addresses"]) == 1
        else:
            await executor.listen(address, keep_weights=keep_weights)


def test_weights_in_all_blocks_are_one_line() -> None:
    weights = [Unserved(f"layers.{i}.gate.weight", 1 << 20, "it routes") for i in range(3)]
    weights += [Unserved(f"odd{chr(97 + i)}", 1024, "odd") for i in range(7)]
    assert describe(weights) == [
        "layers.*.gate.weight, 3 MiB in 3 blocks (it routes)",
        *(f"odd{letter}, 1 KiB (odd)" for letter in "abcd"),
        "3 further weights, 3 KiB",
    ]


@pytest.mark.parametrize(("size", "text"), [(0, "0 KiB"), (1536, "1.5 KiB"), (3 << 20, "3 MiB"), (5 << 29, "2.5 GiB")])
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text


async def test_the_executor_says_what_it_shares() -> None:
    async with symbiosis.Executor(zoo_model("FalconForCausalLM")) as executor:
        status = executor.status()
        assert (status["served_bytes"], status["client_bytes"]) == executor.sharing[:2]
        assert status["served_bytes"] > 0


async def test_a_weight_that_is_allowed_to_leave_is_trained_in_another_process(tmp_path: Any) -> None:
    """modules_to_save of a base layer, over a transport: the numbers of plain PEFT."""
    model = tiny_model(tie_word_embeddings=False)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    job = Job(steps=3, new_tokens=4)
    expected = run_job_plain(model, config, job)
    async with symbiosis.Executor(copy.deepcopy(model), allow_weights=["lm_head"], packed=True) as executor:
        assert executor.sharing.held >= model.lm_head.weight.numel() * 4
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base:
            async with base.client(config, seed=0) as client:
                comparison = Comparison.of(await run_job(client, job), expected)
                assert comparison.worst() <= 1e-5, comparison
            async with base.client() as other:
                with torch.no_grad():
                    assert torch.allclose((await other.forward(input_ids=IDS)).logits, model(input_ids=IDS).logits)


async def test_a_weight_that_is_not_allowed_to_leave(tmp_path: Any) -> None:
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    async with symbiosis.Executor(tiny_model(tie_word_embeddings=False)) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base:
            with pytest.raises(PlaceholderError, match=r"lm_head: its weight stays.*--allow-weights lm_head"):
                async with base.client(config):
                    pass


@pytest.mark.parametrize("part", ["lm_head", "mlp"])
async def test_an_adapter_with_a_part_of_its_own_is_loaded(part: str, tmp_path: Any) -> None:
    """All values of the part are in the adapter, so none has to leave the executor."""
    model = tiny_model(tie_word_embeddings=False)
    config = LoraConfig(target_modules=["q_proj"], modules_to_save=[part], task_type="CAUSAL_LM")
    plain = get_peft_model(copy.deepcopy(model), config).eval()
    for name, parameter in plain.named_parameters():
        if "modules_to_save" in name:
            nn.init.normal_(parameter, std=0.1)
    plain.save_pretrained(str(tmp_path / "adapter"))
    async with symbiosis.Executor(model) as executor:
        await executor.listen(f"shm://{tmp_path}/s")
        async with symbiosis.connect(f"shm://{tmp_path}/s") as base, base.client() as client:
            client.load_adapter(tmp_path / "adapter")
            with torch.no_grad():
                logits = (await client.forward(input_ids=IDS)).logits
                torch.testing.assert_close(logits, plain(input_ids=IDS).logits)
            client.load_adapter(tmp_path / "adapter", name="other")
            with pytest.raises(PlaceholderError, match=r"weight stays with the executor"):
                client.load_adapter(tmp_path / "adapter", name="trainable", trainable=True)
            async with base.client() as client:
                client.model.load_adapter(str(tmp_path / "adapter"))  # the method of transformers
                with torch.no_grad():
                    logits = (await client.forward(input_ids=IDS)).logits
                torch.testing.assert_close(logits, plain(input_ids=IDS).logits)


def test_only_linear_base_layers_can_be_allowed() -> None:
    with pytest.raises(SplitError, match=r"'nothing' matches no linear base layer"):
        symbiosis.Executor(tiny_model(), allow_weights=["nothing"])


def test_a_layer_that_no_pattern_names_is_told_as_such() -> None:
    """It could be served, so its class is not the reason."""
    unserved = symbiosis.Executor(mixture("mixtral"), base_layers="*_proj").sharing.unserved
    assert {one.reason for one in unserved if "experts" in one.name} == {"it is not named in base_layers"}
